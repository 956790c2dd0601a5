"""Experts of many rows: rows are put in the order of their experts, whose matrices are
dequantized all together, and multiplied group by group. In bf16, see `dequant`; where a GPU has no
fast product in bf16, in half precision, expert by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.prefill.buffers import Shapes, allocate
from g4spec.runtime.cuda.weights.dequant import Products, Weight

SHRUNK = 2.0**-6
"""What rows are multiplied with to fit half precision, where bfloat16 is not used."""

_INT = np.int32


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A layer's experts.

    Attributes:
        router: float32 [E, H], for rows normed with `router_norm` [H]. `gains`: [E].
        gate_up: E matrices [2 I, H]: gates and ups in turns of 16 rows, or all gates first (not
            `interleaved`); or E of gates and E of ups [I, H]. down: E matrices [H, I].
        norm: [H], of what experts read. `post_dense`, `post`: [H], of what the dense feed-forward
            and the experts give.
    """

    router: torch.Tensor
    router_norm: torch.Tensor
    gains: torch.Tensor
    gate_up: Sequence[Weight]
    down: Weight
    norm: torch.Tensor
    post_dense: torch.Tensor
    post: torch.Tensor
    interleaved: bool = True


class Experts:
    """Buffers for the experts of a chunk.

    Args:
        halves: multiply in half precision, one expert after another; the host waits for their
            sizes before each product.

    Attributes:
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
        self,
        spec: LayerSpec,
        n_embd: int,
        chunk: int,
        device: torch.device,
        halves: bool = False,
    ) -> None:
        self.spec, self.n_embd, self.k, self.halves = spec, n_embd, spec.n_expert_used, halves
        for name, buffer in allocate(self.buffers(spec, n_embd, chunk), device).items():
            setattr(self, name, buffer)

    @staticmethod
    def buffers(spec: LayerSpec, n_embd: int, chunk: int) -> Shapes:
        """What it keeps. `ids`, `places` and `visits` are of each visit of a row to an expert."""
        visits, brief = chunk * spec.n_expert_used, torch.bfloat16
        whole, floats = torch.int32, torch.float32
        return {
            "rows": ((chunk, n_embd), brief), "routed": ((chunk, n_embd), floats),
            "scores": ((chunk, spec.n_expert), floats), "weights": ((visits,), floats),
            "ids": ((visits,), whole), "places": ((visits,), whole), "visits": ((visits,), whole),
            "ends": ((spec.n_expert,), whole), "sorted": ((visits, n_embd), brief),
            "hidden": ((visits, spec.n_ff_expert), brief),
        }  # fmt: skip

    @staticmethod
    def passing(spec: LayerSpec, n_embd: int, chunk: int, halves: bool = False) -> int:
        """Bytes of the results of grouped products, which torch makes; with `halves` also of their
        rows in half precision and of one expert's results in float32, which may be all."""
        gate_up = 2 * spec.n_ff_expert * (2 if spec.split_experts else 1)
        widths = max(gate_up, 2 * spec.n_ff_expert + n_embd)
        if halves:
            widths += n_embd + 2 * max(2 * spec.n_ff_expert, n_embd)
        return 2 * chunk * spec.n_expert_used * widths

    def __call__(self, w: ExpertWeights, products: Products, count: int) -> torch.Tensor:
        """What `count` rows get from each of their experts, [count * k, H] bfloat16 in the order
        of `places`."""
        spec, visits = self.spec, count * self.k
        torch.mm(self.routed[:count], w.router.t(), out=self.scores[:count])
        file = "prefill_experts.cu"
        launch.kernel(file, f"route<{spec.n_expert}, {self.k}>")(
            -(-count // 4), 128, self.scores, w.gains, self.ids, self.weights, _INT(count),
            pdl=False,
        )  # fmt: skip
        launch.kernel(file, "order")(
            spec.n_expert, 1024, self.ids, self.places, self.visits, self.ends, _INT(visits),
            pdl=False,
        )  # fmt: skip
        x, h = self.sorted[:visits], self.hidden[:visits]
        launch.kernel(file, f"gather<{self.n_embd}>")(
            visits, 128, self.rows, self.visits, x, _INT(self.k), pdl=False
        )
        parts = [self._grouped(x, part, products) for part in w.gate_up]
        both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        halves = "false" if w.interleaved and len(parts) == 1 else "true"
        launch.kernel("prefill.cu", f"gated<Bfloat, {halves}>")(
            (visits, -(-spec.n_ff_expert // 2048)), 256, both, h, _INT(spec.n_ff_expert),
            np.float32(1), np.float32(1), pdl=False,
        )  # fmt: skip
        return self._grouped(h, w.down, products)

    def _grouped(self, x: torch.Tensor, weight: Weight, products: Products) -> torch.Tensor:
        """Rows in the order of their experts times their expert's matrix."""
        if self.halves:
            return self._in_turn(x, weight, products)
        stack = products.matrix([weight], torch.bfloat16)
        stack = stack.view(weight.matrices, weight.rows, weight.columns)
        return torch._grouped_mm(x, stack.transpose(1, 2), offs=self.ends)

    def _in_turn(self, x: torch.Tensor, weight: Weight, products: Products) -> torch.Tensor:
        """The same in half precision, expert by expert."""
        stack = products.matrix([weight]).view(weight.matrices, weight.rows, weight.columns)
        out = x.new_empty(len(x), weight.rows)
        rows, begin = (x * SHRUNK).to(torch.float16), 0
        for matrix, end in zip(stack, self.ends.tolist(), strict=True):
            if end > begin:
                y = torch.mm(rows[begin:end], matrix.t(), out_dtype=torch.float32)
                out[begin:end] = y / SHRUNK
            begin = end
        return out
