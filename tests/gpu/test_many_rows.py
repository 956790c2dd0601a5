"""Steps of more than 16 rows: in every operation, a row is bit-identical to a single row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.step.packed_rows import PackedRows
from tests.gpu.device import DEVICE
from tests.gpu.parity import matrix, numbers, randn

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 256, 37
Op = Callable[[CudaOps, dict[str, Any], torch.Tensor, torch.Tensor], Any]
"""An operation on weights, and rows x and h [T, WIDTH]."""

OPS: dict[str, Op] = {
    "linear": lambda ops, w, x, h: ops.linear(x, w["wide"]),
    "linear of rows": lambda ops, w, x, h: ops.linear(ops.norm_rows(x, w["norm"], 1e-6), w["wide"]),
    "f16": lambda ops, w, x, h: ops.linear(x, w["plain"]),
    "parts": lambda ops, w, x, h: ops.norm_residual_norm(
        ops.linear(x, w["tall"], partial_sums=True), h, w["norm"], 1e-6, w["norm"]
    ),
    "numbers": lambda ops, w, x, h: ops.norm_residual_norm(
        h, x, None, 1e-6, w["norm"], unpacked=True
    ),
    "residual alone": lambda ops, w, x, h: ops.norm_residual_norm(h, x, w["norm"], 1e-6, None)[0],
    "rms_norm": lambda ops, w, x, h: ops.rms_norm(x, w["norm"], 1e-6),
    "gated": lambda ops, w, x, h: ops.gated(
        ops.norm_rows(x, w["norm"], 1e-6), w["gate"], w["up"], w["down"], ops.gelu_tanh
    ),
    "modulated": lambda ops, w, x, h: ops.modulated(x, w["tall"], h, w["tall"], ops.gelu_tanh),
    "per-layer inputs": lambda ops, w, x, h: ops.per_layer_inputs(
        h, x, w["tall"], w["small"], 1e-6
    ),
    "logits": lambda ops, w, x, h: ops.logits(x, w["wide"], 30.0),
    "pick": lambda ops, w, x, h: ops.pick(x, w["wide"], lambda z, at: z.argmax(1), 0),
}


def weights(g: torch.Generator) -> dict[str, Any]:
    shapes = {
        "wide": ("q6_k", 640, WIDTH),
        "tall": ("q4_k", WIDTH, WIDTH),
        "plain": ("", 96, WIDTH),
        "gate": ("q4_k", 512, WIDTH),
        "up": ("q4_k", 512, WIDTH),
        "down": ("q5_0", WIDTH, 512),
    }
    out: dict[str, Any] = {name: matrix(g, *of)[0] for name, of in shapes.items()}
    out["norm"] = 1 + randn(g, WIDTH, scale=0.1).to(DEVICE)
    out["small"] = out["norm"][:64].clone()
    return out


def parts(found: Any) -> list[torch.Tensor]:
    found = found if isinstance(found, tuple) else (found,)
    return [numbers(x) for x in found]


@pytest.mark.parametrize("portable", [False, True])
def test_a_row_has_the_bits_of_a_single_row(portable: bool) -> None:
    g = torch.Generator().manual_seed(2)
    ops, w = CudaOps(str(DEVICE), portable), weights(g)
    x, h = (randn(g, ROWS, WIDTH).to(DEVICE) for _ in "xh")
    for name, op in OPS.items():
        op(ops, w, x[:1], h[:1])  # packs weights
        together = parts(op(ops, w, x, h))
        for row in (0, 15, 16, ROWS - 1):
            at = slice(row, row + 1)
            for many, alone in zip(together, parts(op(ops, w, x[at], h[at])), strict=True):
                assert torch.equal(many[at], alone), (name, row)
    rows = ops.norm_rows(x, w["norm"], 1e-6)
    assert len(rows) == ROWS and isinstance(rows, torch.Tensor if portable else PackedRows)
