"""Keys and values of one layer on the GPU, addressed by absolute position.

As in `g4spec.runtime.kv`: the row of position p stands in slot p mod capacity, appending does not
commit, and the rows of rejected tokens are overwritten by the next step. Planes are
[n_kv, capacity, head_dim], so that the 128 positions of an aligned tile are consecutive in memory;
capacity is a multiple of 128 for that reason.

Two ways to store a row: `f16`, and `q8_0` (blocks of 32 values of a row: one byte a value and one
half-precision scale a block, the numbers that `g4spec.quant.formats.q8_0` would store). Bytes are
kept in one plane and scales in another, and a byte is q + 128, without sign, because that is the
cheaper form to turn into half precision.

Slots that were never written are NaN (`q8_0`: their scales are): whatever reads one shows it.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

Kind = Literal["f16", "q8_0"]

TILE = 128
"""Positions of an aligned tile, consecutive in memory."""

BLOCK = 32
"""Values that share a scale."""

MIN_SLACK = 16
"""Rows a ring holds beyond its window: a step's rows never overwrite one that is still visible."""

_HALF = 0.49999997
"""The float32 below one half: adding it and truncating is C `roundf`, see `quant.formats.q8_0`."""


class CudaKV:
    """One layer's keys and values.

    Args:
        n_kv, head_dim: shape of a row, [n_kv, head_dim] for keys and for values.
        n_ctx: positions the sequence may have.
        window: sliding window, or None to keep all positions.
        slack: most rows appended in one call (a step or a prefill chunk).

    Attributes:
        keys, values: [n_kv, capacity, head_dim], float16 or uint8 (q + 128).
        key_scales, value_scales: [n_kv, capacity, head_dim / 32] float16; `f16`: no elements.
    """

    def __init__(
        self,
        n_kv: int,
        head_dim: int,
        n_ctx: int,
        window: int | None,
        slack: int,
        device: torch.device | str = "cuda",
        kind: Kind = "f16",
    ) -> None:
        assert head_dim % BLOCK == 0, head_dim
        self.n_kv, self.head_dim, self.window, self.kind = n_kv, head_dim, window, kind
        self.capacity = capacity(n_ctx, window, slack)
        rows = (n_kv, self.capacity)
        half = torch.float16
        if kind == "f16":
            self.keys = torch.full((*rows, head_dim), math.nan, dtype=half, device=device)
            self.key_scales = torch.empty(0, dtype=half, device=device)
        else:
            self.keys = torch.full((*rows, head_dim), 128, dtype=torch.uint8, device=device)
            steps = (*rows, head_dim // BLOCK)
            self.key_scales = torch.full(steps, math.nan, dtype=half, device=device)
        self.values, self.value_scales = self.keys.clone(), self.key_scales.clone()
        # A divisor in device memory: torch divides by a Python number through its reciprocal.
        self._levels = torch.full((), 127.0, device=device)

    def append(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows [T, n_kv, head_dim] (float32 or float16) at `positions` [T] int64.

        Nothing depends on values on the host, so that a CUDA graph may capture it.
        """
        assert len(positions) <= self.capacity, (len(positions), self.capacity)
        slots = positions % self.capacity
        planes = ((self.keys, self.key_scales, keys), (self.values, self.value_scales, values))
        for plane, scales, rows in planes:
            if self.kind == "f16":
                plane.index_copy_(1, slots, rows.transpose(0, 1).to(torch.float16))
            else:
                codes, steps = quantize(rows.transpose(0, 1), self._levels)
                plane.index_copy_(1, slots, codes)
                scales.index_copy_(1, slots, steps)

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions first .. last as stored, float32 [n, n_kv, head_dim]."""
        assert 0 <= first <= last < first + self.capacity, (first, last, self.capacity)
        slots = (torch.arange(last - first + 1, device=self.keys.device) + first) % self.capacity
        out = []
        for plane, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            rows = plane[:, slots]
            out.append(rows.float() if self.kind == "f16" else dequantize(rows, scales[:, slots]))
        return out[0].transpose(0, 1), out[1].transpose(0, 1)


def quantize(x: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q8_0 of x [..., D]: bytes q + 128 [..., D] and scales [..., D / 32] float16.

    Args:
        levels: 127 as a float32 scalar on x's device.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, BLOCK)
    step = blocks.abs().amax(-1, keepdim=True) / levels
    inverse = 1.0 / step
    inverse = torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(inverse))
    scaled = blocks * inverse
    codes = torch.trunc(scaled + torch.copysign(torch.full_like(scaled, _HALF), scaled))
    return (codes + 128.0).to(torch.uint8).flatten(-2), step.squeeze(-1).to(torch.float16)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values of bytes q + 128 [..., D] and scales [..., D / 32], float32."""
    blocks = (codes.float() - 128.0).reshape(*codes.shape[:-1], -1, BLOCK)
    return (blocks * scales.float().unsqueeze(-1)).view(codes.shape)


def capacity(n_ctx: int, window: int | None, slack: int) -> int:
    """Rows a layer's cache holds; what memory estimates count."""
    rows = n_ctx if window is None else min(n_ctx, window + max(slack, MIN_SLACK))
    return -(-rows // TILE) * TILE


def row_bytes(n_kv: int, head_dim: int, kind: Kind) -> int:
    """Bytes of one position, keys and values."""
    return 2 * n_kv * (head_dim * 2 if kind == "f16" else head_dim + head_dim // BLOCK * 2)
