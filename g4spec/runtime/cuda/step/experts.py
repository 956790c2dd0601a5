"""The feed-forward part of a layer with experts, for at most 128 rows of a step: two kernels.

The first computes all matmuls: the router, the dense branch, and the experts that the rows use. The
second adds the results of each row and ends the layer. experts.cu describes how the work is
distributed. Its blocks wait for each other, so all of them must be resident: steps never run on two
streams at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from g4spec.ops.weights import ExpertLayer
from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.constants import (
    ACT_BYTES,
    ACT_COLUMNS,
    GROUP_ROWS,
    MOE_COPY_WARPS,
    MOE_COUNTERS,
    MOE_MAX_ROWS,
    MOE_TEAM_WARPS,
    PACK_ROWS,
)
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.step import packed_rows as rows
from g4spec.runtime.cuda.step.gemm_tiles import scratch_of
from g4spec.runtime.cuda.step.packed_rows import PackedRows
from g4spec.runtime.cuda.weights.dequant import Weight
from g4spec.runtime.cuda.weights.matrix import GateUpPairs, Matrix, interleave_experts
from g4spec.runtime.cuda.weights.packing import format_name, unit_bytes

TEAMS = 2
"""Teams of four warps that multiply."""

KEPT = 3072
"""Bytes of shared memory left for the kernel that finishes the layer and may start early."""

CAPACITIES = (MOE_MAX_ROWS, 64, 32, GROUP_ROWS)
"""Maximum rows of the kernels for more than 8 rows. A step of more rows takes several launches."""

MAX_EXPERTS, MAX_USED = 1024, 16
"""Experts of a layer, and of a row, that the kernel has registers for."""

ALIGNMENT = 256
"""Upper bound of the padding, counters and queue in the kernel's shared memory."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of a layer.

    Attributes:
        experts, k: number of experts, and experts per row.
        width: H.
        dense, expert: channels of the dense branch and of an expert.
    """

    experts: int
    k: int
    width: int
    dense: int
    expert: int

    def visits(self, count: int) -> int:
        """Return the maximum number of visits, each of an expert and up to 8 of its rows, for
        `count` rows: the sum over experts of ceil(rows / 8)."""
        pairs = count * self.k
        return (pairs + 7 * min(pairs, self.experts)) // 8


class Buffers:
    """Buffers between the kernels, shared by all layers of a shape.

    Attributes:
        arrived: counters, zero between layers.
        scores: router scores, [128, E].
        dense_hidden, hidden: gelu(gate) * up as packed rows, of each tile of 8 rows and of each
            visit.
        y: weighted result of each of a row's experts, [128, k, H].
        dense: result of the dense branch, [128, H].
        chosen, weights: int32 and float32 [128, k], the experts of each row of a step, best first.
    """

    def __init__(self, shape: ExpertShape, device: torch.device) -> None:
        def floats(*sizes: int) -> torch.Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=device)

        def hidden(count: int, channels: int) -> torch.Tensor:
            size = (count, channels // ACT_COLUMNS, ACT_BYTES)
            return torch.empty(size, dtype=torch.uint8, device=device)

        count, visits = MOE_MAX_ROWS, shape.visits(MOE_MAX_ROWS)
        self.arrived = torch.zeros(MOE_COUNTERS + visits, dtype=torch.int32, device=device)
        self.scores = floats(count, shape.experts)
        self.dense_hidden = hidden(count // 8, shape.dense)
        self.hidden = hidden(visits, shape.expert)
        self.y = floats(count, shape.k, shape.width)
        self.dense = floats(count, shape.width)
        self.chosen = torch.empty(count, shape.k, dtype=torch.int32, device=device)
        self.weights = floats(count, shape.k)


def buffer_bytes(shape: ExpertShape) -> int:
    """Return the bytes of `Buffers`."""
    buffers = Buffers(shape, torch.device("meta"))
    return sum(x.nbytes for x in vars(buffers).values())


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's weights.

    Attributes:
        router: float32 [E, H], for rows normed with `router_norm` [H].
        gains: [E].
        dense_up: gate and up rows interleaved by 16, [2 I, H].
        dense_down: [H, I].
        up, down: the same for each expert.
        norm_dense, norm_experts, norm: [H], norms of the results of both branches, and of their
            sum.
        scale: float32 [1], factor of the layer's result, or None.
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
        """Return the weights of a layer for the kernels, or None if they do not support it.
        `buffers`: those of all layers."""
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
        width = shape.width
        launch.assert_lengths(width, e.router_norm, e.post_dense, e.post_experts, e.post)
        launch.assert_lengths(shape.experts, e.gains)
        assert e.router.shape == (shape.experts, width), (e.router.shape, shape)
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

    @property
    def types(self) -> list[tuple[str, int]]:
        """Quant type and unit of the matrices: up and down, those of the dense branch."""
        weights = (self.up, self.down, self.dense_up, self.dense_down)
        return [(w.type, w.columns // w.data.shape[1]) for w in weights]

    @property
    def capacity(self) -> int:
        """Maximum number of rows of a launch: as many as shared memory has room for."""
        return capacity(self.shape, self.types, launch.arch(self.up.data.device.index))

    def __call__(self, x: torch.Tensor, dense_rows: PackedRows, expert_rows: PackedRows) -> None:
        """Compute the contents of `buffers`.

        Args:
            x: the residual, input of the router, float32 [T, H], at most `capacity` rows.
            dense_rows, expert_rows: its norms, inputs of the two branches, in the layout of
                `packed_rows.empty(.., single=True)`.
        """
        s, b, index = self.shape, self.buffers, x.device.index
        assert x.shape == (len(dense_rows), s.width) and x.shape == (len(expert_rows), s.width)
        assert dense_rows.tiles == expert_rows.tiles == 1
        arch = launch.arch(index)
        most = next((n for n in (8, GROUP_ROWS) if len(x) <= n), self.capacity)
        assert len(x) <= most, (len(x), most)
        launch.kernel("experts.cu", instance(self.types, s, most, arch))(
            launch.processors(index),
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
        """Compute the end of the layer, after `__call__`.

        Args:
            x: the residual, as in `__call__`.
            following: weight [H] of the next layer's norm, or None.
            out: output [T, H], the new residual.
            to: output, its norm; None without `following`.
        """
        b, (count, width) = self.buffers, x.shape
        padded = count if to is None else to.padded
        warps, loads = rows.block_shape(width)
        split = rows.splits(padded, width, x.device)
        launch.kernel("experts_finish.cu", finish_instance(self.shape, split))(
            (padded, loads if split else 1),
            32 * warps,
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
            swizzled=to is not None and to.swizzled,
            width=width,
            eps=self.eps,
        )


THREADS = 32 * (MOE_TEAM_WARPS * TEAMS + MOE_COPY_WARPS)


def instance(types: Sequence[tuple[str, int]], shape: ExpertShape, most: int, arch: str) -> str:
    """Return the name of a kernel of experts.cu.

    Args:
        types: quant type and unit of the experts' gate and up, of their down matrices, and of the
            same of the dense branch.
        most: maximum number of rows: 8, or one of `CAPACITIES`.
    """
    loads = -(-shape.width // (4 * 32 * MOE_TEAM_WARPS * TEAMS))
    numbers = (shape.experts, shape.k, most, TEAMS, _bytes(arch), loads)
    return f"experts<{', '.join([*(format_name(*t) for t in types), *map(str, numbers)])}>"


def finish_instance(shape: ExpertShape, split: bool) -> str:
    """Return the name of a kernel of experts_finish.cu. `split`: see `packed_rows.splits`."""
    warps, loads = rows.block_shape(shape.width)
    return f"finish<{warps}, {loads}, {shape.k}, {str(split).lower()}>"


def _bytes(arch: str) -> int:
    """Return the shared memory of a block."""
    return nvrtc.SHARED_LIMIT[arch] - KEPT


def fits(shape: ExpertShape, weights: Sequence[Weight], arch: str) -> bool:
    """Return whether the kernels support a layer of this shape with these matrices: gates and ups,
    and down, of the experts and of the dense branch."""
    return (
        all(w.type and w.rows % PACK_ROWS in (0, PACK_ROWS // 2) for w in weights)
        and shape.dense % ACT_COLUMNS == 0
        and shape.expert % ACT_COLUMNS == 0
        and shape.width % ACT_COLUMNS == 0
        and shape.k <= min(shape.experts, MAX_USED)
        and shape.experts <= MAX_EXPERTS
        and capacity(shape, [(w.type, w.columns // w.data.shape[1]) for w in weights], arch) > 0
    )


def capacity(shape: ExpertShape, types: Sequence[tuple[str, int]], arch: str) -> int:
    """Return the largest of `CAPACITIES` for which the kernel fits in shared memory, or 0. `types`:
    quant type and unit of each matrix."""
    fitting = (n for n in CAPACITIES if shared_bytes(shape, types, n) <= _bytes(arch))
    return next(fitting, 0)


def shared_bytes(shape: ExpertShape, types: Sequence[tuple[str, int]], count: int) -> int:
    """Return the least dynamic shared memory of the kernel for `count` rows, or a few bytes more:
    `MoeStorage` in moe_schedule.cuh with one slot for each team. `types`: quant type and unit of
    each matrix."""
    slot = max(unit_bytes(*t) + t[1] // ACT_COLUMNS * ACT_BYTES for t in types)
    warps = MOE_TEAM_WARPS * TEAMS
    scratch = warps * max(256, *(scratch_of(*t) for t in types))
    sums = 4 * (2 * MOE_TEAM_WARPS * 8 * 32 + MOE_TEAM_WARPS * 8)
    pairs, words = count * shape.k, -(-count // 32)
    visits = (
        (24 if count > GROUP_ROWS else 20) * shape.visits(count)
        + 6 * pairs
        + (2 + 4 * words) * shape.experts
    )
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
"""Quant types in files of it: of experts and of the dense branch, up and down each."""

_ROWS = ((0, 2), (0, 1, 2), (2,), (0, 2), (1, 2))
"""Indices of the numbers of rows that tests compile by default for each of these: the largest for
all, and each of the others for two different types of experts."""


def _unit(arch: str) -> Unit:
    names = [
        [instance(types, SHAPE, n, arch) for n in (8, GROUP_ROWS, capacity(SHAPE, types, arch))]
        for types in _FILES
    ]
    chosen = tuple(of[i] for of, rows in zip(names, _ROWS, strict=True) for i in rows)
    more = tuple(name for of in names for name in of if name not in chosen)
    spill = 28 if arch == "sm_100" else 0
    return Unit("experts.cu", chosen, (arch,), 168, _bytes(arch), spill, more)


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    finishes = tuple(finish_instance(SHAPE, split) for split in (False, True))
    finish = Unit("experts_finish.cu", finishes, max_registers=128)
    return [*(_unit(arch) for arch in nvrtc.TENSOR_ARCHS), finish]
