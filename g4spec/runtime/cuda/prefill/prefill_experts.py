"""Experts in prefill: rows are sorted by expert, all matrices are dequantized, and a grouped matmul
multiplies group by group. Uses bf16 (see `dequant`), or half precision on GPUs without fast bf16.

The result of a row does not depend on other rows. Torch's grouped matmul reads the group sizes from
device memory, so its choice of kernel and tiles can only follow from the shapes, and these are
always those of FULL rows, or of a larger chunk, whatever follows the last group. Within a tile,
rows are independent and K is summed in order. Where torch has no grouped matmul, each matmul has
RUN rows, which may reach into the next group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.constants import (
    GATED_CHANNELS,
    GATED_THREADS,
    GATHER_THREADS,
    ORDER_THREADS,
    ROUTE_WARPS,
)
from g4spec.runtime.cuda.prefill.buffers import Shapes, allocate
from g4spec.runtime.cuda.weights.dequant import Products, Weight

SHRUNK = 2.0**-6
"""Factor of rows in half precision, where bfloat16 is not used."""

RUN = 64
"""Rows of one expert per matmul where there is no grouped matmul."""

MAX_EXPERTS, MAX_USED = 512, 64
"""Experts of a layer, and of a row, that the routing kernel has registers for."""

GROUPED_ARCHS = ("sm_90a", "sm_100")
"""Architectures for which torch has a grouped matmul."""

FULL = 4096
"""Number of rows in the shape of the grouped matmul: the longest chunk that a GPU chooses by
default."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """The packed matrices of a layer's experts.

    Attributes:
        gate_up: E matrices [2 I, H] with gate and up interleaved by 16 rows (`interleaved`) or all
            gate rows first; or E gate and E up matrices [I, H]. down: E matrices [H, I].
    """

    gate_up: Sequence[Weight]
    down: Weight
    interleaved: bool


class Experts:
    """Buffers for the experts of a chunk.

    Args:
        arch: architecture of the GPU, or "" to use only what every GPU supports.

    Attributes:
        halves: whether matmuls are in half precision.
        rows: [T, H] bfloat16, input of the experts. routed: [T, H] float32, input of the router.
        places, weights: [T * k], index of the result of each (row, expert), and its weight.
    """

    rows: torch.Tensor
    routed: torch.Tensor
    places: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor
    ids: torch.Tensor
    visits: torch.Tensor
    ends: torch.Tensor
    sorted: torch.Tensor
    hidden: torch.Tensor

    def __init__(
        self, spec: LayerSpec, n_embd: int, chunk: int, device: torch.device, arch: str
    ) -> None:
        self.spec, self.n_embd, self.k = spec, n_embd, spec.n_expert_used
        self.halves, self.grouped = _without_bf16(arch), _grouped(spec, n_embd, arch)
        for name, buffer in allocate(self.buffers(spec, n_embd, chunk, arch), device).items():
            setattr(self, name, buffer)

    @staticmethod
    def buffers(spec: LayerSpec, n_embd: int, chunk: int, arch: str) -> Shapes:
        """Return the shapes of its buffers. `ids`, `places` and `visits` have one entry per (row,
        expert)."""
        visits, brief = chunk * spec.n_expert_used, torch.bfloat16
        sorted_rows = _matmul_rows(spec, n_embd, chunk, arch) * spec.n_expert_used
        whole, floats = torch.int32, torch.float32
        return {
            "rows": ((chunk, n_embd), brief),
            "routed": ((chunk, n_embd), floats),
            "scores": ((chunk, spec.n_expert), floats),
            "weights": ((visits,), floats),
            "ids": ((visits,), whole),
            "places": ((visits,), whole),
            "visits": ((visits,), whole),
            "ends": ((spec.n_expert,), whole),
            "sorted": ((sorted_rows, n_embd), brief),
            "hidden": ((sorted_rows, spec.n_ff_expert), brief),
        }

    @staticmethod
    def passing(spec: LayerSpec, n_embd: int, chunk: int, arch: str) -> int:
        """Return the bytes of the results of gate and up, and of `down`; without bf16 also of their
        rows in half precision."""
        gate_up = 2 * spec.n_ff_expert * (2 if spec.split_experts else 1)
        widths = max(gate_up, 2 * spec.n_ff_expert + n_embd)
        widths += n_embd if _without_bf16(arch) else 0
        return 2 * _matmul_rows(spec, n_embd, chunk, arch) * spec.n_expert_used * widths

    def __call__(
        self,
        w: Stacks,
        router: torch.Tensor,
        gains: torch.Tensor,
        products: Products,
        count: int,
    ) -> torch.Tensor:
        """Compute the result of `count` rows for each of their experts, [count * k, H] bfloat16 in
        the order of `places`.

        Args:
            router: float32 [E, H], for rows normed with the router's weight. `gains`: [E].
        """
        spec, visits = self.spec, count * self.k
        launch.assert_lengths(spec.n_expert, gains)
        products.plain(self.routed[:count], router, self.scores[:count])
        file = "prefill_experts.cu"
        launch.kernel(file, f"route<{spec.n_expert}, {self.k}>")(
            -(-count // ROUTE_WARPS),
            32 * ROUTE_WARPS,
            scores=self.scores,
            gains=gains,
            ids=self.ids,
            weights=self.weights,
            tokens=count,
            pdl=False,
        )
        launch.kernel(file, "order")(
            spec.n_expert,
            ORDER_THREADS,
            ids=self.ids,
            places=self.places,
            visits=self.visits,
            ends=self.ends,
            n=visits,
            pdl=False,
        )
        launch.kernel(file, f"gather<{self.n_embd}>")(
            visits,
            GATHER_THREADS,
            x=self.rows,
            visits=self.visits,
            to=self.sorted,
            k=self.k,
            pdl=False,
        )
        parts = [self._products(self.sorted, part, products, visits) for part in w.gate_up]
        both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        halves = "false" if w.interleaved and len(parts) == 1 else "true"
        launch.kernel("prefill.cu", f"gated<Bfloat, {halves}>")(
            (visits, -(-spec.n_ff_expert // (GATED_THREADS * GATED_CHANNELS))),
            GATED_THREADS,
            gate_up=both,
            to=self.hidden,
            width=spec.n_ff_expert,
            in_scale=1,
            out_scale=1,
            pdl=False,
        )
        return self._products(self.hidden, w.down, products, visits)

    def _products(
        self, x: torch.Tensor, weight: Weight, products: Products, visits: int
    ) -> torch.Tensor:
        """Multiply the first `visits` rows of x, sorted by expert, with the matrix of their expert.
        Results after them are undefined."""
        stack = products.matrix([weight], torch.float16 if self.halves else torch.bfloat16)
        stack = stack.view(weight.matrices, weight.rows, weight.columns)
        if self.grouped:
            return torch._grouped_mm(x, stack.transpose(1, 2), offs=self.ends)
        return self._one_by_one(x[:visits], stack)

    def _one_by_one(self, x: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        """Multiply expert by expert, RUN rows at a time; the host waits for the group sizes."""
        out, begin = x.new_empty(len(x), stack.shape[1]), 0
        rows = (x * SHRUNK).to(torch.float16) if self.halves else x
        for matrix, end in zip(stack, self.ends.tolist(), strict=True):
            for at in range(begin, end, RUN):
                first = min(at, len(x) - RUN)  # a block of a prompt has more visits than that
                y = torch.mm(rows[first : first + RUN], matrix.t(), out_dtype=torch.float32)
                y = y[at - first : end - first]
                out[at : at + len(y)] = y / SHRUNK if self.halves else y
            begin = end
        return out


def _without_bf16(arch: str) -> bool:
    """Return whether a GPU has no fast bf16 matmul: those before sm_80."""
    return arch not in nvrtc.TENSOR_ARCHS


def _grouped(spec: LayerSpec, n_embd: int, arch: str) -> bool:
    """Return whether torch's grouped matmul can be used: it takes rows of 16-byte multiples."""
    return arch in GROUPED_ARCHS and n_embd % 8 == 0 and spec.n_ff_expert % 8 == 0


def _matmul_rows(spec: LayerSpec, n_embd: int, chunk: int, arch: str) -> int:
    """Return the number of rows in the shape of a matmul."""
    return max(chunk, FULL) if _grouped(spec, n_embd, arch) else chunk
