"""The ops that models are written in, as a reference implementation in plain torch.

This class is the specification of other backends. Its methods are the units that a fast backend
fuses; the bodies here are composed of simple operations (`g4spec.ops.simple`, which states the
rules for all of them).

Two kinds of values pass between ops. *Numbers* are float32 tensors [T, N]. *Rows* are the inputs of
matmuls: a backend may store them in another layout and precision, so models pass them on without
looking inside. In this class both are the same. `linear`, `gated` and the other matmuls accept
either.

Attention sums over blocks of `BLOCK` keys, aligned by absolute position and in order of position,
for tiles of 16 rows (`g4spec.ops.spans`). A block that is masked for a row contributes exact zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from g4spec.core import Batch, Pick, Reach
from g4spec.ops.kv import LayerKV
from g4spec.ops.simple import TILE, SimpleOps, sum_in_order
from g4spec.ops.spans import BLOCK, Span, TileGroup

if TYPE_CHECKING:
    from g4spec.ops.weights import Attention, ExpertLayer

__all__ = ["TILE", "Ops"]

Spans = dict[Reach, Span]
"""The positions that rows attend to, by reach."""


class Ops(SimpleOps):
    """The reference ops. Every method works on any torch device; `CudaOps` overrides some of
    them."""

    def spans(self, batch: Batch, reaches: Iterable[Reach]) -> Spans:
        """Return the first and last position that each row of `batch` attends to, by reach."""
        out, own = {}, batch.positions
        starts = torch.tensor(batch.starts, device=self.device)
        sizes = torch.tensor(batch.sizes, device=self.device)
        for reach in reaches:
            begin = own[starts].repeat_interleave(sizes) if reach.from_first else own
            ends = own[starts + sizes - 1].repeat_interleave(sizes) if reach.to_last else own
            first = begin * 0 if reach.back is None else (begin - reach.back).clamp(min=0)
            out[reach] = Span(batch, first, ends)
        return out

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        """Apply `rms_norm` to x [T, H]; return rows."""
        return self.rms_norm(x, weight, eps)

    def norm_residual_norm(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None = None,
        *,
        unpacked: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        """Finish a sublayer and normalize for the next one.

        Args:
            h: output of the sublayer, [T, H] or partial sums (see `linear`); normed with `weight`
                [H] first unless that is None.
            x: residual [T, H], to which it is added.
            scale: factor of the sum, [1].
            next_norm: norm weight [H] of the next sublayer, or None.
            unpacked: return the norm as a float32 tensor instead of rows.

        Returns:
            The new residual [T, H], and its norm as rows (None without `next_norm`).
        """
        x = x + (h if weight is None else self.rms_norm(h, weight, eps))
        x = x if scale is None else x * scale
        return x, None if next_norm is None else self.rms_norm(x, next_norm, eps)

    def qkv(
        self,
        h: Any,
        a: Attention,
        batch: Batch,
        kv: LayerKV | None,
        *,
        queries: bool = True,
    ) -> torch.Tensor:
        """Project rows h [T, H], norm and rotate the heads, and append keys and values to `kv`.

        Args:
            kv: cache for keys and values; without key projection, the cache that the queries will
                read.
            queries: whether queries are needed; rows of a draft's context need none.

        Returns:
            Queries [T, n_head, head_dim], or an empty tensor.
        """
        rotate = self.rope_interleaved if a.interleaved else self.rope
        angles = self.angles(batch.positions, a.freqs)

        def heads(weight: Any) -> torch.Tensor:
            return self.linear(h, weight).view(len(h), -1, a.head_dim)

        def turned(y: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
            y = y if norm is None else self.rms_norm(y, norm, a.eps)
            return rotate(y, angles)

        if a.k is not None:
            assert kv is not None
            k = heads(a.k)
            v = k if a.v is None else heads(a.v)
            v = self.rms_norm(v, None, a.eps) if a.v_norm else v
            kv.append(batch.slots, batch.positions, turned(k, a.k_norm), v)
        if not queries:
            return batch.positions.new_empty(len(h), 0, a.head_dim, dtype=torch.float32)
        return turned(heads(a.q), a.q_norm)

    def expert_layer(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        e: ExpertLayer,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Any]:
        """Finish a layer with experts beside a dense branch, after its attention h [T, H] on
        residual x [T, H]. The router reads the residual; the experts read it normed with their own
        weight.

        Returns:
            As `norm_residual_norm`: the residual times `scale` [1], and its norm by `next_norm`.
        """
        x, rows = self.norm_residual_norm(h, x, e.post_attention, e.eps, e.ffn_norm)
        dense = self.gated(rows, e.gate, e.up, e.down, self.gelu_tanh)
        ids, weights = self.route(x, e.router_norm, e.router, e.gains, e.n_used, e.eps)
        rows = self.norm_rows(x, e.expert_norm, e.eps)
        routed = self.experts(
            rows, ids, weights, e.gate_exps, e.up_exps, e.down_exps, self.gelu_tanh
        )
        dense = self.rms_norm(dense, e.post_dense, e.eps)
        both, _ = self.norm_residual_norm(routed, dense, e.post_experts, e.eps, None)
        return self.norm_residual_norm(both, x, e.post, e.eps, next_norm, scale)

    def logits(
        self, hidden: torch.Tensor, table: Any, cap: float = 0.0, scale: float = 1.0
    ) -> torch.Tensor:
        """Compute table [V, H] times hidden [T, H], times `scale`, softcapped if `cap` -> [T,
        V]."""
        z = self.linear(hidden, table)
        z = z if scale == 1.0 else z * scale
        return self.softcap(z, cap) if cap else z

    def pick(
        self, hidden: torch.Tensor, table: Any, pick: Pick, at: int, cap: float = 0.0
    ) -> torch.Tensor:
        """Return the drafted tokens at, at + 1, ... [T] that `pick` chooses from the logits of
        hidden [T, H]. Logits that cannot win need not be exact."""
        return pick(self.logits(hidden, table, cap), at)

    def keys_values(
        self, h: Any, layers: Sequence[Attention], batch: Batch, kvs: Sequence[Any]
    ) -> None:
        """Append the keys and values of rows h to the cache of each of these layers, as `qkv` does.
        Calls with the same first layer must have the same other layers."""
        for a, kv in zip(layers, kvs, strict=True):
            self.qkv(h, a, batch, kv, queries=False)

    def attend(self, q: torch.Tensor, kv: LayerKV, span: Span, scale: float) -> torch.Tensor:
        """Compute softmax(scale * q k) v over the keys of the positions of `span` in the slot of
        each row.

        Args:
            q: [T, n_head, D]; head h reads KV head h // (n_head / n_kv).

        Returns:
            [T, n_head * D].
        """
        out = [self._attend_tiles(q, kv, tiles, scale) for tiles in span.tiles.groups]
        return (out[0] if len(out) == 1 else torch.cat(out)).flatten(0, 1)[span.tiles.real]

    def _attend_tiles(
        self, q: torch.Tensor, kv: LayerKV, tiles: TileGroup, scale: float
    ) -> torch.Tensor:
        """Compute attention of the rows of N tiles -> [N, TILE, n_head * D]."""
        count, (n_head, dim) = len(tiles.rows), q.shape[1:]
        group = n_head // kv.n_kv
        keys, values = kv.blocks(tiles)  # [N * B, n_kv, BLOCK, D]
        blocks = len(keys) // count
        # [N, TILE, n_kv, group, D] -> [N * B, n_kv, TILE * group, D]
        x = q[tiles.rows].view(count, TILE, kv.n_kv, group, dim).transpose(1, 2)
        x = x.reshape(count, 1, kv.n_kv, TILE * group, dim).expand(-1, blocks, -1, -1, -1)
        scores = torch.matmul(x.flatten(0, 1), keys.transpose(-1, -2)).mul_(scale)
        scores.view(count, blocks, kv.n_kv, TILE, group, BLOCK).masked_fill_(
            tiles.hidden, -math.inf
        )
        scores = scores.view(count, blocks, kv.n_kv, TILE * group, BLOCK)
        weights = scores.sub_(scores.amax(dim=(1, 4), keepdim=True)).exp_()
        parts = torch.matmul(weights.flatten(0, 1), values)
        parts = parts.view(count, blocks, kv.n_kv, TILE * group, dim)
        y = sum_in_order(parts) / sum_in_order(
            weights.sum(-1, keepdim=True)
        )  # whatever their number
        y = y.view(count, kv.n_kv, TILE, group, dim).transpose(1, 2)
        return y.reshape(count, TILE, n_head * dim)

    def gated(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        partial_sums: bool = False,
    ) -> torch.Tensor:
        """Compute down(activation(gate x) * up x): x [T, H], gate and up [I, H], down [H, I].
        `partial_sums`: see `linear`."""
        inner = activation(self.linear(x, gate)) * self.linear(x, up)
        return self.linear(inner, down, partial_sums=partial_sums)

    def modulated(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        by: torch.Tensor,
        down: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Compute down(activation(gate x) * by): x [T, H], gate [P, H], by [T, P], down [H, P]."""
        return self.linear(activation(self.linear(x, gate)) * by, down)

    def per_layer_inputs(
        self,
        tokens: torch.Tensor,
        x: torch.Tensor,
        proj: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Compute Gemma's per-layer inputs: (rms_norm(proj x / sqrt(H)) + tokens) / sqrt(2) -> [T,
        L, P].

        Args:
            tokens: scaled rows of the per-layer embedding table, [T, L * P].
            x: scaled token embeddings [T, H].
            proj: [L * P, H].
            norm: [P], the same for every layer.
        """
        shape = (len(x), -1, norm.shape[0])
        context = (self.linear(x, proj) / math.sqrt(x.shape[1])).view(shape)
        return (self.rms_norm(context, norm, eps) + tokens.view(shape)) * math.sqrt(0.5)

    def route(
        self,
        x: torch.Tensor,
        scale: torch.Tensor,
        gate: torch.Tensor,
        gains: torch.Tensor,
        top_k: int,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each row x [T, H] and their weights.

        Scores are gate [E, H] times rms_norm(x) * scale [H] / sqrt(H). The `top_k` largest are
        chosen (lowest id on a tie); their softmax is multiplied by `gains` [E].

        Returns:
            Ids [T, top_k] int64, best first, and weights [T, top_k].
        """
        scores = self.linear(self.rms_norm(x, scale, eps) / math.sqrt(x.shape[1]), gate)
        best, ids = scores.sort(dim=-1, descending=True, stable=True)
        best, ids = best[:, :top_k], ids[:, :top_k]
        weights = torch.exp(best - best[:, :1])
        return ids, weights / sum_in_order(weights)[:, None] * gains[ids]

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor | None,
        down: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Compute the weighted sum over the experts of each row, best first -> [T, H].

        Only chosen experts are computed, in tiles of 16 rows like every matmul, so that the bits of
        a row do not depend on the other rows or their experts.

        Args:
            x: [T, H].
            ids, weights: [T, k], see `route`.
            gate, up: [E, I, H], or both in `gate` [E, 2 I, H].
            down: [E, H, I].
        """
        if up is None:
            gate, up = gate.chunk(2, dim=1)
        out = x.new_empty(*ids.shape, x.shape[1])
        for e in sorted(set(ids.flatten().tolist())):
            rows, place = (ids == e).nonzero(as_tuple=True)
            out[rows, place] = self.gated(x[rows], gate[e], up[e], down[e], activation)
        return sum_in_order(out * weights[..., None])
