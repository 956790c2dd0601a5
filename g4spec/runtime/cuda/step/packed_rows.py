"""Packed activations, the input of a matmul, and the residual addition and norm between two
matmuls.

Packed rows are the input of `linear.cu`: rows [T, K] in half precision, in the order in which
tensor cores read them, together with sums of the rounded values. Up to 16 rows have the *fragment
layout*. With `tiles` = 1 for T <= 8 and 2 above, they are K / 64 blocks of 1280 * tiles bytes, one
for each 64 columns:

- the values as halves: row m, column k of the block, with k16 = k / 16, t = k % 16 / 4, e = k % 4
  and lane = m % 8 * 4 + t, is half ((k16 / 2) * 32 + lane) * 8 + (k16 % 2) * 4 + e (one tile), or
  (k16 * 32 + lane) * 8 + (m / 8) * 4 + e (two tiles);
- half [2][8 * tiles][4]: for each 32 columns of a row, the sums of the two groups of 16 columns as
  halves, and the rounding errors of these halves;
- float32 [2][8 * tiles]: -1024 times the sum of each 32 columns;
- half [8 * tiles][4]: the sums of each 32 columns, in the form of those of 16.

Rows T .. 8 * tiles - 1 are zero. Rows whose values may not fit half precision have a scale each, a
power of two by which the matmul multiplies its result.

More than 16 rows form groups of 16, one after the other, in the *swizzled layout*. It has the same
numbers in another order: the values of all blocks, [tile][block][8 rows][8 chunks of 8 halves],
chunk p of row r at position p ^ r; then the sums of 16 of all blocks, the floats, and the sums of
32 as [unit of 4 blocks][tile][sums, rounding errors][8 rows][8 sums], where the last unit may be
shorter. Columns 16 i + 4 t and 16 i + 4 t + 1 of a block are halves 2 t and 2 t + 1 of chunk 2 i;
columns 16 i + 4 t + 2 and + 3 are those of chunk 2 i + 1. Values, and a unit's sums of 32, lie as
`wgmma` reads an operand in shared memory, and `ldmatrix` reads the values as well. A row has the
same bits in any group and at any index. The input of `experts.cu` consists of groups of one tile in
the fragment layout (`single`), because experts gather rows one by one.

Kernels here are launched with programmatic dependent launch: they may start before their
predecessor has ended, and load weights meanwhile. Kernels that add partial sums also load the
residual early: the sums come from `linear.cu`, which calls `griddep_launch_dependents` after its
own `griddep_wait`, so all that kernels before `linear.cu` wrote is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import (
    ACT_BYTES,
    ACT_COLUMNS,
    GROUP_ROWS,
    NormInput,
    NormOutput,
)
from g4spec.runtime.cuda.build.units import Unit

MAX_WIDTH = 32 * 32 * 8 * 4
"""Maximum columns of a row that a CTA holds in registers: 32 warps of 32 threads, each with 8 loads
of 4 floats (`block_shape`)."""

PLAIN, ADD, NORM = NormInput
NOTHING, FLOATS, ROWS, SCALED = NormOutput


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Packed activations [T, K].

    Attributes:
        data: uint8 [K / 64, ACT_BYTES * tiles], or [groups, K / 64, ACT_BYTES * tiles].
        count, width: T and K.
        scale: float32 [16 * groups], by which the matmul multiplies each row, or None.
        swizzled: the groups have the swizzled layout, otherwise the fragment layout.
    """

    data: torch.Tensor
    count: int
    width: int
    scale: torch.Tensor | None = None
    swizzled: bool = False

    def __len__(self) -> int:
        return self.count

    @property
    def tiles(self) -> int:
        """Number of tiles of 8 rows in each group."""
        size = self.data.shape[-1]
        return tiles(self.count) if size % ACT_BYTES else size // ACT_BYTES

    @property
    def groups(self) -> int:
        """Number of groups of 8 * `tiles` rows."""
        return -(-self.count // (8 * self.tiles))

    @property
    def padded(self) -> int:
        """Number of rows, padding included."""
        return 8 * self.tiles * self.groups

    def part(self, first: int, last: int) -> PackedRows:
        """Return a view of the groups first .. last - 1."""
        if self.groups == 1:
            return self
        data = self.data[first] if last == first + 1 else self.data[first:last]
        each = 8 * self.tiles
        scale = None if self.scale is None else self.scale[first * each : last * each]
        count = min(self.count, last * each) - first * each
        return PackedRows(data, count, self.width, scale, self.swizzled)


def tiles(count: int) -> int:
    """Return the number of tiles of 8 rows that `count` rows need, at most the 2 of a group."""
    return 1 if count <= 8 else 2


def groups(count: int) -> int:
    """Return the number of groups of 16 rows for `count` rows."""
    return -(-count // GROUP_ROWS)


def empty(
    count: int, width: int, device: torch.device, *, scaled: bool = False, single: bool = False
) -> PackedRows:
    """Allocate packed rows [count, width], uninitialized. `single`: groups of one tile in the
    fragment layout."""
    assert count >= 1 and width % ACT_COLUMNS == 0, (count, width)
    n, each = (-(-count // 8), 1) if single else (groups(count), tiles(count))
    sizes = (*([n] if n > 1 else []), width // ACT_COLUMNS, ACT_BYTES * each)
    data = torch.empty(sizes, dtype=torch.uint8, device=device)
    scale = torch.empty(GROUP_ROWS * n, dtype=torch.float32, device=device) if scaled else None
    return PackedRows(data, count, width, scale, n > 1 and not single)


def fits(width: int) -> bool:
    """Return whether norm.cu supports rows of `width` float32 values; others are computed in torch.
    Packed rows also need a multiple of ACT_COLUMNS."""
    return width % 4 == 0 and width <= MAX_WIDTH


def block_shape(width: int) -> tuple[int, int]:
    """Return the warps of a CTA, and the 16-byte loads of a thread, that hold a row of `width`
    floats."""
    quads = -(-width // 4)
    for warps_at_most in (16, 32):
        for loads in range(1, 9):
            warps = -(-quads // (32 * loads))
            if warps <= warps_at_most:
                return warps, loads
    raise AssertionError(f"a row of {width} values does not fit into a CTA's registers")


def splits(count: int, width: int, device: torch.device) -> bool:
    """Return whether several CTAs compute each of `count` rows and each writes a part of it: if all
    can run at once."""
    return count * block_shape(width)[1] <= launch.processors(device.index)


def instance(
    width: int, slices: int, enter: int, leave: int, outputs: int = 1, *, split: bool = True
) -> str:
    """Return the name of an instance of `norm_rows` that reads `slices` split-K partial sums and
    writes `outputs` normed copies. `enter`: NormInput; `leave`: NormOutput; `split`: see `splits`.
    """
    warps, loads = block_shape(width)
    flags = (split, width == 128 * warps * loads)
    numbers = (warps, loads, slices, int(enter), int(leave), outputs)
    return f"norm_rows<{', '.join([*map(str, numbers), *(str(f).lower() for f in flags)])}>"


def pack_rows(x: torch.Tensor) -> PackedRows:
    """Pack x float32 [T, K]. Each row is divided by its scale, the power of two that brings its
    largest magnitude into [512, 1024)."""
    to = empty(len(x), x.shape[1], x.device, scaled=True)
    _run(x, leave=SCALED, outputs=[to.data], row_scale=to.scale)
    return to


def rms_norm_rows(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, single: bool = False
) -> PackedRows:
    """Return rms_norm of x float32 [T, H] as packed rows. `single`: as in `empty`."""
    to = empty(len(x), x.shape[1], x.device, single=single)
    _run(x, eps=eps, leave=ROWS, following=[weight], outputs=[to.data], single=single)
    return to


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return rms_norm of x float32 [..., H], the same shape; any number of rows."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _run(x.reshape(-1, x.shape[-1]), eps=eps, leave=FLOATS, following=[weight], outputs=[y])
    return y


@dataclass(frozen=True, slots=True)
class Residual:
    """The end of a sublayer and the start of the next: x' = (x + rms_norm(h) * weight) * scale.

    Attributes:
        weight: [H], or None: h is added without norm.
        eps: epsilon of all norms.
        scale: float32 [1], or None.
    """

    weight: torch.Tensor | None
    eps: float
    scale: torch.Tensor | None = None

    def __call__(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return x' [T, H].

        Args:
            h: float32 [T, H], or partial sums [S, T, H], added in order (S <= 8).
            x: float32 [T, H].
        """
        out = torch.empty_like(x)
        _run(x, h, self, out=out, leave=NOTHING)
        return out

    def rows(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        following: Sequence[torch.Tensor | None],
        *,
        single: bool = False,
    ) -> tuple[torch.Tensor, list[PackedRows]]:
        """Return x', and rms_norm(x') with each of the 1 to 3 weights in `following` as packed
        rows. `single`: as in `empty`."""
        out = torch.empty_like(x)
        to = [empty(len(x), x.shape[1], x.device, single=single) for _ in following]
        _run(
            x,
            h,
            self,
            out=out,
            leave=ROWS,
            eps=self.eps,
            following=following,
            outputs=[r.data for r in to],
            single=single,
        )
        return out, to

    def numbers(
        self, h: torch.Tensor, x: torch.Tensor, following: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x', and rms_norm(x') as float32 [T, H]; any number of rows."""
        out, y = torch.empty_like(x), torch.empty_like(x)
        _run(
            x,
            h,
            self,
            out=out,
            leave=FLOATS,
            eps=self.eps,
            following=[following],
            outputs=[y],
        )
        return out, y


def _run(
    x: torch.Tensor,
    h: torch.Tensor | None = None,
    residual: Residual | None = None,
    *,
    leave: NormOutput,
    eps: float = 0.0,
    following: Sequence[torch.Tensor | None] = (),
    outputs: Sequence[torch.Tensor] = (),
    out: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    single: bool = False,
) -> None:
    """Launch `norm_rows`; see norm.cu."""
    (count, width), slices, enter = x.shape, 1, PLAIN
    weight = scale = None
    if h is not None and residual is not None:
        slices = h.shape[0] if h.dim() == 3 else 1
        assert h.shape[-2:] == x.shape and slices <= 8, (h.shape, x.shape)
        weight, scale, eps = residual.weight, residual.scale, residual.eps
        enter = ADD if weight is None else NORM
    assert width % (4 if leave in (NOTHING, FLOATS) else ACT_COLUMNS) == 0, width
    launch.assert_lengths(width, weight, *following)
    warps, loads = block_shape(width)
    split = splits(count, width, x.device)
    name = instance(width, slices, enter, leave, max(1, len(outputs)), split=split)
    weights = [*following, None, None, None][:3]
    places = [*outputs, None, None, None][:3]
    launch.kernel("norm.cu", name)(
        (count, loads if split else 1),
        32 * warps,
        h=h,
        x=address(x),
        x_stride=x.stride(0),
        weight=weight,
        scale=scale,
        next_a=weights[0],
        next_b=weights[1],
        next_c=weights[2],
        to_a=places[0],
        to_b=places[1],
        to_c=places[2],
        row_scale=row_scale,
        out=out,
        rows=count,
        width=width,
        single=single,
        eps=eps,
    )


def address(x: torch.Tensor) -> launch.Strided:
    """Return float32 rows [T, K] of any stride as a kernel argument. Each row must start at a
    multiple of 16 bytes."""
    assert x.stride(-1) == 1 and x.stride(0) % 4 == 0 and x.data_ptr() % 16 == 0, x.stride()
    assert x.dtype is torch.float32, x.dtype
    return launch.Strided(x)


def list_units() -> list[Unit]:
    """Return the instances that tests compile: those that targets and drafts of Gemma 4 31B and
    26B-A4B launch on an H200, more split-K slices, which other GPUs may use, and the widest
    rows."""
    return [
        Unit("norm.cu", tuple(instance(width, *form) for form in forms), max_registers=bound)
        for width, bound, forms in (
            (
                5376,
                88,
                [
                    (1, PLAIN, ROWS),
                    (1, NORM, ROWS),
                    (1, NORM, FLOATS),
                    (1, NORM, NOTHING),
                    (1, ADD, ROWS),
                    (1, PLAIN, SCALED),
                    (1, PLAIN, FLOATS),
                ],
            ),
            (
                5376,
                96,
                [(3, NORM, ROWS), (3, NORM, FLOATS), (3, ADD, ROWS), (3, ADD, FLOATS)],
            ),
            (5376, 128, [(6, NORM, ROWS), (6, NORM, FLOATS)]),
            (2816, 112, [(1, NORM, ROWS, 3), (6, NORM, ROWS, 2)]),
            (2816, 128, [(4, NORM, ROWS), (8, NORM, ROWS, 2)]),
            (16128, 96, [(1, PLAIN, ROWS)]),
            (26880, 64, [(1, PLAIN, SCALED)]),
        )
    ] + [
        Unit(
            "norm.cu",
            (
                instance(5376, 1, NORM, FLOATS, split=False),
                instance(5376, 3, NORM, ROWS, split=False),
            ),
            max_registers=128,
        ),
    ]
