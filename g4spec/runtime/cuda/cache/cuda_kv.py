"""Keys and values of one layer on the GPU, addressed by absolute position.

As in `g4spec.ops.kv`: the row of position p stands in slot p mod capacity, appending does not
commit, and the rows of rejected tokens are overwritten by the next step. Planes are
[n_kv, capacity, head_dim], so that the 128 positions of an aligned tile are consecutive in memory;
capacity is a multiple of 128 for that reason.

Two ways to store a row: `f16`, and `q8_0` (blocks of 32 values of a row: one byte a value and one
half-precision scale a block, the numbers that `g4spec.quant.formats.q8_0` would store). Bytes are
kept in one plane and scales in another, and a byte is q + 128, without sign, because that is the
cheaper form to turn into half precision.

Where keys are the values times a weight for each column, and then turned in few columns, the plane
of keys holds only the columns that turn. In the others the queries take over the weight and meet
the values.

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

TURNING = 64
"""Pairs of a head that may turn where keys are kept as what differs from the values: columns 0 ..
63 of both its halves."""

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
        turning: see `CacheShape`.

    Attributes:
        turning: pairs whose columns the keys have, or 0: keys have all columns.
        keys, values: [n_kv, capacity, columns], float16 or uint8 (q + 128).
        key_scales, value_scales: [n_kv, capacity, columns / 32] float16; `f16`: no elements.
        positions: of the rows that asked last, [T] int64; those before the first are settled.
        weight: [head_dim] of the norm of keys, which queries take over in the columns that keys
            have not. Set by whoever writes rows; None: 1.
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
        turning: int = 0,
    ) -> None:
        assert head_dim % BLOCK == 0, head_dim
        self.n_kv, self.head_dim, self.window, self.kind = n_kv, head_dim, window, kind
        self.capacity = capacity(n_ctx, window, slack)
        self.turning = TURNING if shares(head_dim, turning) else 0
        self.positions: torch.Tensor | None = None
        self.weight: torch.Tensor | None = None
        columns = _key_columns(head_dim, turning)
        self.keys, self.key_scales = _plane(n_kv, self.capacity, columns, kind, device)
        self.values, self.value_scales = _plane(n_kv, self.capacity, head_dim, kind, device)
        # A divisor in device memory: torch divides by a Python number through its reciprocal.
        self._levels = torch.full((), 127.0, device=device)

    def append(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows [T, n_kv, head_dim] (float32 or float16) at `positions` [T] int64.

        Nothing depends on values on the host, so that a CUDA graph may capture it.
        """
        assert len(positions) <= self.capacity, (len(positions), self.capacity)
        slots = positions % self.capacity
        if self.turning:
            keys = self._turned(keys).flatten(-2)
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
        keys, values = self.numbers(slots)
        if self.turning and self.weight is not None:
            keys = keys * self.taken_over(self.weight)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def numbers(self, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in `slots`, float32 [n_kv, n, head_dim]; keys without the weight that
        queries take over."""
        out = []
        for plane, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            rows = plane[:, slots]
            out.append(rows.float() if self.kind == "f16" else dequantize(rows, scales[:, slots]))
        keys, values = out
        if self.turning:
            turned, keys = keys, values.clone()
            self._turned(keys).copy_(turned.view(*turned.shape[:-1], 2, self.turning))
        return keys, values

    def taken_over(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [head_dim] in the columns where queries take it over, 1 in the others."""
        weight = weight.clone()
        self._turned(weight).fill_(1)
        return weight

    def _turned(self, rows: torch.Tensor) -> torch.Tensor:
        """The columns [..., 2, turning] of rows [..., head_dim] that keys have, as a view."""
        return rows.view(*rows.shape[:-1], 2, -1)[..., : self.turning]


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


def row_bytes(n_kv: int, head_dim: int, kind: Kind, turning: int = 0) -> int:
    """Bytes of one position, keys and values."""
    columns = n_kv * (_key_columns(head_dim, turning) + head_dim)
    return columns * 2 if kind == "f16" else columns + columns // BLOCK * 2


def shares(head_dim: int, turning: int) -> bool:
    """Whether keys are kept as what differs from the values. `turning`: see `CacheShape`."""
    return head_dim == 512 and 0 < turning <= TURNING


def _key_columns(head_dim: int, turning: int) -> int:
    return 2 * TURNING if shares(head_dim, turning) else head_dim


def _plane(
    n_kv: int, capacity: int, columns: int, kind: Kind, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that were never written, and their scales."""
    rows, half = (n_kv, capacity), torch.float16
    if kind == "f16":
        plane = torch.full((*rows, columns), math.nan, dtype=half, device=device)
        return plane, torch.empty(0, dtype=half, device=device)
    steps = torch.full((*rows, columns // BLOCK), math.nan, dtype=half, device=device)
    return torch.full((*rows, columns), 128, dtype=torch.uint8, device=device), steps
