"""Experts of many rows: rows are put in the order of their experts, whose matrices are
dequantized all together, and multiplied group by group. In bf16, see `dequant`; where a GPU has no
fast product in bf16, in half precision.

What a row gets does not depend on the rows beside it. Torch's grouped product finds the sizes of
groups in device memory. So the kernel that it takes, and how that cuts rows and columns into tiles,
can only follow from the shapes, and these are always the same: the visits of FULL rows, whatever
comes behind the last group. Within a tile, rows are independent and K is summed in order.
Where torch has none and would multiply group by group, each product has RUN rows, which may reach
into the next group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.prefill.buffers import Shapes, allocate
from g4spec.runtime.cuda.step.attention import TENSOR_ARCHS
from g4spec.runtime.cuda.weights.dequant import Products, Weight

SHRUNK = 2.0**-6
"""What rows are multiplied with to fit half precision, where bfloat16 is not used."""

RUN = 64
"""Rows of one expert that are multiplied at a time where experts are taken one by one."""

GROUPED_ARCHS = ("sm_90a", "sm_100")
"""GPUs for which torch has a grouped product."""

FULL = 4096
"""Rows whose visits the grouped product is given: the longest chunk that a GPU reads unless it is
asked to."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """The matrices of a layer's experts, as they lie in memory.

    Attributes:
        gate_up: E matrices [2 I, H]: gates and ups in turns of 16 rows (`interleaved`), or all
            gates first; or E of gates and E of ups [I, H]. down: E matrices [H, I].
    """

    gate_up: Sequence[Weight]
    down: Weight
    interleaved: bool


class Experts:
    """Buffers for the experts of a chunk.

    Args:
        arch: of the GPU, or "" to do only what every GPU can.

    Attributes:
        halves: whether products are in half precision.
        rows: [T, H] bfloat16, what they read. `routed`: [T, H] float32, what the router reads.
        places, weights: [T * k], where the results of each row stand, and their weights.
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
        self.halves, self.grouped = _without_bf16(arch), arch in GROUPED_ARCHS
        for name, buffer in allocate(self.buffers(spec, n_embd, chunk, arch), device).items():
            setattr(self, name, buffer)

    @staticmethod
    def buffers(spec: LayerSpec, n_embd: int, chunk: int, arch: str) -> Shapes:
        """What it keeps. `ids`, `places` and `visits` are of each visit of a row to an expert."""
        visits, brief = chunk * spec.n_expert_used, torch.bfloat16
        given = _given(chunk, arch) * spec.n_expert_used
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
            "sorted": ((given, n_embd), brief),
            "hidden": ((given, spec.n_ff_expert), brief),
        }

    @staticmethod
    def passing(spec: LayerSpec, n_embd: int, chunk: int, arch: str) -> int:
        """Bytes of the results of products, those of gates and ups together with those of `down`;
        without bf16 also of their rows in half precision."""
        gate_up = 2 * spec.n_ff_expert * (2 if spec.split_experts else 1)
        widths = max(gate_up, 2 * spec.n_ff_expert + n_embd)
        widths += n_embd if _without_bf16(arch) else 0
        return 2 * _given(chunk, arch) * spec.n_expert_used * widths

    def __call__(
        self,
        w: Stacks,
        router: torch.Tensor,
        gains: torch.Tensor,
        products: Products,
        count: int,
    ) -> torch.Tensor:
        """What `count` rows get from each of their experts, [count * k, H] bfloat16 in the order
        of `places`.

        Args:
            router: float32 [E, H], for rows normed with the router's weight. `gains`: [E].
        """
        spec, visits = self.spec, count * self.k
        products.plain(self.routed[:count], router, self.scores[:count])
        file = "prefill_experts.cu"
        launch.kernel(file, f"route<{spec.n_expert}, {self.k}>")(
            -(-count // 4),
            128,
            scores=self.scores,
            gains=gains,
            ids=self.ids,
            weights=self.weights,
            tokens=count,
            pdl=False,
        )
        launch.kernel(file, "order")(
            spec.n_expert,
            1024,
            ids=self.ids,
            places=self.places,
            visits=self.visits,
            ends=self.ends,
            n=visits,
            pdl=False,
        )
        launch.kernel(file, f"gather<{self.n_embd}>")(
            visits,
            128,
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
            (visits, -(-spec.n_ff_expert // 2048)),
            256,
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
        """Rows in the order of their experts, the first `visits` of x, times their expert's
        matrix; what the result holds behind them is undefined."""
        stack = products.matrix([weight], torch.float16 if self.halves else torch.bfloat16)
        stack = stack.view(weight.matrices, weight.rows, weight.columns)
        if self.grouped:
            return torch._grouped_mm(x, stack.transpose(1, 2), offs=self.ends)
        return self._one_by_one(x[:visits], stack)

    def _one_by_one(self, x: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        """The same expert by expert, RUN rows at a time; the host waits for their sizes."""
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
    """Whether a GPU has no fast product in bf16: those before sm_80."""
    return arch not in TENSOR_ARCHS


def _given(chunk: int, arch: str) -> int:
    """Rows whose visits a product is given."""
    return max(chunk, FULL) if arch in GROUPED_ARCHS else chunk
