"""The shared memory that a launch reserves is what the kernel's layout takes. Both are computed: a
launch needs the size before it has the kernel. No GPU is needed: NVRTC compares the numbers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from g4spec.runtime.cuda.build import nvrtc
from g4spec.runtime.cuda.build.constants import MAX_STEP_ROWS
from g4spec.runtime.cuda.cache.cache_types import KINDS
from g4spec.runtime.cuda.cache.cuda_kv_size import shares
from g4spec.runtime.cuda.cache.heads import HEAD_DIMS
from g4spec.runtime.cuda.step import attention, attention_window, experts, gemm_tiles, linear_wide
from g4spec.runtime.cuda.weights import packing

ARCH = "sm_90a"
"""Sizes do not depend on the architecture for which they are compiled."""

Sizes = Mapping[str, int]


def of_attention() -> Sizes:
    shapes = {
        attention.choose(dim, kind, rows, arch, pairs)[0]
        for arch in nvrtc.TENSOR_ARCHS
        for dim, kind, rows in itertools.product(HEAD_DIMS, KINDS, (1, 8, 9, 17, 64))
        for pairs in (0, 64)
        if not pairs or shares(dim, pairs)
    }
    return {
        s.name.replace("attend_chunks", "AttentionConfig") + "::SHARED": s.shared for s in shapes
    }


def of_windows() -> Sizes:
    shapes = [(chunk, groups, 16) for chunk in (128, 256) for groups in (1, 2)]
    shapes += [(chunk, 1, warps) for chunk in (128, 256) for warps in attention_window.FEW_WARPS]
    return {
        f"Window<{', '.join(map(str, s))}>::SHARED": attention_window.shared_bytes(*s)
        for s in shapes
    }


def of_gemms() -> Sizes:
    narrow = {
        gemm_tiles.gemm_config(type, unit, groups, tiles, arch, upper=upper)
        for arch in nvrtc.TENSOR_ARCHS
        for type in packing.PARTS
        for unit in packing.units_of(type)
        for groups, tiles in itertools.product((1, 2, gemm_tiles.MANY_GROUPS), (1, 2))
        for upper in {False, type == "q6_k"}
    }
    wide = {
        linear_wide.for_row_groups((config,), groups, arch, arch == linear_wide.WGMMA_ARCH)[0]
        for config in narrow
        if config.tiles == 2 and not config.upper
        for groups in linear_wide.GROUPS
        for arch in ("sm_86", linear_wide.WGMMA_ARCH)
        if config.shared <= nvrtc.SHARED_LIMIT[arch]
    }
    return {
        f"GemmShared<{c.format}, {c.tiles}, {c.rows}, {c.stages}, {c.groups}>::BYTES": c.shared
        for c in narrow | wide
    }


@pytest.mark.parametrize(
    "headers,sizes",
    [
        (("window_tiles",), {**of_attention(), **of_windows()}),
        (("gemm_pipeline", "formats"), of_gemms()),
    ],
    ids=["attention", "gemm"],
)
def test_launches_reserve_what_kernels_use(
    headers: tuple[str, ...], sizes: Sizes, tmp_path: Path
) -> None:
    file = tmp_path / "sizes.cu"
    lines = [f'#include "{name}.cuh"' for name in headers]
    lines += [f'static_assert({of} == {n}, "{of}");' for of, n in sorted(sizes.items())]
    file.write_text("\n".join([*lines, "__global__ void nothing() {}"]))
    assert len(sizes) > 20
    nvrtc.compile(nvrtc.closure(str(file)), "nothing", ARCH)


def test_kernels_of_experts_fit_into_what_a_launch_reserves(tmp_path: Path) -> None:
    """`shared_bytes` is an upper bound."""
    file, lines = tmp_path / "sizes.cu", ['#include "moe_schedule.cuh"', '#include "formats.cuh"']
    s = experts.SHAPE
    for types in (["q4_k", "q8_0"], ["q6_k", "q5_0"], ["iq4_xs", "q8_0"], ["q3_k", "mxfp4"]):
        of = [(types[0], 256), (types[1], 64)] * 2
        names = ", ".join(packing.format_name(*t) for t in of)
        for rows in (8, MAX_STEP_ROWS, *experts.CAPACITIES[:-1]):
            config = f"MoeConfig<{names}, {s.experts}, {s.k}, {rows}, {experts.TEAMS}, 3>"
            least = f"sizeof(MoeFixedStorage<{config}>) + {experts.TEAMS} * ({config}::SLOT + 16)"
            most = experts.shared_bytes(s, of, rows)
            lines.append(f"static_assert({least} <= {most} && {least} + 256 > {most});")
    file.write_text("\n".join([*lines, "__global__ void nothing() {}"]))
    nvrtc.compile(nvrtc.closure(str(file)), "nothing", ARCH)
