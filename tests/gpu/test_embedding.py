"""Rows of a table on the GPU are the values that the format's decoder gives, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.runtime.cuda.weights import packing
from g4spec.runtime.cuda.weights.embedding import embed
from tests.gpu.device import DEVICE

pytestmark = pytest.mark.gpu

PLAIN = ("f16", "bf16", "f32")
WIDTHS = (64, 192, 256, 5376)
CASES = [(name, width) for name in (*packing.PARTS, *PLAIN) for width in WIDTHS
         if width % quant.get(name).block == 0]  # fmt: skip


def table(name: str, rows: int, width: int) -> np.ndarray:
    """Random values, quantized."""
    values = np.random.default_rng(width).standard_normal((rows, width)).astype(np.float32)
    return quant.get(name).quantize(values)


@pytest.mark.parametrize(("name", "width"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_embed(name: str, width: int, packed: bool) -> None:
    if packed and name in PLAIN:
        pytest.skip("is not packed")
    raw, scale = table(name, 300, width), float(np.sqrt(width))
    ids = [0, 7, 8, 127, 128, 255, 256, 299, 31, 64, 64]
    want = quant.get(name).dequantize(raw)[ids] * np.float32(scale)
    there = torch.from_numpy(raw).to(DEVICE)
    if packed:
        there = packing.pack(name, there, packing.unit_of(name, width))
    got = embed(there, name, torch.tensor(ids, device=DEVICE), width, scale)
    assert torch.equal(got.cpu(), torch.from_numpy(want))


def test_many_rows() -> None:
    raw = torch.from_numpy(table("q4_k", 256, 512)).to(DEVICE)
    ids = torch.arange(2048, device=DEVICE) % 256
    got = embed(packing.pack("q4_k", raw, 256), "q4_k", ids, 512, 1.0)
    assert torch.equal(got, embed(raw, "q4_k", ids, 512, 1.0))
    assert torch.equal(got[:256], got[256:512])
