"""Products of any number of rows with packed matrices. More than 16 rows are multiplied in groups
of 16, up to `linear.MOST_GROUPS` of them for each time that weights are read: see linear_wide.cu.

A matrix is cut as `linear` cuts it for 16 rows, and each sum is added up in the same order: a row
has the same bits in any number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.step import linear as narrow
from g4spec.runtime.cuda.step.elementwise import gated_scale
from g4spec.runtime.cuda.step.linear import ARCHS, MOST_GROUPS, MOST_STAGES, Cut, Exchange, split
from g4spec.runtime.cuda.step.packed_rows import MOST, Rows, empty
from g4spec.runtime.cuda.weights import packing, samples
from g4spec.runtime.cuda.weights.dequant import Weight

GROUPS = (2, 3, MOST_GROUPS)
"""That kernels are made for."""

HANDED_ON = "sm_90a"
"""Where warps hand registers on, so that a block has three warps more, and where warp groups can
multiply."""

WARP_GROUPS = 1
"""By how many products for each step of K they do; 0: warps multiply. Sums have the same bits."""


def linear(x: Rows, weight: Weight, by: Exchange, *, parts: bool = False) -> torch.Tensor:
    """x [T, K] times a packed matrix [N, K] -> float32 [T, N]. `parts`: as of `linear.linear`."""
    if x.groups == 1:
        return narrow.linear(x, weight, by, parts=parts)
    how, n = narrow.parts_of(x, weight, by.count, narrow.MOST_SLICES if parts else 1)
    y = torch.empty(max(n, 1), len(x), weight.rows, dtype=torch.float32, device=x.data.device)
    for at, part, (own,) in _parts(x, how):
        units, groups, run, count = _grid(weight, own, by, n)
        launch.kernel("linear_wide.cu", own.name("linear"))(
            count,
            threads(_arch(x)),
            weights=weight.data,
            rows=part.data,
            row_scale=part.scale,
            partial=by.partial,
            arrived=by.arrived,
            units=units,
            groups=groups,
            run=run,
            y=launch.Strided(y[:, at:]),
            n_rows=weight.rows,
            slices=n,
            tokens=len(part),
            whole=len(x),
            row_groups=part.groups,
            shared=own.shared,
        )
    return y if n > 1 else y[0]


def gate_up(x: Rows, weight: Weight, by: Exchange, *, silu: bool = False) -> Rows:
    """As `linear.gate_up`, of any number of rows."""
    if x.groups == 1:
        return narrow.gate_up(x, weight, by, silu=silu)
    channels = weight.rows // 2
    y = empty(len(x), channels, x.data.device)
    for at, part, (own,) in _parts(x, narrow.cut_of(x, weight)):
        units, groups, run, count = _grid(weight, own, by)
        launch.kernel("linear_wide.cu", own.name("gate_up"))(
            count,
            threads(_arch(x)),
            weights=weight.data,
            rows=part.data,
            row_scale=part.scale,
            partial=by.partial,
            arrived=by.arrived,
            units=units,
            groups=groups,
            run=run,
            y=y.data[at // MOST :],
            channels=channels,
            silu=silu,
            tokens=len(part),
            row_groups=part.groups,
            shared=own.shared,
        )
    return replace(y, scale=gated_scale(x.data.device, y.groups))


def linear_two(x: Rows, first: Weight, second: Weight, by: Exchange) -> torch.Tensor:
    """As `linear.linear_two`, of any number of rows."""
    if x.groups == 1:
        return narrow.linear_two(x, first, second, by)
    y = torch.empty(len(x), first.rows + second.rows, dtype=torch.float32, device=x.data.device)
    for at, part, (a, b) in _parts(x, narrow.cut_of(x, first), narrow.cut_of(x, second)):
        others, count, runs, sizes = narrow.halves(first, a, second, b, by)
        launch.kernel("linear_wide.cu", two(a, b))(
            count,
            threads(_arch(x)),
            weights=first.data,
            rows=part.data,
            row_scale=part.scale,
            partial=by.partial,
            arrived=by.arrived,
            units=sizes[0][0],
            groups=sizes[0][1],
            run=runs[0],
            weights_b=second.data,
            units_b=sizes[1][0],
            groups_b=sizes[1][1],
            run_b=runs[1],
            others=others,
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
    """Of a block."""
    return narrow.THREADS + 32 * 3 * (arch == HANDED_ON)


def two(a: Cut, b: Cut) -> str:
    """Name of the instance that multiplies both."""
    numbers = (a.groups, a.rows, a.stages, b.rows, b.stages, a.warp_groups)
    return f"linear_two_wide<{a.format}, {b.format}, {', '.join(map(str, numbers))}>"


@functools.cache
def widened(hows: tuple[Cut, ...], groups: int, arch: str, warp_groups: int = 0) -> tuple[Cut, ...]:
    """Cuts of 16 rows as they are for `groups` groups of them, or for as many as fit into the
    shared memory, if possible in two stages."""
    enough = [n for n in GROUPS if n >= groups][:1]
    for least in (2, 1):
        for n in (*enough, *(n for n in reversed(GROUPS) if n < groups)):
            found = [_staged(how, n, arch, warp_groups) for how in hows]
            if all(how.stages >= least for how in found):
                return tuple(found)
    raise AssertionError(f"{hows} of 32 rows do not fit into the shared memory of {arch}")


def _staged(how: Cut, groups: int, arch: str, warp_groups: int) -> Cut:
    """The same for so many groups, in as many stages as fit; 0 where none does."""
    stages = range(MOST_STAGES[how.rows], -1, -1)
    each = (replace(how, groups=groups, stages=n, warp_groups=warp_groups) for n in stages)
    return next(c for c in each if c.shared <= nvrtc.SHARED_LIMIT[arch] or not c.stages)


def _parts(x: Rows, *hows: Cut) -> Iterator[tuple[int, Rows, tuple[Cut, ...]]]:
    """Parts of rows that are multiplied at once: first row, rows, cuts."""
    at = 0
    while at < x.groups:
        arch = _arch(x)
        by = WARP_GROUPS if arch == HANDED_ON else 0
        own = widened(hows, min(x.groups - at, MOST_GROUPS), arch, by)
        end = min(at + own[0].groups, x.groups)
        part = x.part(at, end)
        yield at * MOST, part, own
        at = end


def _arch(x: Rows) -> str:
    return launch.arch(x.data.device.index)


def _grid(weight: Weight, how: Cut, by: Exchange, slices: int = 0) -> tuple[int, int, int, int]:
    """Units of K, groups of a stage's rows, units a CTA, and CTAs."""
    units, groups = narrow.size(weight, how)
    run = split(units, groups, by.count)
    assert groups <= len(by.arrived)
    return units, groups, run, groups * slices or split(units, groups, run)


def _units() -> list[Unit]:
    """Common types in as many groups as fit, and one instance of each kernel. What other products
    than those of warp groups spill with registers handed on is outside of the loop over a unit,
    but for a few words."""
    out = []
    for arch in ARCHS:
        q4, q5k, q6, q8, q5, q40 = (
            narrow.cut(type, 256, 2, 2, arch)
            for type in ("q4_k", "q5_k", "q6_k", "q8_0", "q5_1", "q4_0")
        )
        few = {"sm_86": (q4, q8), "sm_120": (q4, q6)}.get(arch, (q4,))
        warp_groups = WARP_GROUPS if arch == HANDED_ON else 0
        others = [
            narrow.cut(type, packing.units_of(type)[-1], 2, 2, arch)
            for type in (*samples.SAMPLES, *samples.ALIKE)
        ]
        more = _singles(tuple(others), arch, warp_groups, "linear", "gate_up")
        out.append(_unit(arch, {}, 800, more))
        if arch != HANDED_ON:
            out.append(_unit(arch, _singles(few, arch, 0), 800))
            continue
        out.append(_unit(arch, _singles((q4, q6, q8, q5), arch, 0), 400))
        names = _singles((q4, q5k, q6, q8, q5, q40), arch, WARP_GROUPS)
        for groups in GROUPS:
            (own,) = widened((q4,), groups, arch, WARP_GROUPS)
            names |= {own.name(kind): own.shared for kind in ("linear", "gate_up")}
        a, b = widened((q4, q6), MOST_GROUPS, arch, WARP_GROUPS)
        names[two(a, b)] = max(a.shared, b.shared)
        out.append(_unit(arch, names, 0))
    return out


def _singles(hows: tuple[Cut, ...], arch: str, warp_groups: int, *kinds: str) -> dict[str, int]:
    """Products with one matrix, "linear" or of `kinds`, and their shared memory."""
    own = [widened((how,), MOST_GROUPS, arch, warp_groups)[0] for how in hows]
    return {how.name(kind): how.shared for how in own for kind in kinds or ("linear",)}


def _unit(
    arch: str, names: dict[str, int], spill: int, more: Mapping[str, int] = MappingProxyType({})
) -> Unit:
    shared = max([*names.values(), *more.values()])
    return Unit("linear_wide.cu", tuple(sorted(names)), (arch,), 168, shared, spill, tuple(more))


UNITS = _units()
