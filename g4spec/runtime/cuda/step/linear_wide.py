"""GEMM of any number of rows with packed quantized matrices (linear_wide.cu). Rows come in groups
of 16; up to `linear.MAX_ROW_GROUPS` groups share one read of the weights.

Tiling and the order of sums are those of `linear` for 16 rows: a row has the same bits in a batch
of any size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.constants import GEMM_CONSUMERS, GEMM_PRODUCER_WARPS, GROUP_ROWS
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.step import linear as narrow
from g4spec.runtime.cuda.step.elementwise import gated_scale
from g4spec.runtime.cuda.step.gemm_tiles import (
    MAX_STAGES,
    SCALED_CODEBOOKS,
    GemmConfig,
    gemm_config,
)
from g4spec.runtime.cuda.step.linear import MAX_ROW_GROUPS, SplitKWorkspace, ceil_div
from g4spec.runtime.cuda.step.packed_rows import PackedRows, empty
from g4spec.runtime.cuda.weights import packing, samples
from g4spec.runtime.cuda.weights.dequant import Weight

GROUPS = (2, 3, 4, 6, MAX_ROW_GROUPS)
"""Numbers of row groups that kernels exist for."""

FEW_GROUPS = 4
"""Maximum number of row groups without `wgmma`, and of types not in SCALED: 8 took longer than
twice 4."""

SCALED = ("q6_k", *SCALED_CODEBOOKS)
"""Types whose codes are multiplied by their scales before the product (gemm_scaled.cuh)."""

WGMMA_ARCH = "sm_90a"
"""Architecture with `wgmma`, and with `setmaxnreg`, which lets a block have three more warps."""

WGMMA = True
"""Use `wgmma` where there is one, not `mma.sync`. The sums have the same bits."""


def linear(
    x: PackedRows, weight: Weight, workspace: SplitKWorkspace, *, parts: bool = False
) -> torch.Tensor:
    """Return x [T, K] times a packed matrix [N, K] transposed, float32 [T, N]; see
    `linear.linear`."""
    if x.groups == 1:
        return narrow.linear(x, weight, workspace, parts=parts)
    narrow_config, n = narrow.split_k_config(
        x, weight, workspace.count, narrow.MAX_SLICES if parts else 1
    )
    y = torch.empty(max(n, 1), len(x), weight.rows, dtype=torch.float32, device=x.data.device)
    for at, part, (config,) in _parts(x, narrow_config):
        units, groups, run, count = _grid(weight, config, workspace, n)
        launch.kernel("linear_wide.cu", config.name("linear"))(
            count,
            threads(_arch(x)),
            **narrow.gemm_arguments(weight, part, workspace, units, groups, run),
            y=launch.Strided(y[:, at:]),
            n_rows=weight.rows,
            slices=n,
            tokens=len(part),
            whole=len(x),
            row_groups=part.groups,
            shared=config.shared,
        )
    return y if n > 1 else y[0]


def gate_up(
    x: PackedRows, weight: Weight, workspace: SplitKWorkspace, *, silu: bool = False
) -> PackedRows:
    """Compute `linear.gate_up` for any number of rows."""
    if x.groups == 1:
        return narrow.gate_up(x, weight, workspace, silu=silu)
    channels = weight.rows // 2
    y = empty(len(x), channels, x.data.device)
    for at, part, (config,) in _parts(x, narrow.config_of(x, weight)):
        units, groups, run, count = _grid(weight, config, workspace)
        launch.kernel("linear_wide.cu", config.name("gate_up"))(
            count,
            threads(_arch(x)),
            **narrow.gemm_arguments(weight, part, workspace, units, groups, run),
            y=y.data[at // GROUP_ROWS :],
            channels=channels,
            silu=silu,
            tokens=len(part),
            row_groups=part.groups,
            shared=config.shared,
        )
    return replace(y, scale=gated_scale(x.data.device, y.groups))


def linear_two(
    x: PackedRows, first: Weight, second: Weight, workspace: SplitKWorkspace
) -> torch.Tensor:
    """Compute `linear.linear_two` for any number of rows."""
    if x.groups == 1:
        return narrow.linear_two(x, first, second, workspace)
    y = torch.empty(len(x), first.rows + second.rows, dtype=torch.float32, device=x.data.device)
    for at, part, (a, b) in _parts(x, narrow.config_of(x, first), narrow.config_of(x, second)):
        first_ctas, count, runs, sizes = narrow.two_matrix_grid(first, a, second, b, workspace)
        launch.kernel("linear_wide.cu", two_matrix_instance(a, b))(
            count,
            threads(_arch(x)),
            **narrow.gemm_arguments(first, part, workspace, sizes[0][0], sizes[0][1], runs[0]),
            weights_b=second.data,
            units_b=sizes[1][0],
            groups_b=sizes[1][1],
            run_b=runs[1],
            others=first_ctas,
            y=y[at:],
            n_rows=first.rows,
            n_rows_b=second.rows,
            stride=y.shape[1],
            tokens=len(part),
            row_groups=part.groups,
            shared=max(a.shared, b.shared),
        )
    return y


def threads(arch: str) -> int:
    """Return the threads of a block."""
    warps = GEMM_PRODUCER_WARPS if arch == WGMMA_ARCH else 1
    return 32 * (GEMM_CONSUMERS + warps)


def two_matrix_instance(a: GemmConfig, b: GemmConfig) -> str:
    """Return the name of the instance that multiplies both matrices."""
    numbers = (a.groups, a.rows, a.stages, b.rows, b.stages, int(a.wgmma))
    return f"linear_two_wide<{a.format}, {b.format}, {', '.join(map(str, numbers))}>"


@functools.cache
def for_row_groups(
    configs: tuple[GemmConfig, ...], groups: int, arch: str, wgmma: bool
) -> tuple[GemmConfig, ...]:
    """Return configs for 16 rows changed to `groups` row groups, or to as many as shared memory
    holds, with two stages if possible."""
    many = wgmma and all(config.type in SCALED for config in configs)
    known = [n for n in GROUPS if n <= (MAX_ROW_GROUPS if many else FEW_GROUPS)]
    enough = [n for n in known if n >= groups][:1]
    for least in (2, 1):
        for n in (*enough, *(n for n in reversed(known) if n < groups)):
            staged = [_staged(config, n, arch, wgmma) for config in configs]
            if all(config.stages >= least for config in staged):
                return tuple(staged)
    raise AssertionError(f"{configs} of 32 rows do not fit into the shared memory of {arch}")


def _staged(config: GemmConfig, groups: int, arch: str, wgmma: bool) -> GemmConfig:
    """Return `config` for `groups` row groups, with as many stages as fit (0 if none does)."""
    stages = range(MAX_STAGES[config.rows], -1, -1)
    config = replace(config, groups=groups, wgmma=wgmma, pairs=False)
    each = (replace(config, stages=n) for n in stages)
    return next(c for c in each if c.shared <= nvrtc.SHARED_LIMIT[arch] or not c.stages)


def _parts(
    x: PackedRows, *configs: GemmConfig
) -> Iterator[tuple[int, PackedRows, tuple[GemmConfig, ...]]]:
    """Yield the parts of x that share a read of the weights: first row, rows, configs."""
    at = 0
    while at < x.groups:
        arch = _arch(x)
        wgmma = WGMMA and arch == WGMMA_ARCH
        config = for_row_groups(configs, min(x.groups - at, MAX_ROW_GROUPS), arch, wgmma)
        end = min(at + config[0].groups, x.groups)
        part = x.part(at, end)
        yield at * GROUP_ROWS, part, config
        at = end


def _arch(x: PackedRows) -> str:
    return launch.arch(x.data.device.index)


def _grid(
    weight: Weight, config: GemmConfig, workspace: SplitKWorkspace, slices: int = 0
) -> tuple[int, int, int, int]:
    """Return units of K, groups of weight rows, units per CTA, and CTAs."""
    units, groups = narrow.size(weight, config)
    run = ceil_div(units * groups, workspace.count)
    assert groups <= len(workspace.arrived)
    return units, groups, run, groups * slices or ceil_div(units * groups, run)


def list_units() -> list[Unit]:
    """Return instances for common types in as many row groups as fit, and one of each kernel.
    Kernels without `wgmma` spill registers, nearly all of them outside of the loop over a unit."""
    out = []
    for arch in nvrtc.TENSOR_ARCHS:
        q4, q5k, q6, q8, q5, q40 = (
            gemm_config(type, 256, 2, 2, arch)
            for type in ("q4_k", "q5_k", "q6_k", "q8_0", "q5_1", "q4_0")
        )
        few = {"sm_86": (q4, q8), "sm_120": (q4, q6)}.get(arch, (q4,))
        wgmma = WGMMA and arch == WGMMA_ARCH
        first_ctas = [
            gemm_config(type, packing.units_of(type)[-1], 2, 2, arch)
            for type in (*samples.SAMPLES, *samples.ALIKE)
        ]
        more = _singles(tuple(first_ctas), arch, wgmma, "linear", "gate_up")
        out.append(_unit(arch, {}, 800, more))
        if arch != WGMMA_ARCH:
            out.append(_unit(arch, _singles(few, arch, False), 800))
            continue
        out.append(_unit(arch, _singles((q4, q6, q8, q5), arch, False), 400))
        names = _singles((q4, q5k, q8, q5, q40), arch, WGMMA)
        most = _singles((q6,), arch, WGMMA, "linear", "gate_up")
        out.append(_unit(arch, most, 100))
        for groups in GROUPS[:-1]:
            of = (q4,) if groups <= FEW_GROUPS else (q6,)
            (config,) = for_row_groups(of, groups, arch, WGMMA)
            assert config.groups == groups, config
            names |= {config.name(kind): config.shared for kind in ("linear", "gate_up")}
        a, b = for_row_groups((q4, q6), FEW_GROUPS, arch, WGMMA)
        names[two_matrix_instance(a, b)] = max(a.shared, b.shared)
        out.append(_unit(arch, names, 0))
    return out


def _singles(
    configs: tuple[GemmConfig, ...], arch: str, wgmma: bool, *kinds: str
) -> dict[str, int]:
    """Return the names of kernels for one matrix, "linear" or `kinds`, and their shared memory."""
    config = [for_row_groups((config,), MAX_ROW_GROUPS, arch, wgmma)[0] for config in configs]
    return {config.name(kind): config.shared for config in config for kind in kinds or ("linear",)}


def _unit(
    arch: str, names: dict[str, int], spill: int, more: Mapping[str, int] = MappingProxyType({})
) -> Unit:
    shared = max([*names.values(), *more.values()])
    return Unit("linear_wide.cu", tuple(sorted(names)), (arch,), 168, shared, spill, tuple(more))
