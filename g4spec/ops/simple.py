"""The simple operations in plain torch; `g4spec.ops.reference` composes the others from them.

Arithmetic is float32 with float32 accumulation; nothing is rounded in between.

One property holds by construction and is tested: the result of a row depends neither on the number
of rows nor on its index among them. Torch uses other kernels for 1, 2 or 3 rows than for 16, so
matmuls always compute tiles of exactly :data:`TILE` rows. Activation functions are composed from
`exp` and `tanh`, because torch's fused `gelu`, `silu` and `sigmoid` round differently in the last
elements of a tensor (seen with torch 2.13 and AVX-512), so that the result would depend on the
index.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

TILE = 16
"""Number of rows that are always computed together."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines by which heads are rotated."""


class SimpleOps:
    """Operations that are not composed of others.

    Attributes:
        without_kernel: ops that ran without a kernel of their own; always empty on the CPU.
    """

    name = "torch"
    title = "CPU"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.without_kernel: set[str] = set()

    def kernel_notes(self) -> list[str]:
        """Return a note that names the ops without a kernel of their own; nothing without any."""
        names = ", ".join(sorted(self.without_kernel))
        return [f"ran as torch ops on the GPU, slower than a kernel: {names}"] if names else []

    def array(self, data: np.ndarray[Any, Any]) -> torch.Tensor:
        """Copy a numpy array to the device: integers as int64, all others as float32."""
        index = data.dtype.kind in "iu"
        dtype = np.int64 if index else np.float32
        return torch.from_numpy(np.array(data, dtype=dtype)).to(self.device)

    def ids(self, tokens: list[int]) -> torch.Tensor:
        """Return token ids as a tensor [T], int64."""
        return torch.tensor(tokens, dtype=torch.int64, device=self.device)

    def positions(self, start: int, count: int) -> torch.Tensor:
        """Return [start, start + 1, ...] of length `count`, int64."""
        return torch.arange(start, start + count, device=self.device)

    def concat_columns(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate parts [T, H_i] along columns -> [T, sum H_i]."""
        return torch.cat(parts, dim=-1)

    def stack_columns(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Stack parts [S] as the columns of [S, n]."""
        return torch.stack(parts, dim=1)

    def copy_residual(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual x [T, H], as a copy if the backend updates residuals in place."""
        return x

    def concat_rows(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate parts [T_i, H] along rows -> [sum T_i, H]."""
        return torch.cat(parts)

    def embed(self, table: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Return rows `ids` [T] of `table` [V, H], times `scale` rounded to float32 -> [T, H]."""
        return table[ids] * torch.tensor(scale, dtype=torch.float32, device=self.device)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, *, partial_sums: bool = False
    ) -> torch.Tensor:
        """Multiply x [T, K] by weight [N, K] transposed -> [T, N], in tiles of 16 rows.

        Args:
            partial_sums: the result is only passed to `norm_residual_norm` or `expert_layer`, so
                it may be split-K partial sums [S, T, N].
        """
        n = x.shape[0]
        if n <= TILE:
            return F.linear(_tile(x), weight)[:n]
        tiles = (_tile(x[i : i + TILE]) for i in range(0, n, TILE))
        return torch.cat([F.linear(t, weight) for t in tiles])[:n]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Compute x [..., H] times (mean(x^2) + eps)^-1/2, times `weight` [H] if given."""
        mean = (x * x).sum(-1, keepdim=True).div_(_number(x.shape[-1]))
        y = x * mean.add_(_number(eps)).rsqrt_()
        return y if weight is None else y * weight

    def angles(self, positions: torch.Tensor, freqs: torch.Tensor) -> Angles:
        """Return the cosines and sines of positions [T] * freqs [D/2] radians, [T, 1, D/2] each."""
        angle = (positions.to(torch.float32)[:, None] * freqs[None, :])[:, None, :]
        return angle.cos(), angle.sin()

    def rope(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Rotate pairs (i, i + D/2) of x [T, n, D] by `angles`."""
        cos, sin = angles
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def rope_interleaved(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Rotate pairs (2 i, 2 i + 1) of x [T, n, D] by `angles`."""
        cos, sin = angles
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)

    def rope_freqs(
        self, base: float, head_dim: int, divisors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return radians per position [D/2]: base^(-2i/D), divided by `divisors` [D/2] if given.

        Gemma's global layers use divisors of 1e30 for the pairs that must not rotate.
        """
        i = torch.arange(head_dim // 2, dtype=torch.float32, device=self.device)
        freqs = 1.0 / (base ** (2.0 * i / head_dim))
        return freqs if divisors is None else freqs / divisors

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        """Compute 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
        cubes = (x * x).mul_(x).mul_(_number(0.044715))
        inner = cubes.add_(x).mul_(_number(math.sqrt(2.0 / math.pi)))
        return inner.tanh_().add_(_number(1.0)).mul_(x * _number(0.5))

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x / (1 + exp(-x))."""
        return x / (1.0 + torch.exp(-x))

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """Compute 1 / (1 + exp(-x))."""
        return 1.0 / (1.0 + torch.exp(-x))

    def tanh(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the hyperbolic tangent."""
        return torch.tanh(x)

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """Compute cap * tanh(x / cap)."""
        return cap * torch.tanh(x / cap)

    def convolve(
        self, x: torch.Tensor, base: torch.Tensor, delta: torch.Tensor, block: int
    ) -> torch.Tensor:
        """Convolve each block of `block` rows causally: sum x[t - i] * (base[i] + delta[t, i]) over
        i = 0 .. N - 1. Rows before the block count as zero.

        Args:
            x: [T, H].
            base: [N, H].
            delta: [T, N, G]; each value is added for H / G adjacent columns.
        """
        group = x.shape[1] // delta.shape[2]
        blocks = x.view(-1, block, x.shape[1])
        out = torch.zeros_like(blocks)
        for i in range(min(len(base), block)):
            weight = (base[i] + delta[:, i].repeat_interleave(group, dim=1)).view_as(blocks)
            out[:, i:] += blocks[:, : block - i] * weight[:, i:]
        return out.view_as(x)

    def scatter(self, z: torch.Tensor, ids: torch.Tensor, n_vocab: int) -> torch.Tensor:
        """Write logits z [T, D] of a reduced vocabulary to columns `ids` ([D], or [T, D] per row)
        of [T, n_vocab]; -inf elsewhere."""
        out = z.new_full((len(z), n_vocab), -math.inf)
        if ids.dim() == 2:
            return out.scatter(1, ids, z)
        out[:, ids] = z
        return out


def sum_in_order(x: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 1 of x [T, k, ...], in order from first to last."""
    total = x[:, 0]
    for i in range(1, x.shape[1]):
        total = total + x[:, i]
    return total


@lru_cache(256)
def _number(value: float) -> torch.Tensor:
    """Return a number as a tensor, which torch makes of each number of Python at each operation: a
    tenth of the time of a step of a small model."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _tile(x: torch.Tensor) -> torch.Tensor:
    """Return x [n, K] contiguous, with rows of zeros appended until there are TILE rows."""
    return x.contiguous() if x.shape[0] == TILE else F.pad(x, (0, 0, 0, TILE - x.shape[0]))
