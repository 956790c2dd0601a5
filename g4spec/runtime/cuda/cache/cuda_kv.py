"""Keys and values of one layer on the GPU, addressed by slot and absolute position.

As in `g4spec.ops.kv`, layers with a window keep a ring for each slot, and the others share pages of
128 positions (`Space.table`). Appending does not commit: the rows of rejected tokens are
overwritten by the next step. Planes are [units, n_kv, capacity, columns]. A unit is a page, whose
capacity is 128, or the ring of a slot, in which position p is in row p mod capacity. The capacity
of a ring is a multiple of 128, so that the 128 positions of an aligned tile are consecutive in
memory.

Cache types are `f16` and `q8_0`: blocks of 32 values of a row, with one byte a value and one
half-precision scale a block, the same numbers as in `g4spec.quant.formats.q8_0`. Bytes are in one
plane and scales in another. A byte is q + 128, unsigned, which takes fewer instructions to convert
to half precision.

If keys are the values times a weight for each column, rotated in a few columns
(`CacheShape.rotary_pairs`), the plane of keys stores only the rotated columns. In the other columns
queries are multiplied by the weight and read the values.

Rows that were never written are NaN (in `q8_0` their scales are), so that reading one has a visible
effect.
"""

from __future__ import annotations

import math

import torch

from g4spec.core import PAGE, CacheShape
from g4spec.errors import Unsupported
from g4spec.ops.kv import Space
from g4spec.runtime.cuda.build.constants import CACHE_ROTARY_PAIRS
from g4spec.runtime.cuda.cache.cache_types import TYPES, Kind
from g4spec.runtime.cuda.cache.cuda_kv_size import (
    MIN_SLACK,
    capacity,
    key_columns,
    shares,
)

Q8_BLOCK = TYPES["q8_0"].block

_HALF = 0.49999997
"""The largest float32 below one half: adding it and truncating is C `roundf`, see
`quant.formats.q8_0`."""


class CudaKV:
    """One layer's keys and values.

    Args:
        shape: shape of the layer's rows.
        space: slots and pages. Each row of its table has a ring.
        ring_slack: maximum rows of one sequence that one call appends (a step or a chunk).

    Attributes:
        capacity: positions of a unit.
        positions: maximum positions of a sequence that it can hold at once.
        rotary_pairs: pairs whose columns are stored of keys, or 0: all columns are.
        keys, values: [units, n_kv, capacity, columns], float16 or uint8 (q + 128).
        key_scales, value_scales: [units, n_kv, capacity, columns / 32] float16; empty for `f16`.
        weight: weight [head_dim] of the keys' norm, by which queries are multiplied in the columns
            that keys do not store. Set by the writer of the rows; None: 1.

    Raises:
        Unsupported: a quantized `kind`, and heads that do not divide into its blocks.
    """

    def __init__(
        self, shape: CacheShape, space: Space, ring_slack: int = MIN_SLACK, kind: Kind = "f16"
    ) -> None:
        self.kind, self.type = kind, TYPES[kind]
        if self.type.block and shape.head_dim % self.type.block:
            raise Unsupported(
                f"a cache of type {kind} for heads of {shape.head_dim} values",
                expected=f"a multiple of {self.type.block}",
                fix="use `cache_type` f16",
            )
        self.n_kv, self.head_dim, self.window = shape.n_kv, shape.head_dim, shape.window
        self.space = space
        slots, width = space.table.shape
        self.capacity, units, self.positions = PAGE, space.n_pages + 1, width * PAGE
        if shape.window is not None:
            self.capacity = self.positions = capacity(space.n_ctx, shape.window, ring_slack)
            units = slots
        self.rotary_pairs = CACHE_ROTARY_PAIRS if shares(shape.head_dim, shape.rotary_pairs) else 0
        self.weight: torch.Tensor | None = None
        rows, device = (units, shape.n_kv, self.capacity), space.table.device
        self.keys, self.key_scales = _plane(rows, key_columns(shape), kind, device)
        self.values, self.value_scales = _plane(rows, shape.head_dim, kind, device)
        # A divisor in device memory: torch divides by a Python number through its reciprocal.
        self._levels = torch.full((), 127.0, dtype=torch.float32, device=device)

    @property
    def paged(self) -> bool:
        """True if rows are in pages of the pool, False if each slot has a ring."""
        return self.window is None

    @property
    def table(self) -> torch.Tensor | None:
        """Page table of layers with pages, int32 [slots, pages of a context]; None for rings."""
        return self.space.table if self.paged else None

    @property
    def planes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values, and the scales of both."""
        return self.keys, self.values, self.key_scales, self.value_scales

    def row_indices(
        self, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the unit, and the row in it, of each of `positions` in the slot of the same index;
        both [...] int64. Positions before 0 and those without a page are in the spare page."""
        if not self.paged:
            return slots, positions % self.capacity
        pages = self.space.table[slots, positions.clamp(min=0) // PAGE].to(torch.int64)
        return pages.masked_fill(positions < 0, 0), positions % PAGE

    def append(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write rows [T, n_kv, head_dim] (float32 or float16) at `positions` [T] of `slots` [T].

        Nothing depends on values on the host, so that a CUDA graph can capture it.
        """
        units, at = self.row_indices(slots, positions)
        if self.rotary_pairs:
            keys = self._rotary_columns(keys).flatten(-2)
        planes = ((self.keys, self.key_scales, keys), (self.values, self.value_scales, values))
        for plane, scales, rows in planes:
            if not self.type.block:
                plane[units, :, at] = rows.to(torch.float16)
            else:
                codes, steps = quantize(rows, self._levels, self.type.block)
                plane[units, :, at] = codes
                scales[units, :, at] = steps

    def read(self, slot: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of positions first .. last as stored, float32 [n, n_kv,
        head_dim]."""
        assert 0 <= first <= last < first + self.positions, (first, last, self.positions)
        positions = torch.arange(first, last + 1, device=self.keys.device)
        keys, values = self._numbers(*self.row_indices(torch.full_like(positions, slot), positions))
        if self.rotary_pairs and self.weight is not None:
            keys = keys * self.taken_over(self.weight)
        return keys, values

    def whole(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all rows of `slot`, int64 [], float32 [positions, n_kv, head_dim]: row i is of a
        position that is i mod `positions`. Keys are without the weight that queries are multiplied
        by."""
        at = torch.arange(self.positions, device=self.keys.device)
        return self._numbers(*self.row_indices(slot.expand_as(at), at))

    def _numbers(self, units: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of rows `at` [n] of `units` [n], float32 [n, n_kv, head_dim]."""
        out = []
        for plane, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            rows = plane[units, :, at]
            block = self.type.block
            out.append(dequantize(rows, scales[units, :, at], block) if block else rows.float())
        keys, values = out
        if self.rotary_pairs:
            turned, keys = keys, values.clone()
            self._rotary_columns(keys).copy_(turned.view(*turned.shape[:-1], 2, self.rotary_pairs))
        return keys, values

    def snapshot(self, slot: int, end: int) -> list[torch.Tensor]:
        """Copy the visible rows of a ring before `end` to host memory, for `restore`: rows [n,
        n_kv, ...] of each plane, bit by bit."""
        assert not self.paged
        units, at = self._visible(slot, end)
        return [plane[units, :, at].cpu() for plane in self.planes if plane.numel()]

    def restore(self, slot: int, end: int, rows: list[torch.Tensor]) -> None:
        """Write the result of `snapshot` back, to any slot."""
        units, at = self._visible(slot, end)
        planes = [plane for plane in self.planes if plane.numel()]
        for plane, kept in zip(planes, rows, strict=True):
            plane[units, :, at] = kept.to(plane.device)

    def _visible(self, slot: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return unit and row of the positions before `end` that a row at `end` sees in a ring."""
        first = max(0, end - min(self.window or 0, self.capacity))
        positions = torch.arange(first, end, device=self.keys.device)
        return self.row_indices(torch.full_like(positions, slot), positions)

    def taken_over(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` [head_dim] in the columns that keys do not store, 1 in the others."""
        weight = weight.clone()
        self._rotary_columns(weight).fill_(1)
        return weight

    def _rotary_columns(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the columns [..., 2, rotary_pairs] of rows [..., head_dim] that keys store, as a
        view."""
        return rows.view(*rows.shape[:-1], 2, -1)[..., : self.rotary_pairs]


def quantize(
    x: torch.Tensor, levels: torch.Tensor, block: int = Q8_BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., D] to Q8_0: bytes q + 128 [..., D] and scales [..., D / block] float16.

    Args:
        levels: 127 as a float32 scalar on x's device.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, block)
    step = blocks.abs().amax(-1, keepdim=True) / levels
    inverse = 1.0 / step
    inverse = torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(inverse))
    scaled = blocks * inverse
    codes = torch.trunc(scaled + torch.copysign(torch.full_like(scaled, _HALF), scaled))
    return (codes + 128.0).to(torch.uint8).flatten(-2), step.squeeze(-1).to(torch.float16)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, block: int = Q8_BLOCK) -> torch.Tensor:
    """Return the values of bytes q + 128 [..., D] and scales [..., D / block], float32."""
    blocks = (codes.float() - 128.0).reshape(*codes.shape[:-1], -1, block)
    return (blocks * scales.float().unsqueeze(-1)).view(codes.shape)


def _plane(
    rows: tuple[int, int, int], columns: int, kind: Kind, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a plane of rows [units, n_kv, capacity] that were never written, and their scales."""
    half = torch.float16
    block = TYPES[kind].block
    if not block:
        plane = torch.full((*rows, columns), math.nan, dtype=half, device=device)
        return plane, torch.empty(0, dtype=half, device=device)
    steps = torch.full((*rows, columns // block), math.nan, dtype=half, device=device)
    return torch.full((*rows, columns), 128, dtype=torch.uint8, device=device), steps
