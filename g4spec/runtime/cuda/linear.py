"""Products of at most 16 rows with a packed matrix, on tensor cores: see linear.cu.

How a matrix is cut depends on the matrix and the GPU, never on the number of rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from g4spec.runtime.cuda import launch, nvrtc, packing
from g4spec.runtime.cuda.dequant import Weight
from g4spec.runtime.cuda.elementwise import gated_scale
from g4spec.runtime.cuda.packing import GROUP
from g4spec.runtime.cuda.rows import BLOCK, Rows, empty
from g4spec.runtime.cuda.units import Unit

ARCHS = tuple(a for a in nvrtc.ARCHS if a not in ("sm_70", "sm_75"))
"""Those whose tensor cores and copies the kernels are made of."""

CONSUMERS = 8
THREADS = 32 * (CONSUMERS + 1)

SCRATCH = {"q4_k": 1664, "q5_k": 1664, "q6_k": 2048}
"""Bytes of shared memory in which a warp keeps a unit's factors; 0 for others."""

MOST_STAGES = 5
HUGE = 1024
"""Groups from which on stages of Q6_K hold 256 rows."""


@dataclass(frozen=True, slots=True)
class Cut:
    """An instance of the kernels.

    Attributes:
        type, unit: quant type, and columns of a unit.
        tiles: of 8 rows of activations. rows: of weights in a stage. stages: in shared memory.
    """

    type: str
    unit: int
    tiles: int
    rows: int
    stages: int

    def name(self, kind: str) -> str:
        form = self.type.upper().replace("_", "")
        form += "" if self.type.endswith("_k") else f"<{self.unit}>"
        return f"{kind}<{form}, {self.tiles}, {self.rows}, {self.stages}>"

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        stage = packing.unit_bytes(self.type, self.unit) * (self.rows // GROUP)
        stage = max(stage + self.unit // BLOCK * 1216 * self.tiles, self.rows * 8 * self.tiles * 4)
        teams = CONSUMERS * 32 // self.rows
        other = (1024 if teams > 1 else 512) * self.tiles
        scratch = max(SCRATCH.get(self.type, 0) // teams, other)
        pairs = CONSUMERS * 8 * self.tiles * 4
        return self.stages * (stage + 16) + CONSUMERS * scratch + pairs


@functools.cache
def cut(type: str, unit: int, groups: int, tiles: int, arch: str) -> Cut:
    """How a matrix of so many groups is multiplied. The rows of a stage are a matter of the
    matrix: they decide how its K is shared out."""
    wide = groups % 2 == 0 and (type in ("q4_k", "q5_k") or (type == "q6_k" and groups >= HUGE))
    room = nvrtc.SHARED_LIMIT[arch]
    rows = 256 if wide and Cut(type, unit, 2, 256, 2).shared <= room else 128
    for stages in range(3 if rows == 256 else MOST_STAGES, 0, -1):
        found = Cut(type, unit, tiles, rows, stages)
        if found.shared <= room:
            return found
    raise AssertionError(f"{type} does not fit into the shared memory of {arch}")


class Exchange:
    """Where CTAs that share a group of rows leave their sums; kernels take turns with it.

    Attributes:
        partial: float32. arrived: counters, zero between kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.cuda.get_device_properties(device).multi_processor_count
        self.partial = torch.empty(self.count * 16 * 256, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1 << 14, dtype=torch.int32, device=device)


def linear(x: Rows, weight: Weight, by: Exchange) -> torch.Tensor:
    """x [T, K] times a packed matrix [N, K] -> float32 [T, N]."""
    y = torch.empty(len(x), weight.rows, dtype=torch.float32, device=x.data.device)
    _run("linear", x, weight, by, y, weight.rows)
    return y


def gate_up(x: Rows, weight: Weight, by: Exchange) -> Rows:
    """gelu(gates) * ups of x [T, K], from gates and ups in turns of 16 rows, as rows."""
    channels = weight.rows // 2
    y = empty(len(x), channels, x.data.device)
    _run("gate_up", x, weight, by, y.data, channels)
    return Rows(y.data, y.count, y.width, gated_scale(x.data.device))


def _run(kind: str, x: Rows, weight: Weight, by: Exchange, y: torch.Tensor, n: int) -> None:
    groups, units = weight.data.shape[:2]
    assert x.width == weight.columns and weight.matrices == 1, (x.width, weight.columns)
    how = cut(weight.type, weight.columns // units, groups, x.tiles, launch.arch(y.device.index))
    groups = groups * GROUP // how.rows
    run = -(-units * groups // by.count)
    assert groups <= len(by.arrived)
    launch.kernel("linear.cu", how.name(kind))(
        -(-units * groups // run), THREADS, weight.data, x.data, x.scale, by.partial, by.arrived,
        np.int32(units), np.int32(groups), np.int32(run), y, np.int32(n), np.int32(len(x)),
        shared=how.shared,
    )  # fmt: skip


def _units() -> list[Unit]:
    """Every instance there is, by architecture."""
    out = []
    for arch in ARCHS:
        cuts = {cut(type, unit, groups, tiles, arch)
                for type in packing.PARTS for unit in ((256,) if type.endswith("_k") else (64, 256))
                for groups in (1, 2, HUGE) for tiles in (1, 2)}  # fmt: skip
        names = {c.name(kind): c.shared for c in cuts for kind in ("linear", "gate_up")}
        out.append(Unit("linear.cu", tuple(sorted(names)), (arch,), 168,
                        max(names.values()), 16))
    return out


UNITS = _units()
