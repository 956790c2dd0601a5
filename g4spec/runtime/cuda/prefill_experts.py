"""Experts of many rows: rows are put in the order of their experts, whose matrices are
dequantized all together, and multiplied group by group. In bf16, see `dequant`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda import launch
from g4spec.runtime.cuda.dequant import Products, Weight

_INT = np.int32


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A layer's experts.

    Attributes:
        router: float32 [E, H], for rows normed with `router_norm` [H]. `gains`: [E].
        gate_up: E matrices [2 I, H]: gates and ups in turns of 16 rows, or all gates first (not
            `interleaved`). down: E matrices [H, I].
        norm: [H], of what experts read. `post_dense`, `post`: [H], of what the dense feed-forward
            and the experts give.
    """

    router: torch.Tensor
    router_norm: torch.Tensor
    gains: torch.Tensor
    gate_up: Weight
    down: Weight
    norm: torch.Tensor
    post_dense: torch.Tensor
    post: torch.Tensor
    interleaved: bool = True


class Experts:
    """Buffers for the experts of a chunk.

    Attributes:
        rows: [T, H] bfloat16, what they read. `routed`: [T, H] float32, what the router reads.
        places, weights: [T, k], where the results of each row stand, and their weights.
    """

    def __init__(self, spec: LayerSpec, n_embd: int, chunk: int, device: torch.device) -> None:
        self.spec, self.n_embd = spec, n_embd
        self.k, visits = spec.n_expert_used, chunk * spec.n_expert_used
        brief: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.rows = torch.empty(chunk, n_embd, **brief)
        self.routed = torch.empty(chunk, n_embd, **floats)
        self.weights = torch.empty(chunk, self.k, **floats)
        self.places = torch.empty(visits, **whole)
        self._scores = torch.empty(chunk, spec.n_expert, **floats)
        self._ids, self._visits = (torch.empty(visits, **whole) for _ in range(2))
        self._ends = torch.empty(spec.n_expert, **whole)
        self._sorted = torch.empty(visits, n_embd, **brief)
        self._hidden = torch.empty(visits, spec.n_ff_expert, **brief)

    def __call__(self, w: ExpertWeights, products: Products, count: int) -> torch.Tensor:
        """What `count` rows get from each of their experts, [count * k, H] bfloat16 in the order
        of `places`."""
        spec, visits = self.spec, count * self.k
        torch.mm(self.routed[:count], w.router.t(), out=self._scores[:count])
        file = "prefill_experts.cu"
        launch.kernel(file, f"route<{spec.n_expert}, {self.k}>")(
            -(-count // 4), 128, self._scores, w.gains, self._ids, self.weights, _INT(count),
            pdl=False,
        )  # fmt: skip
        launch.kernel(file, "order")(
            spec.n_expert, 1024, self._ids, self.places, self._visits, self._ends, _INT(visits),
            pdl=False,
        )  # fmt: skip
        x, h = self._sorted[:visits], self._hidden[:visits]
        launch.kernel(file, f"gather<{self.n_embd}>")(
            visits, 128, self.rows, self._visits, x, _INT(self.k), pdl=False
        )
        both = self._grouped(x, w.gate_up, products)
        launch.kernel("prefill.cu", f"gated<Bfloat, {'false' if w.interleaved else 'true'}>")(
            (visits, -(-spec.n_ff_expert // 2048)), 256, both, h, _INT(spec.n_ff_expert),
            np.float32(1), np.float32(1), pdl=False,
        )  # fmt: skip
        return self._grouped(h, w.down, products)

    def _grouped(self, x: torch.Tensor, weight: Weight, products: Products) -> torch.Tensor:
        """Rows in the order of their experts times their expert's matrix."""
        stack = products.matrix([weight], torch.bfloat16)
        stack = stack.view(weight.matrices, weight.rows, weight.columns)
        return torch._grouped_mm(x, stack.transpose(1, 2), offs=self._ends)
