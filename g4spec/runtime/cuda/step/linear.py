"""Products of at most 16 rows with a packed matrix, on tensor cores: see linear.cu. Of more rows:
`linear_wide`.

How a matrix is cut depends on the matrix and the GPU, never on the number of rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.step.elementwise import gated_scale
from g4spec.runtime.cuda.step.packed_rows import BLOCK, BLOCK_BYTES, Rows, empty
from g4spec.runtime.cuda.weights import packing, samples
from g4spec.runtime.cuda.weights.dequant import Weight
from g4spec.runtime.cuda.weights.packing import GROUP

ARCHS = tuple(a for a in nvrtc.ARCHS if a not in ("sm_70", "sm_75"))
"""Those whose tensor cores and copies the kernels are made of."""

CONSUMERS = 8
THREADS = 32 * (CONSUMERS + 1)

SCRATCH = {"q4_k": 1664, "q5_k": 1664, "q6_k": 2304}
"""Bytes of shared memory in which a warp keeps a unit's factors, at most."""

CODEBOOKS = {
    "iq4_nl": 32,
    "iq4_xs": 32,
    "mxfp4": 32,
    "nvfp4": 16,
    "iq3_s": 32,
    "iq3_xxs": 32,
    "q3_k": 16,
    "q2_k": 16,
    "iq2_s": 16,
    "iq2_xs": 16,
    "iq2_xxs": 32,
    "iq1_m": 16,
    "iq1_s": 32,
}
"""Types whose codes are numbers of a table's entries (gemm_codebook.cuh): values that share a
factor."""

TILE_BYTES, SUMS = 1024, dict.fromkeys(CODEBOOKS, 0) | {"q6_k": 128, "q2_k": 128}
"""Bytes of 8 rows of a block: their halves, and sums that warp groups need; 64 for others."""

UPPER_ROWS = 2048 + 32
"""Bytes of a unit of 8 rows as `linear_upper` reads them."""

WIDE = (
    "q4_k",
    "q5_k",
    "iq4_xs",
    "iq3_s",
    "iq3_xxs",
    "q3_k",
    "q2_k",
    "iq2_s",
    "iq2_xs",
    "iq2_xxs",
    "iq1_m",
    "iq1_s",
)
"""Types whose stages hold 256 rows where they can."""

MOST_STAGES = {128: 8, 256: 5}
"""In shared memory, by the rows of a stage."""
MOST_SLICES, FEW_SLICES = 8, 2
"""Partial sums that a reader adds; beyond few, it takes long to read them."""
MOST_GROUPS = 4
"""Of 16 rows that are multiplied at once: 8 at once took longer than twice 4."""
HUGE = 1024
"""Groups from which on stages of Q6_K hold 256 rows."""


@dataclass(frozen=True, slots=True)
class Cut:
    """An instance of the kernels.

    Attributes:
        type, unit: quant type, and columns of a unit.
        tiles: of 8 rows of activations. rows: of weights in a stage. stages: in shared memory.
        upper: only the upper two bits of the codes are read, and activations are bytes.
        groups: of 16 rows of activations that are multiplied at once (linear_wide.cu).
        warp_groups: products of warp groups (sm_90a) that take all of these; 0: those of warps.
    """

    type: str
    unit: int
    tiles: int
    rows: int
    stages: int
    upper: bool = False
    groups: int = 1
    warp_groups: int = 0

    @property
    def format(self) -> str:
        """Of the weights, as kernels name it."""
        return packing.format_name(self.type, self.unit) + "Upper" * self.upper

    def name(self, kind: str) -> str:
        if self.groups > 1:
            numbers = (self.groups, self.rows, self.stages, self.warp_groups)
            return f"{kind}_wide<{self.format}, {', '.join(map(str, numbers))}>"
        return f"{kind}<{self.format}, {self.tiles}, {self.rows}, {self.stages}>"

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        stage = max(self.stage, self.rows * 8 * self.tiles * 4)
        teams = CONSUMERS * 32 // self.rows
        other = (1024 if teams > 1 else 512) * self.tiles
        scratch = max(scratch_of(self.type, self.unit), other)
        sums = CONSUMERS * 8 * self.tiles * 4
        return self.stages * (stage + 16 * teams) + CONSUMERS * scratch + sums

    @property
    def stage(self) -> int:
        """Bytes of a unit: weights and activations."""
        rows = UPPER_ROWS if self.upper else self.unit // BLOCK * BLOCK_BYTES
        if self.groups > 1:  # on 1024 bytes
            rows = self.unit // BLOCK * (TILE_BYTES + SUMS.get(self.type, 64))
            return -(-(self.weights + rows * self.tiles * self.groups) // 1024) * 1024
        return self.weights + rows * self.tiles * self.groups

    @property
    def weights(self) -> int:
        """Bytes that are read of a unit's weights."""
        lower = packing.PARTS[self.type][1][0].nbytes(self.unit) if self.upper else 0
        return (packing.unit_bytes(self.type, self.unit) - lower) * (self.rows // GROUP)


def scratch_of(type: str, unit: int) -> int:
    """Bytes of a warp for the factors of a unit: of its groups, of 32 rows each."""
    if type in CODEBOOKS:
        return 128 * (unit // CODEBOOKS[type] + (type == "q2_k"))
    return SCRATCH.get(type, 0)


@functools.cache
def cut(
    type: str,
    unit: int,
    groups: int,
    tiles: int,
    arch: str,
    narrow: bool = False,
    upper: bool = False,
) -> Cut:
    """How a matrix of so many groups is multiplied, `narrow`: by stages of 128 rows. The rows of a
    stage are a matter of the matrix and its use: they decide how its K is shared out."""
    wide = groups % 2 == 0 and not narrow and (type in WIDE or (type == "q6_k" and groups >= HUGE))
    room = nvrtc.SHARED_LIMIT[arch]
    least = 3 if type in CODEBOOKS else 2
    rows = 256 if wide and Cut(type, unit, 2, 256, least).shared <= room else 128
    # A fourth stage of 256 rows gained 0.6 % with one tile and lost 1.5 % with two.
    few = rows == 256 and tiles == 2 and not upper
    for stages in range(3 if few else MOST_STAGES[rows], 0, -1):
        found = Cut(type, unit, tiles, rows, stages, upper)
        if found.shared <= room:
            return found
    raise AssertionError(f"{type} does not fit into the shared memory of {arch}")


class Exchange:
    """Where CTAs that share a group of rows leave their sums; kernels take turns with it.

    Attributes:
        partial: float32, for so many `groups` of 16 rows. arrived: counters, zero between kernels.
    """

    def __init__(self, device: torch.device, groups: int = MOST_GROUPS) -> None:
        self.count = torch.cuda.get_device_properties(device).multi_processor_count
        room = self.count * groups * 16 * 256
        self.partial = torch.empty(room, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1 << 14, dtype=torch.int32, device=device)


def linear(x: Rows, weight: Weight, by: Exchange, *, parts: bool = False) -> torch.Tensor:
    """x [T, K] times a packed matrix [N, K] -> float32 [T, N].

    Args:
        parts: the result may come as sums [S, T, N] of parts of K, to be added in order.
    """
    how, n = parts_of(x, weight, by.count, MOST_SLICES if parts else 1)
    y = torch.empty(max(n, 1), len(x), weight.rows, dtype=torch.float32, device=x.data.device)
    _run("linear", how, n, x, weight, by, y, n_rows=weight.rows, slices=n)
    return y if n > 1 else y[0]


def linear_upper(x: Rows, weight: Weight, by: Exchange) -> torch.Tensor:
    """About x [T, K], as bytes (see `screen`), times a packed Q6_K matrix [N, K] -> float32 [T, N]:
    of its codes only the upper two bits are read."""
    assert weight.type == "q6_k" and x.data.shape[1] == UPPER_ROWS * x.tiles, (weight, x)
    y = torch.empty(len(x), weight.rows, dtype=torch.float32, device=x.data.device)
    _run("linear", cut_of(x, weight, upper=True), 0, x, weight, by, y, n_rows=weight.rows, slices=0)
    return y


def gate_up(x: Rows, weight: Weight, by: Exchange, *, silu: bool = False) -> Rows:
    """gelu(gates) or silu(gates), times ups, of x [T, K], from gates and ups in turns of 16 rows,
    as rows."""
    channels = weight.rows // 2
    y = empty(len(x), channels, x.data.device)
    _run("gate_up", cut_of(x, weight), 0, x, weight, by, y.data, channels=channels, silu=silu)
    return Rows(y.data, y.count, y.width, gated_scale(x.data.device))


def linear_two(x: Rows, first: Weight, second: Weight, by: Exchange) -> torch.Tensor:
    """x [T, K] times two packed matrices of different types -> float32 [T, N1 + N2], in one
    launch."""
    y = torch.empty(len(x), first.rows + second.rows, dtype=torch.float32, device=x.data.device)
    a, b = cut_of(x, first), cut_of(x, second)
    others, count, runs, (of_first, of_second) = halves(first, a, second, b, by)
    launch.kernel("linear.cu", two(a, b))(
        count,
        THREADS,
        weights=first.data,
        rows=x.data,
        row_scale=x.scale,
        partial=by.partial,
        arrived=by.arrived,
        units=of_first[0],
        groups=of_first[1],
        run=runs[0],
        weights_b=second.data,
        units_b=of_second[0],
        groups_b=of_second[1],
        run_b=runs[1],
        others=others,
        y=y,
        n_rows=first.rows,
        n_rows_b=second.rows,
        stride=y.shape[1],
        tokens=len(x),
        shared=max(a.shared, b.shared),
    )
    return y


def halves(
    first: Weight, a: Cut, second: Weight, b: Cut, by: Exchange
) -> tuple[int, int, list[int], tuple[tuple[int, int], tuple[int, int]]]:
    """How CTAs are shared out among two products: those of the first, all of them, units a CTA of
    each, and `size` of each."""
    of_first, of_second = size(first, a), size(second, b)
    others, *runs = shares(*of_first, a.weights, *of_second, b.weights, by.count)
    assert of_first[1] + of_second[1] <= len(by.arrived)
    return others, others + split(*of_second, runs[1]), runs, (of_first, of_second)


def two(a: Cut, b: Cut) -> str:
    """Name of the instance that multiplies both."""
    numbers = (a.tiles, a.rows, a.stages, b.rows, b.stages)
    return f"linear_two<{a.format}, {b.format}, {', '.join(map(str, numbers))}>"


def split(units: int, groups: int, by: int) -> int:
    """All units of all groups over `by`, rounded up: units of each where so many CTAs have equal
    runs, or CTAs where each has so many units."""
    return -(-units * groups // by)


@functools.cache
def slices(units: int, groups: int, count: int, most: int) -> int:
    """Parts, `most` at most, that K of every group of rows is cut into, a CTA each, so that none
    waits for another; or 0: CTAs have equal runs of units and share groups, where slices would
    give one more than a unit beyond that.

    Args:
        units: of K. groups: of a stage's rows. count: CTAs that run at once.
    """
    run = split(units, groups, count)
    found = min(most, count // groups)
    if not found or -(-units // found) > run + 1:
        return 0
    return -(-units // -(-units // found))  # no more of them than it takes


@functools.cache
def shares(
    units: int, groups: int, stage: int, units_b: int, groups_b: int, stage_b: int, count: int
) -> tuple[int, int, int]:
    """CTAs of the first of two products, and units a CTA of each, so that the CTA with the most
    bytes has as few as can be. `stage`: bytes of a unit's weights."""

    def runs(others: int) -> tuple[int, int]:
        return split(units, groups, others), split(units_b, groups_b, count - others)

    def most(others: int) -> int:
        run, run_b = runs(others)
        return max(run * stage, run_b * stage_b)

    best = runs(min(range(1, count), key=most))
    return split(units, groups, best[0]), *best


def parts_of(x: Rows, weight: Weight, count: int, most: int) -> tuple[Cut, int]:
    """How a product is cut, and `slices` of it. The fewer rows a stage has, the more groups there
    are, and the fewer slices of each it takes."""
    how = cut_of(x, weight)
    n = slices(*size(weight, how), count, most)
    if n > FEW_SLICES:
        narrow = cut_of(x, weight, narrow=True)
        fewer = slices(*size(weight, narrow), count, most)
        if fewer:
            return narrow, fewer
    return how, n


def cut_of(x: Rows, weight: Weight, **how: bool) -> Cut:
    groups, units = weight.data.shape[:2]
    assert x.width == weight.columns and weight.matrices == 1, (x.width, weight.columns)
    arch = launch.arch(x.data.device.index)
    return cut(weight.type, weight.columns // units, groups, x.tiles, arch, **how)


def size(weight: Weight, how: Cut) -> tuple[int, int]:
    """Units of K, and groups of a stage's rows."""
    groups, units = weight.data.shape[:2]
    return units, groups * GROUP // how.rows


def _run(
    kind: str,
    how: Cut,
    parts: int,
    x: Rows,
    weight: Weight,
    by: Exchange,
    y: torch.Tensor,
    **numbers: Any,
) -> None:
    units, groups = size(weight, how)
    run = split(units, groups, by.count)
    assert groups <= len(by.arrived)
    count = groups * parts or split(units, groups, run)
    launch.kernel("linear.cu", how.name(kind))(
        count,
        THREADS,
        weights=weight.data,
        rows=x.data,
        row_scale=x.scale,
        partial=by.partial,
        arrived=by.arrived,
        units=units,
        groups=groups,
        run=run,
        y=y,
        tokens=len(x),
        **numbers,
        shared=how.shared,
    )


def _units() -> list[Unit]:
    """Every instance of one matrix, by architecture; of two, those of common files."""
    out = []
    for arch in ARCHS:
        cuts = {
            cut(type, unit, groups, tiles, arch)
            for type in packing.PARTS
            for unit in packing.units_of(type)
            for groups in (1, 2, HUGE)
            for tiles in (1, 2)
        }
        names = {c.name(kind): c.shared for c in cuts for kind in ("linear", "gate_up")}
        shown = {
            cut(type, 256, 2, 2, arch).name("linear")
            for type in samples.SAMPLES
            if arch in ("sm_86", "sm_90a")
        }
        more = {
            c.name(kind) for c in cuts for kind in ("linear", "gate_up") if c.type in CODEBOOKS
        } - shown
        for groups, tiles in ((1, 1), (1, 2), (HUGE, 1), (HUGE, 2)):
            part = cut("q6_k", 256, groups, tiles, arch, upper=True)
            names[part.name("linear")] = part.shared
        for tiles in (1, 2):
            for types in (("q4_k", "q6_k"), ("q8_0", "q8_0")):
                a, b = (cut(type, 256, 2, tiles, arch) for type in types)
                names[two(a, b)] = max(a.shared, b.shared)
        spill = 36 if arch == "sm_120" else 16  # there gate_up<Q4K, 2, 128, 2> needs as much
        out.append(
            Unit(
                "linear.cu",
                tuple(sorted(names.keys() - more)),
                (arch,),
                168,
                max(names.values()),
                spill,
                tuple(sorted(more)),
            )
        )
    return out


UNITS = _units()
