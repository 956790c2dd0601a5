"""The feed-forward part of a layer with experts, for steps of at most 16 rows: two kernels.

The first does everything that multiplies: the router, the dense branch beside the experts, and the
experts that the rows visit. The second adds up what a row got, and ends the layer. How the work is
shared out is told in experts.cu. Its blocks wait for each other, so all of them must be resident:
steps run one after the other, never two on two streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from g4spec.ops.weights import ExpertLayer
from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.step import packed_rows as rows
from g4spec.runtime.cuda.step.linear import scratch_of
from g4spec.runtime.cuda.step.packed_rows import BLOCK, BLOCK_BYTES, GROUP_ROWS, PackedRows
from g4spec.runtime.cuda.weights.dequant import Weight
from g4spec.runtime.cuda.weights.matrix import GateUpPairs, Matrix, interleave_experts
from g4spec.runtime.cuda.weights.packing import GROUP, format_name, unit_bytes

ARCHS = tuple(arch for arch in nvrtc.ARCHS if arch not in ("sm_70", "sm_75"))
"""Those whose tensor cores have the product."""

TEAMS = 2
"""Of four warps that multiply."""

KEPT = 3072
"""Bytes of shared memory left to the kernel that finishes the layer, which waits beside."""

MAX_EXPERTS, MAX_USED = 1024, 16
"""Experts of a layer, and of a row, that the kernel has registers for."""

ALIGNMENT = 128
"""Upper bound of the padding in the kernel's shared memory."""

COUNTERS = 3
"""Of `Buffers.arrived`, before those of visits."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of a layer.

    Attributes:
        experts, k: how many there are, and how many a row visits.
        width: H. dense, expert: channels of the dense branch and of an expert.
    """

    experts: int
    k: int
    width: int
    dense: int
    expert: int

    @property
    def visits(self) -> int:
        """Most pairs of an expert and up to 8 of its rows in a step."""
        return min(GROUP_ROWS * self.k, 2 * self.experts)


class Buffers:
    """What the kernels hand each other; one for all layers of a shape.

    Attributes:
        arrived: counters, zero between layers.
        scores: of the router, [16, E].
        dense_hidden, hidden: gelu(gate) * up as rows, of each tile of 8 rows and of each visit.
        y: what each row gets from each of its experts, weighted, [16, k, H]. dense: [16, H].
        chosen, weights: int32 and float32 [16, k], the experts of each row in a step, best first.
    """

    def __init__(self, shape: ExpertShape, device: torch.device) -> None:
        def floats(*sizes: int) -> torch.Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=device)

        def hidden(count: int, channels: int) -> torch.Tensor:
            size = (count, channels // BLOCK, BLOCK_BYTES)
            return torch.empty(size, dtype=torch.uint8, device=device)

        count = COUNTERS + shape.visits
        self.arrived = torch.zeros(count, dtype=torch.int32, device=device)
        self.scores = floats(GROUP_ROWS, shape.experts)
        self.dense_hidden = hidden(2, shape.dense)
        self.hidden = hidden(shape.visits, shape.expert)
        self.y = floats(GROUP_ROWS, shape.k, shape.width)
        self.dense = floats(GROUP_ROWS, shape.width)
        self.chosen = torch.empty(GROUP_ROWS, shape.k, dtype=torch.int32, device=device)
        self.weights = floats(GROUP_ROWS, shape.k)


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's weights.

    Attributes:
        router: float32 [E, H], for rows normed with `router_norm` [H]. `gains`: [E].
        dense_up: gates and ups in turns of 16 rows [2 I, H]; dense_down: [H, I].
        up, down: the same of each expert.
        norm_dense, norm_experts, norm: [H], of what either gives, and of both together.
        scale: float32 [1], of the layer's result, or None.
        buffers: shared by layers of the same shape.
    """

    shape: ExpertShape
    router: torch.Tensor
    router_norm: torch.Tensor
    gains: torch.Tensor
    dense_up: Weight
    dense_down: Weight
    up: Weight
    down: Weight
    norm_dense: torch.Tensor
    norm_experts: torch.Tensor
    norm: torch.Tensor
    scale: torch.Tensor | None
    eps: float
    buffers: Buffers

    @classmethod
    def of(
        cls,
        e: ExpertLayer,
        scale: torch.Tensor | None,
        pairs: GateUpPairs,
        buffers: dict[ExpertShape, Buffers],
        device: torch.device,
    ) -> Experts | None:
        """The kernels' view of a layer, if they take its shape. `buffers`: of all layers."""
        matrices = (e.gate, e.up, e.down, e.gate_exps, e.up_exps, e.down_exps)
        if not all(isinstance(m, Matrix) for m in matrices if m is not None):
            return None
        dense, up = pairs(e.gate, e.up), interleave_experts(e.gate_exps, e.up_exps)
        down = e.down_exps.weight
        shape = ExpertShape(
            up.matrices if up else 0, e.n_used, e.down.rows, e.gate.rows, down.columns
        )
        if up is None or len(dense) > 1:
            return None
        if not fits(shape, (up, down, dense[0], e.down.weight), launch.arch(device.index)):
            return None
        if shape not in buffers:
            buffers[shape] = Buffers(shape, device)
        return cls(
            shape,
            e.router,
            e.router_norm,
            e.gains,
            dense[0],
            e.down.weight,
            up,
            down,
            e.post_dense,
            e.post_experts,
            e.post,
            scale,
            e.eps,
            buffers[shape],
        )

    def __call__(self, x: torch.Tensor, dense_rows: PackedRows, expert_rows: PackedRows) -> None:
        """Fills `buffers`.

        Args:
            x: the residual, which the router reads, float32 [T, H].
            dense_rows, expert_rows: its norms, which the two branches read.
        """
        s, b, index = self.shape, self.buffers, x.device.index
        assert x.shape == (len(dense_rows), s.width) and x.shape == (len(expert_rows), s.width)
        arch = launch.arch(index)
        weights = (self.up, self.down, self.dense_up, self.dense_down)
        types = [(w.type, w.columns // w.data.shape[1]) for w in weights]
        launch.kernel("experts.cu", instance(types, s, dense_rows.tiles, arch))(
            torch.cuda.get_device_properties(index).multi_processor_count,
            THREADS,
            dense_rows=dense_rows.data,
            rows=expert_rows.data,
            x=x,
            gate=self.router,
            norm=self.router_norm,
            gains=self.gains,
            dense_up=self.dense_up.data,
            dense_down=self.dense_down.data,
            up=self.up.data,
            down=self.down.data,
            dense_hidden=b.dense_hidden,
            hidden=b.hidden,
            scores=b.scores,
            arrived=b.arrived,
            y=b.y,
            dense_y=b.dense,
            chosen=b.chosen,
            weights=b.weights,
            tokens=len(x),
            width=s.width,
            dense_channels=s.dense,
            channels=s.expert,
            eps=self.eps,
            shared=_bytes(arch),
        )

    def finish(
        self,
        x: torch.Tensor,
        following: torch.Tensor | None,
        out: torch.Tensor,
        to: PackedRows | None,
    ) -> None:
        """The end of the layer, after `__call__`.

        Args:
            x: as before. following: weight [H] of the next layer's norm, or None.
            out: [T, H], where the new residual goes. to: where its norm goes, or None without
                `following`.
        """
        b, (count, width) = self.buffers, x.shape
        launch.kernel("experts_finish.cu", finish_instance(self.shape))(
            count if to is None else 8 * to.tiles,
            32 * rows.block_shape(width)[0],
            y=b.y,
            dense=b.dense,
            x=x,
            experts_norm=self.norm_experts,
            dense_norm=self.norm_dense,
            norm=self.norm,
            next_norm=following,
            scale=self.scale,
            out=out,
            to=None if to is None else to.data,
            arrived=b.arrived,
            counters=len(b.arrived),
            rows=count,
            tiles=to.tiles if to else 0,
            tiled=to is not None and to.tiled,
            width=width,
            eps=self.eps,
        )


THREADS = 32 * (4 * TEAMS + 2)


def instance(types: list[tuple[str, int]], shape: ExpertShape, tiles: int, arch: str) -> str:
    """Name of a kernel of experts.cu.

    Args:
        types: quant type and unit of the experts' gates and ups, their down matrices, and the
            same of the dense branch.
        tiles: of 8 rows, in the inputs.
    """
    loads = -(-shape.width // (4 * 32 * 4 * TEAMS))
    numbers = (shape.experts, shape.k, tiles, TEAMS, _bytes(arch), loads)
    return f"experts<{', '.join([*(format_name(*t) for t in types), *map(str, numbers)])}>"


def finish_instance(shape: ExpertShape) -> str:
    """Name of a kernel of experts_finish.cu."""
    warps, loads = rows.block_shape(shape.width)
    return f"finish<{warps}, {loads}, {shape.k}>"


def _bytes(arch: str) -> int:
    """Shared memory of a block."""
    return nvrtc.SHARED_LIMIT[arch] - KEPT


def fits(shape: ExpertShape, weights: Sequence[Weight], arch: str) -> bool:
    """Return whether the kernels support a layer of this shape with these matrices: gates and ups,
    and down, of the experts and of the dense branch."""
    return (
        all(w.type and w.rows % GROUP in (0, GROUP // 2) for w in weights)
        and shape.dense % BLOCK == 0
        and shape.expert % BLOCK == 0
        and shape.width % BLOCK == 0
        and shape.k <= min(shape.experts, MAX_USED)
        and shape.experts <= MAX_EXPERTS
        and shared_bytes(shape, [(w.type, w.columns // w.data.shape[1]) for w in weights])
        <= _bytes(arch)
    )


def shared_bytes(shape: ExpertShape, types: Sequence[tuple[str, int]]) -> int:
    """Return the least dynamic shared memory of the kernel, or a few bytes more: `MoeStorage` in
    moe_schedule.cuh with one slot for each team. `types`: quant type and unit of each matrix."""
    slot = max(unit_bytes(*t) + t[1] // BLOCK * BLOCK_BYTES for t in types)
    scratch = 4 * TEAMS * max(256, *(scratch_of(*t) for t in types))
    sums = 4 * (2 * (TEAMS - 1) * 4 * 8 * 32 + 4 * 8 + 4 * TEAMS * 20)
    visits = 12 * shape.visits + 4 * GROUP_ROWS * shape.k + (4 + GROUP_ROWS) * shape.experts
    return scratch + sums + visits + TEAMS * (slot + 16) + ALIGNMENT


SHAPE = ExpertShape(128, 8, 2816, 2112, 704)
"""Gemma 4 26B-A4B."""

_FILES = [
    [("q4_k", 256), ("q8_0", 64)] * 2,
    [("q4_k", 256), ("q5_0", 64)] * 2,
    [("q4_k", 256), ("q8_0", 64), ("q4_k", 256), ("q5_0", 64)],
    [("q6_k", 256), ("q8_0", 64)] * 2,
    [("q8_0", 256), ("q8_0", 64)] * 2,
]
"""Types that files of it have: of experts and of the dense branch, up and down each."""

UNITS = [
    Unit(
        "experts.cu",
        tuple(instance(types, SHAPE, tiles, arch) for types in _FILES for tiles in (1, 2)),
        (arch,),
        max_registers=168,
        shared=_bytes(arch),
    )
    for arch in ARCHS
] + [Unit("experts_finish.cu", (finish_instance(SHAPE),), max_registers=128)]
