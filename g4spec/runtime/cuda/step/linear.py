"""GEMM of at most 16 rows with a packed quantized matrix, on tensor cores (linear.cu). For more
rows see `linear_wide`.

Tiling and split-K depend on the matrix and the GPU, never on the number of rows: a row has the same
bits in a batch of any size. K is counted in units: a unit is the columns of a pipeline stage. N is
counted in groups: a group is the weight rows of a stage. Work is distributed in (group, unit)
pairs.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.constants import BYTE_ROWS, GEMM_THREADS, GROUP_ROWS, PACK_ROWS
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.step.elementwise import gated_scale
from g4spec.runtime.cuda.step.gemm_tiles import (
    CODEBOOKS,
    MANY_GROUPS,
    GemmConfig,
    gemm_config,
)
from g4spec.runtime.cuda.step.packed_rows import PackedRows, empty
from g4spec.runtime.cuda.weights import packing, samples
from g4spec.runtime.cuda.weights.dequant import Weight

MAX_SLICES, FEW_SLICES = 8, 2
"""Maximum split-K factor whose partial sums the next kernel adds, and the factor above which
reading them costs more than it saves."""
MAX_ROW_GROUPS = 8
"""Maximum groups of 16 activation rows per read of the weights."""
COUNTERS = 1 << 16
"""Counters of a workspace: those of `attention_window` for `ranges.MAX_PARALLEL` sequences of 16
rows, the most. A matrix has up to 4,096 groups."""


class SplitKWorkspace:
    """Buffers for partial sums of CTAs that share a group of weight rows. Used by one kernel at a
    time.

    Attributes:
        count: CTAs that run at once (multiprocessors).
        partial: partial sums, float32, for `MAX_ROW_GROUPS` groups of 16 activation rows.
        arrived: counters of finished CTAs, zero between kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = launch.processors(device.index)
        room = self.count * MAX_ROW_GROUPS * GROUP_ROWS * 256
        self.partial = torch.empty(room, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def gemm_arguments(
    weight: Weight, x: PackedRows, workspace: SplitKWorkspace, units: int, groups: int, run: int
) -> dict[str, Any]:
    """Return the arguments that all GEMM kernels share: `GEMM_PARAMS` of gemm_pipeline.cuh."""
    return {
        "weights": weight.data,
        "rows": x.data,
        "row_scale": x.scale,
        "partial": workspace.partial,
        "arrived": workspace.arrived,
        "units": units,
        "groups": groups,
        "run": run,
    }


def linear(
    x: PackedRows, weight: Weight, workspace: SplitKWorkspace, *, parts: bool = False
) -> torch.Tensor:
    """Return x [T, K] times a packed matrix [N, K] transposed, float32 [T, N].

    Args:
        parts: allow split-K partial sums [S, T, N] as the result, which the caller adds in order.
    """
    config, n = split_k_config(x, weight, workspace.count, MAX_SLICES if parts else 1)
    y = torch.empty(max(n, 1), len(x), weight.rows, dtype=torch.float32, device=x.data.device)
    _run("linear", config, n, x, weight, workspace, y, n_rows=weight.rows, slices=n)
    return y if n > 1 else y[0]


def linear_upper(x: PackedRows, weight: Weight, workspace: SplitKWorkspace) -> torch.Tensor:
    """Return x [T, K] as int8 (see `screen`) times a packed Q6_K matrix [N, K], float32 [T, N].

    Approximate: only the upper two bits of the codes are read.
    """
    assert weight.type == "q6_k" and x.data.shape[1] == BYTE_ROWS * x.tiles, (weight, x)
    y = torch.empty(len(x), weight.rows, dtype=torch.float32, device=x.data.device)
    config = config_of(x, weight, upper=True)
    _run("linear", config, 0, x, weight, workspace, y, n_rows=weight.rows, slices=0)
    return y


def gate_up(
    x: PackedRows, weight: Weight, workspace: SplitKWorkspace, *, silu: bool = False
) -> PackedRows:
    """Return gelu(gate) * up (or silu) of x [T, K] as packed rows. `weight` interleaves gate and up
    in blocks of 16 rows."""
    channels = weight.rows // 2
    y = empty(len(x), channels, x.data.device)
    config = config_of(x, weight)
    _run("gate_up", config, 0, x, weight, workspace, y.data, channels=channels, silu=silu)
    return PackedRows(y.data, y.count, y.width, gated_scale(x.data.device))


def linear_two(
    x: PackedRows, first: Weight, second: Weight, workspace: SplitKWorkspace
) -> torch.Tensor:
    """Return x [T, K] times two packed matrices of different types, float32 [T, N1 + N2], in one
    launch."""
    y = torch.empty(len(x), first.rows + second.rows, dtype=torch.float32, device=x.data.device)
    a, b = config_of(x, first), config_of(x, second)
    first_ctas, count, runs, (of_first, of_second) = two_matrix_grid(first, a, second, b, workspace)
    launch.kernel("linear.cu", two_matrix_instance(a, b))(
        count,
        GEMM_THREADS,
        **gemm_arguments(first, x, workspace, of_first[0], of_first[1], runs[0]),
        weights_b=second.data,
        units_b=of_second[0],
        groups_b=of_second[1],
        run_b=runs[1],
        others=first_ctas,
        y=y,
        n_rows=first.rows,
        n_rows_b=second.rows,
        stride=y.shape[1],
        tokens=len(x),
        shared=max(a.shared, b.shared),
    )
    return y


def two_matrix_grid(
    first: Weight, a: GemmConfig, second: Weight, b: GemmConfig, workspace: SplitKWorkspace
) -> tuple[int, int, list[int], tuple[tuple[int, int], tuple[int, int]]]:
    """Return how CTAs are divided between two matrices: CTAs of the first, all CTAs, units per CTA
    for each, and `size` of each."""
    of_first, of_second = size(first, a), size(second, b)
    first_ctas, *runs = share_ctas(*of_first, a.weights, *of_second, b.weights, workspace.count)
    assert of_first[1] + of_second[1] <= len(workspace.arrived)
    return (
        first_ctas,
        first_ctas + ceil_div(math.prod(of_second), runs[1]),
        runs,
        (of_first, of_second),
    )


def two_matrix_instance(a: GemmConfig, b: GemmConfig) -> str:
    """Return the name of the instance that multiplies both matrices."""
    numbers = (a.tiles, a.rows, a.stages, b.rows, b.stages)
    return f"linear_two<{a.format}, {b.format}, {', '.join(map(str, numbers))}>"


def ceil_div(n: int, divisor: int) -> int:
    """Return n / divisor, rounded up: units per CTA for a number of CTAs, or CTAs for units per
    CTA."""
    return -(-n // divisor)


@functools.cache
def split_k_slices(units: int, groups: int, count: int, most: int) -> int:
    """Return the split-K factor (at most `most`), or 0 for stream-K.

    Split-K: each CTA has one slice of K of one group and waits for no other. Stream-K: CTAs have
    equal runs of units and share groups; chosen where a slice would be more than one unit longer
    than an equal run. `count`: CTAs that run at once.
    """
    run = ceil_div(units * groups, count)
    slices = min(most, count // groups)
    if not slices or -(-units // slices) > run + 1:
        return 0
    return -(-units // -(-units // slices))  # the smallest factor with slices of that length


@functools.cache
def share_ctas(
    units: int, groups: int, stage: int, units_b: int, groups_b: int, stage_b: int, count: int
) -> tuple[int, int, int]:
    """Return the CTAs of the first of two matrices, and units per CTA of each, that minimize the
    bytes of the busiest CTA. `stage`, `stage_b`: bytes of a unit's weights."""

    def runs(first_ctas: int) -> tuple[int, int]:
        return ceil_div(units * groups, first_ctas), ceil_div(
            units_b * groups_b, count - first_ctas
        )

    def most(first_ctas: int) -> int:
        run, run_b = runs(first_ctas)
        return max(run * stage, run_b * stage_b)

    best = runs(min(range(1, count), key=most))
    return ceil_div(units * groups, best[0]), *best


def split_k_config(x: PackedRows, weight: Weight, count: int, most: int) -> tuple[GemmConfig, int]:
    """Return tile sizes and `split_k_slices`. Stages of fewer rows make more groups, which need
    fewer slices of K each."""
    config = config_of(x, weight)
    n = split_k_slices(*size(weight, config), count, most)
    if n > FEW_SLICES:
        narrow = config_of(x, weight, narrow=True)
        fewer = split_k_slices(*size(weight, narrow), count, most)
        if fewer:
            return narrow, fewer
    return config, n


def config_of(x: PackedRows, weight: Weight, **options: bool) -> GemmConfig:
    """Return `gemm_config` for this input and matrix on its GPU."""
    groups, units = weight.data.shape[:2]
    assert x.width == weight.columns and weight.matrices == 1, (x.width, weight.columns)
    arch = launch.arch(x.data.device.index)
    return gemm_config(weight.type, weight.columns // units, groups, x.tiles, arch, **options)


def size(weight: Weight, config: GemmConfig) -> tuple[int, int]:
    """Return the units of K and the groups of weight rows."""
    groups, units = weight.data.shape[:2]
    return units, groups * PACK_ROWS // config.rows


def _run(
    kind: str,
    config: GemmConfig,
    parts: int,
    x: PackedRows,
    weight: Weight,
    workspace: SplitKWorkspace,
    y: torch.Tensor,
    **numbers: Any,
) -> None:
    units, groups = size(weight, config)
    run = ceil_div(units * groups, workspace.count)
    assert groups <= len(workspace.arrived)
    count = groups * parts or ceil_div(units * groups, run)
    launch.kernel("linear.cu", config.name(kind))(
        count,
        GEMM_THREADS,
        **gemm_arguments(weight, x, workspace, units, groups, run),
        y=y,
        tokens=len(x),
        **numbers,
        shared=config.shared,
    )


def list_units() -> list[Unit]:
    """Return all instances for one matrix, by architecture, and the common ones for two
    matrices."""
    out = []
    for arch in nvrtc.TENSOR_ARCHS:
        cuts = {
            gemm_config(type, unit, groups, tiles, arch)
            for type in packing.PARTS
            for unit in packing.units_of(type)
            for groups in (1, 2, MANY_GROUPS)
            for tiles in (1, 2)
        }
        names = {c.name(kind): c.shared for c in cuts for kind in ("linear", "gate_up")}
        shown = {
            gemm_config(type, 256, 2, 2, arch).name("linear")
            for type in samples.SAMPLES
            if arch in ("sm_86", "sm_90a")
        }
        more = {
            c.name(kind) for c in cuts for kind in ("linear", "gate_up") if c.type in CODEBOOKS
        } - shown
        for groups, tiles in ((1, 1), (1, 2), (MANY_GROUPS, 1), (MANY_GROUPS, 2)):
            part = gemm_config("q6_k", 256, groups, tiles, arch, upper=True)
            names[part.name("linear")] = part.shared
        for tiles in (1, 2):
            for types in (("q4_k", "q6_k"), ("q8_0", "q8_0")):
                a, b = (gemm_config(type, 256, 2, tiles, arch) for type in types)
                names[two_matrix_instance(a, b)] = max(a.shared, b.shared)
        # What gate_up<IQ3XXS, 2, 128, 3> needs there by NVRTC 13.0; 36 is the most by 12.9.
        spill = 72 if arch in ("sm_120", "sm_121") else 16
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
