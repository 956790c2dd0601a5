"""The op vocabulary: what every step of a forward pass means, in plain torch.

This class is the specification that other backends are held to. Arithmetic is float32 with float32
accumulation; nothing is rounded in between.

One property holds by construction and is tested: a row's result does not depend on how many rows
are computed beside it, nor on its place among them. Torch picks other kernels for 1, 2 or 3 rows
than for 16, so `linear` and `attend` always compute tiles of exactly :data:`TILE` rows, and
attention sums over blocks of :data:`BLOCK` keys aligned by absolute position, in order of position.
A block that is masked for a row contributes exact zeros. Activations are composed from `exp` and
`tanh`, because torch's fused `gelu`, `silu` and `sigmoid` round differently at the end of a vector
(seen with torch 2.13 and AVX-512), which would make the result depend on the place in the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from g4spec.gguf import GGUF
    from g4spec.runtime.kv import LayerKV

TILE = 16
"""Rows computed together, always."""

BLOCK = 64
"""Keys per attention block; block b holds absolute positions [64 b, 64 b + 64)."""


class Ops:
    """Reference backend. Every method works on any torch device; `CudaOps` overrides a subset."""

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def load(self, file: GGUF, name: str) -> torch.Tensor:
        """Tensor `name` dequantized to float32, or int64 for index tensors; PyTorch order."""
        return self.array(file.array(name))

    def array(self, data: np.ndarray[Any, Any]) -> torch.Tensor:
        """A numpy array on the device: floats as float32, integers as int64."""
        index = data.dtype.kind in "iu"
        dtype = np.int64 if index else np.float32
        return torch.from_numpy(np.array(data, dtype=dtype)).to(self.device)

    def ids(self, tokens: list[int]) -> torch.Tensor:
        """Token ids as an index tensor [T]."""
        return torch.tensor(tokens, dtype=torch.int64, device=self.device)

    def positions(self, start: int, count: int) -> torch.Tensor:
        """[start, start + 1, ...] of length `count`, int64."""
        return torch.arange(start, start + count, device=self.device)

    def concat(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Parts [T, H_i] side by side -> [T, sum H_i]."""
        return torch.cat(parts, dim=-1)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Parts [T_i, H] below each other -> [sum T_i, H]."""
        return torch.cat(parts)

    def embed(self, table: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Rows `ids` [T] of `table` [V, H], times `scale` rounded to float32 -> [T, H]."""
        return table[ids] * torch.tensor(scale, dtype=torch.float32, device=self.device)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, K] times weight [N, K] transposed -> [T, N], in tiles of 16 rows."""
        tiles, n = _tiles(x)
        return torch.cat([F.linear(t, weight) for t in tiles])[:n]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """x [..., H] times (mean(x^2) + eps)^-1/2, times `weight` [H] if given."""
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        return y if weight is None else y * weight

    def norm_residual(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Gemma's sandwich: residual + rms_norm(x). All [T, H]."""
        return residual + self.rms_norm(x, weight, eps)

    def rope(self, x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        """Rotate pairs (i, i + D/2) of x [T, n, D] by positions [T] * freqs [D/2] radians."""
        angle = positions.to(torch.float32)[:, None] * freqs[None, :]
        cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def rope_pairs(
        self, x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor
    ) -> torch.Tensor:
        """Rotate pairs (2 i, 2 i + 1) of x [T, n, D] by positions [T] * freqs [D/2] radians."""
        angle = positions.to(torch.float32)[:, None] * freqs[None, :]
        cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)

    def rope_freqs(
        self, base: float, head_dim: int, divisors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Angles per position, [D/2]: base^(-2i/D), divided by `divisors` [D/2] if given.

        Gemma's global layers use divisors of 1e30 for the pairs that must not turn.
        """
        i = torch.arange(head_dim // 2, dtype=torch.float32, device=self.device)
        freqs = 1.0 / (base ** (2.0 * i / head_dim))
        return freqs if divisors is None else freqs / divisors

    def heads(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm: torch.Tensor | None,
        head_dim: int,
        eps: float,
    ) -> torch.Tensor:
        """Project x [T, K], split into heads of `head_dim`, norm each -> [T, n, D]."""
        return self.rms_norm(self.linear(x, weight).view(len(x), -1, head_dim), norm, eps)

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
        q = _pad_rows(q).view(TILE, kv.n_kv, group, dim)
        q = q.permute(1, 0, 2, 3).reshape(1, kv.n_kv, TILE * group, dim)
        scores = torch.matmul(q.expand(len(keys), -1, -1, -1), keys.transpose(-1, -2)) * scale

        position = torch.arange(len(keys) * BLOCK, device=self.device) + lo // BLOCK * BLOCK
        first, last = _pad_rows(first), _pad_rows(last)
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

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + torch.tanh(inner))

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """x / (1 + exp(-x))."""
        return x / (1.0 + torch.exp(-x))

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """1 / (1 + exp(-x))."""
        return 1.0 / (1.0 + torch.exp(-x))

    def tanh(self, x: torch.Tensor) -> torch.Tensor:
        """The hyperbolic tangent."""
        return torch.tanh(x)

    def gated(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """down(activation(gate x) * up x): x [T, H], gate and up [I, H], down [H, I]."""
        return self.linear(activation(self.linear(x, gate)) * self.linear(x, up), down)

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
        return ids, weights / _in_order(weights)[:, None] * gains[ids]

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Weighted sum over the experts of each row, best first -> [T, H].

        Only experts that a row visits are computed, in tiles of 16 rows like every product, so
        that neither the rows beside a row nor the experts they visit change its bits.

        Args:
            x: [T, H]. `ids`, `weights`: [T, k], see `route`.
            gate, up: [E, I, H]. `down`: [E, H, I].
        """
        out = x.new_empty(*ids.shape, x.shape[1])
        for e in sorted(set(ids.flatten().tolist())):
            rows, place = (ids == e).nonzero(as_tuple=True)
            out[rows, place] = self.gated(x[rows], gate[e], up[e], down[e], activation)
        return _in_order(out * weights[..., None])

    def convolve(self, x: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Sum over taps i of x[t - i] * (base[i] + delta[t, i]); nothing stands before row 0.

        Args:
            x: [T, H]. `base`: [taps, H]. `delta`: [T, taps, G], each for H / G channels in a row.
        """
        group = x.shape[1] // delta.shape[2]
        out = torch.zeros_like(x)
        for i in range(min(len(base), len(x))):
            weight = base[i] + delta[:, i].repeat_interleave(group, dim=1)
            out[i:] += x[: len(x) - i] * weight[i:]
        return out

    def scatter(self, z: torch.Tensor, ids: torch.Tensor, n_vocab: int) -> torch.Tensor:
        """Reduced logits z [T, D] at columns `ids` [D] of [T, n_vocab], -inf elsewhere."""
        out = z.new_full((len(z), n_vocab), -math.inf)
        out[:, ids] = z
        return out

    def only(self, z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """z [T, V] with every column but `ids` set to -inf."""
        out = torch.full_like(z, -math.inf)
        out[:, ids] = z[:, ids]
        return out

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap)."""
        return cap * torch.tanh(x / cap)


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 1 of x [T, k, ...], from the first to the last."""
    total = x[:, 0]
    for i in range(1, x.shape[1]):
        total = total + x[:, i]
    return total


def _pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, ...] with its last row repeated up to TILE rows (always real, finite values)."""
    missing = TILE - len(x)
    return x if missing == 0 else torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])


def _tiles(x: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """x [T, K] cut into contiguous tiles [TILE, K], the last one padded."""
    tiles = [x[i : i + TILE] for i in range(0, len(x), TILE)]
    tiles[-1] = _pad_rows(tiles[-1])
    return [t.contiguous() for t in tiles], len(x)
