"""The op vocabulary: what every step of a forward pass means, in plain torch.

This class is the specification that other backends are held to. It is cut where a fast path fuses;
the bodies here compose simple operations (`g4spec.ops.simple`, which says what holds for
all of them).

Two kinds of values pass between ops. Numbers are float32 tensors [T, N]. *Rows* are what a product
reads: a backend may keep them in another order and precision, so models hand them on and never look
inside. Here both are the same. `linear`, `gated` and the other products take either.

Attention sums over blocks of :data:`BLOCK` keys aligned by absolute position, in order of position,
for tiles of 16 rows. A block that is masked for a row contributes exact zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from g4spec.models.spec import MAX_STEP_ROWS, Reach
from g4spec.ops.kv import LayerKV
from g4spec.ops.simple import TILE, SimpleOps, in_order, pad_rows

if TYPE_CHECKING:
    from g4spec.gguf import GGUF
    from g4spec.models.spec import Attention, CacheShape, Chooser, Draft, ExpertLayer, Pick
    from g4spec.ops.sampling import Sampler
    from g4spec.runtime.speculate import Player
    from g4spec.runtime.target import Target

__all__ = ["BLOCK", "TILE", "Ops"]

Run = Callable[..., tuple[torch.Tensor, ...]]
"""(ids [T], positions [T], *rows) -> tensors with T rows each. Shapes decide what it does, never
values: it may be recorded."""

Graph = Callable[..., tuple[torch.Tensor, ...]]
"""(ids, first position, *rows) -> what its `Run` returns."""

Reader = Callable[..., tuple[torch.Tensor, dict[int, torch.Tensor]]]
"""(ids, first position, taps) -> what a model's `forward` returns."""

Spans = dict[Reach, tuple[torch.Tensor, torch.Tensor]]
"""First and last position that rows see, int64 [T] each."""

BLOCK = 64
"""Keys per attention block; block b holds absolute positions [64 b, 64 b + 64)."""


class Ops(SimpleOps):
    """Reference backend. Every method works on any torch device; `CudaOps` overrides a subset."""

    def load(self, file: GGUF, name: str) -> Any:
        """Tensor `name` as this backend computes with it. Here: dequantized to float32, or int64
        for index tensors; PyTorch order."""
        return self.array(file.array(name))

    chunk = 512
    """Tokens of a prompt read at a time, where nothing else is asked for."""

    def slack(self, chunk: int) -> int:
        """Rows a target's rings need beyond their window to read chunks of this size."""
        return max(chunk, MAX_STEP_ROWS)

    def cache(self, shape: CacheShape, n_ctx: int, slack: int) -> LayerKV:
        """An empty cache of one layer: see `LayerKV`."""
        return LayerKV(shape.n_kv, shape.head_dim, n_ctx, shape.window, slack, self.device)

    def chooser(self, sampler: Sampler) -> Chooser:
        """What turns logits on this device into tokens as `sampler` says."""
        return sampler

    def graph(self, run: Run, sizes: Sequence[int], keep: int = 0) -> Graph:
        """`run` as a function of token ids, their first position, and tensors with a row a token.

        A backend may record `run` for each of `sizes` rows, play that again for calls of at most
        so many rows (rows behind the last are padding), and run longer calls as they are. What is
        returned then lasts until the next call, but for the first `keep` tensors.
        """

        def direct(ids: Sequence[int], start: int, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return run(self.ids(list(ids)), self.positions(start, len(ids)), *rows)

        return direct

    def player(
        self, target: Target, draft: Draft | None, forced: int | None = None, keep: bool = False
    ) -> Player | None:
        """What plays cycles of the two as a whole, or without a draft plain steps, where a backend
        can; else the loop does it.

        Args:
            forced: accept so many drafted tokens, whatever they are (for measurements).
            keep: whether plain steps bring what a draft is given of them later (`Played.read`).
        """
        return None

    def reader(self, model: Any, caches: Sequence[Any], n_ctx: int, chunk: int) -> Reader:
        """How chunks of a prompt are read: `model.forward` over its caches.

        Args:
            n_ctx: positions the sequence may have. chunk: most tokens of a call.
        """

        def read(
            ids: Sequence[int], start: int, taps: tuple[int, ...]
        ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
            positions = self.positions(start, len(ids))
            out: tuple[torch.Tensor, dict[int, torch.Tensor]] = model.forward(
                self.ids(list(ids)), positions, caches, taps
            )
            return out

        return read

    def spans(self, positions: torch.Tensor, reaches: Iterable[Reach]) -> Spans:
        """What rows at consecutive `positions` [T] see."""
        out = {}
        for reach in reaches:
            own = positions[:1].expand_as(positions) if reach.from_first else positions
            last = positions[-1:].expand_as(positions) if reach.to_last else positions
            first = own * 0 if reach.back is None else (own - reach.back).clamp(min=0)
            out[reach] = first.contiguous(), last.contiguous()
        return out

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        """`rms_norm` of x [T, H] as rows."""
        return self.rms_norm(x, weight, eps)

    def norm_residual_norm(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        following: torch.Tensor | None,
        scale: torch.Tensor | None = None,
        *,
        numbers: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        """The end of a sublayer and the start of the next.

        Args:
            h: what the sublayer made, [T, H] or in parts (see `linear`), normed with `weight` [H]
                first unless that is None.
            x: the residual it is added to, [T, H]. `scale` [1]: factor on the sum.
            following: weight [H] of the norm that the next sublayer begins with, or None.
            numbers: return the normed rows as numbers.

        Returns:
            The new residual [T, H], and its norm as rows (None without `following`).
        """
        x = x + (h if weight is None else self.rms_norm(h, weight, eps))
        x = x if scale is None else x * scale
        return x, None if following is None else self.rms_norm(x, following, eps)

    def qkv(
        self,
        h: Any,
        a: Attention,
        positions: torch.Tensor,
        kv: LayerKV | None,
        *,
        queries: bool = True,
    ) -> torch.Tensor:
        """Project rows h [T, H], norm and rotate heads, append keys and values to `kv`.

        Args:
            kv: where keys and values go, or without keys what the queries will meet.
            queries: whether they are wanted; rows of a draft's context have none.

        Returns:
            Queries [T, n_head, head_dim], or no heads.
        """
        rotate = self.rope_pairs if a.pairs else self.rope

        def heads(weight: Any) -> torch.Tensor:
            return self.linear(h, weight).view(len(h), -1, a.head_dim)

        def turned(y: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
            y = y if norm is None else self.rms_norm(y, norm, a.eps)
            return rotate(y, positions, a.freqs)

        if a.k is not None:
            assert kv is not None
            k = heads(a.k)
            v = k if a.v is None else heads(a.v)
            v = self.rms_norm(v, None, a.eps) if a.v_norm else v
            kv.append(positions, turned(k, a.k_norm), v)
        if not queries:
            return positions.new_empty(len(h), 0, a.head_dim, dtype=torch.float32)
        return turned(heads(a.q), a.q_norm)

    def expert_layer(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        e: ExpertLayer,
        following: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Any]:
        """A layer's end after its attention h [T, H] on residual x [T, H], where experts stand
        beside a dense branch. They are chosen by the residual itself, and read it normed with a
        weight of their own.

        Returns:
            As `norm_residual_norm`: the residual times `scale` [1], and its norm by `following`.
        """
        x, rows = self.norm_residual_norm(h, x, e.post_attention, e.eps, e.ffn_norm)
        dense = self.gated(rows, e.gate, e.up, e.down, self.gelu_tanh)
        ids, weights = self.route(x, e.router_norm, e.router, e.gains, e.n_used, e.eps)
        rows = self.norm_rows(x, e.expert_norm, e.eps)
        routed = self.experts(rows, ids, weights, e.gate_exps, e.up_exps, e.down_exps,
                              self.gelu_tanh)  # fmt: skip
        dense = self.rms_norm(dense, e.post_dense, e.eps)
        both, _ = self.norm_residual_norm(routed, dense, e.post_experts, e.eps, None)
        return self.norm_residual_norm(both, x, e.post, e.eps, following, scale)

    def logits(
        self, hidden: torch.Tensor, table: Any, cap: float = 0.0, scale: float = 1.0
    ) -> torch.Tensor:
        """table [V, H] times hidden [T, H], times `scale`, softcapped if `cap` -> [T, V]."""
        z = self.linear(hidden, table)
        z = z if scale == 1.0 else z * scale
        return self.softcap(z, cap) if cap else z

    def pick(
        self, hidden: torch.Tensor, table: Any, pick: Pick, at: int, cap: float = 0.0
    ) -> torch.Tensor:
        """The drafted tokens at, at + 1, ... [T] that `pick` chooses from the logits of hidden
        [T, H]. Logits that cannot win need not be exact."""
        return pick(self.logits(hidden, table, cap), at)

    def keys_values(
        self, h: Any, layers: Sequence[Attention], positions: torch.Tensor, kvs: Sequence[Any]
    ) -> None:
        """Append keys and values of rows h to the cache of each of these layers, as `qkv` does.
        Calls with the same first layer have the same others."""
        for a, kv in zip(layers, kvs, strict=True):
            self.qkv(h, a, positions, kv, queries=False)

    def attend(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        first: torch.Tensor,
        last: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """softmax(scale * q k) v over the keys of absolute positions first[t] .. last[t].

        Args:
            q: [T, n_head, D]; head h reads KV head h // (n_head / n_kv).
            first, last: [T] int64, both ends included, first <= last.

        Returns:
            [T, n_head * D].
        """
        out = []
        for start in range(0, len(q), TILE):
            rows = slice(start, start + TILE)
            out.append(self._attend_tile(q[rows], kv, first[rows], last[rows], scale))
        return torch.cat(out)

    def _attend_tile(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        first: torch.Tensor,
        last: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        n, n_head, dim = q.shape
        group = n_head // kv.n_kv
        lo, hi = int(first.min()), int(last.max())
        keys, values = kv.blocks(lo, hi, BLOCK)  # [B, n_kv, BLOCK, D]
        # [TILE, n_kv, group, D] -> [n_kv, TILE * group, D]
        q = pad_rows(q).view(TILE, kv.n_kv, group, dim)
        q = q.permute(1, 0, 2, 3).reshape(1, kv.n_kv, TILE * group, dim)
        scores = torch.matmul(q.expand(len(keys), -1, -1, -1), keys.transpose(-1, -2)) * scale

        position = torch.arange(len(keys) * BLOCK, device=self.device) + lo // BLOCK * BLOCK
        first, last = pad_rows(first), pad_rows(last)
        seen = (position >= first[:, None]) & (position <= last[:, None])  # [TILE, B * BLOCK]
        seen = seen.view(TILE, 1, len(keys), BLOCK).expand(-1, group, -1, -1)
        seen = seen.reshape(TILE * group, len(keys), BLOCK).permute(1, 0, 2).unsqueeze(1)
        scores = scores.masked_fill(~seen, -math.inf)

        top = scores.amax(dim=(0, 3), keepdim=True)
        weights = torch.exp(scores - top)
        parts = torch.matmul(weights, values)  # [B, n_kv, TILE * group, D]
        sums = weights.sum(-1, keepdim=True)
        total, norm = parts[0], sums[0]
        for b in range(1, len(keys)):  # in order of position, whatever the number of blocks
            total, norm = total + parts[b], norm + sums[b]
        y = (total / norm).view(kv.n_kv, TILE, group, dim).permute(1, 0, 2, 3)
        return y.reshape(TILE, n_head * dim)[:n]

    def gated(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        parts: bool = False,
    ) -> torch.Tensor:
        """down(activation(gate x) * up x): x [T, H], gate and up [I, H], down [H, I]. `parts`: as
        of `linear`."""
        inner = activation(self.linear(x, gate)) * self.linear(x, up)
        return self.linear(inner, down, parts=parts)

    def modulated(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        by: torch.Tensor,
        down: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """down(activation(gate x) * by): x [T, H], gate [P, H], by [T, P], down [H, P]."""
        return self.linear(activation(self.linear(x, gate)) * by, down)

    def per_layer_inputs(
        self,
        tokens: torch.Tensor,
        x: torch.Tensor,
        proj: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Gemma's per-layer inputs: (rms_norm(proj x / sqrt(H)) + tokens) / sqrt(2) -> [T, L, P].

        Args:
            tokens: scaled rows of the per-layer token table, [T, L * P].
            x: scaled token embeddings [T, H]. `proj`: [L * P, H]. `norm`: [P], for every layer.
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
        """Which experts each row x [T, H] visits, and their weights in the sum.

        Scores are gate [E, H] times rms_norm(x) * scale [H] / sqrt(H). The `top_k` largest win
        (lowest id on a tie); their softmax sums to one and is then multiplied by `gains` [E].

        Returns:
            Ids [T, top_k] int64, best first, and weights [T, top_k].
        """
        scores = self.linear(self.rms_norm(x, scale, eps) / math.sqrt(x.shape[1]), gate)
        best, ids = scores.sort(dim=-1, descending=True, stable=True)
        best, ids = best[:, :top_k], ids[:, :top_k]
        weights = torch.exp(best - best[:, :1])
        return ids, weights / in_order(weights)[:, None] * gains[ids]

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
        """Weighted sum over the experts of each row, best first -> [T, H].

        Only experts that a row visits are computed, in tiles of 16 rows like every product, so
        that neither the rows beside a row nor the experts they visit change its bits.

        Args:
            x: [T, H]. `ids`, `weights`: [T, k], see `route`.
            gate, up: [E, I, H], or all of it in `gate` [E, 2 I, H]. `down`: [E, H, I].
        """
        if up is None:
            gate, up = gate.chunk(2, dim=1)
        out = x.new_empty(*ids.shape, x.shape[1])
        for e in sorted(set(ids.flatten().tolist())):
            rows, place = (ids == e).nonzero(as_tuple=True)
            out[rows, place] = self.gated(x[rows], gate[e], up[e], down[e], activation)
        return in_order(out * weights[..., None])
