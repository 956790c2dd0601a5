"""Embedding rows on the GPU equal those of the format's decoder to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.weights import held, packing
from g4spec.runtime.cuda.weights.embedding import embed
from tests.gpu.device import DEVICE
from tests.gpu.parity import quantized

pytestmark = pytest.mark.gpu

PLAIN = ("f16", "bf16", "f32")
WIDTHS = (64, 192, 256, 5376)
CASES = [
    (name, width)
    for name in (*packing.PARTS, *PLAIN)
    for width in WIDTHS
    if width % quant.get(name).block == 0
]


def table(name: str, rows: int, width: int) -> np.ndarray:
    """Return quantized random values."""
    values = np.random.default_rng(width).standard_normal((rows, width)).astype(np.float32)
    return quantized(name, values)


@pytest.mark.parametrize(("name", "width"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_embed(name: str, width: int, packed: bool) -> None:
    if packed and name in PLAIN:
        pytest.skip("is not packed")
    raw, scale = table(name, 300, width), float(np.sqrt(width))
    ids = [0, 7, 8, 127, 128, 255, 256, 299, 31, 64, 64]
    factors = torch.tensor([0.375]) if name == "nvfp4" else None  # products with it are exact
    values = quant.get(name).dequantize(raw)[ids] * np.float32(1 if factors is None else 0.375)
    want = values * np.float32(scale)
    there = held.held(name, torch.from_numpy(raw), factors).to(DEVICE)
    if packed:
        there = packing.pack(name, there, packing.unit_of(name, width))
    got = embed(there, name, torch.tensor(ids, device=DEVICE), width, scale)
    assert torch.equal(got.cpu(), torch.from_numpy(want))


def test_every_scale_of_mxfp4_and_nvfp4() -> None:
    """Includes powers below the smallest normal float, and the NaN byte."""
    for name, first in (("mxfp4", 1), ("nvfp4", 4)):
        form = quant.get(name)
        raw = np.random.default_rng(5).integers(0, 256, (256, form.block_bytes), np.uint8)
        raw[:, :first] = np.arange(256, dtype=np.uint8)[:, None]
        wide = np.tile(raw, 256 // form.block)
        with np.errstate(over="ignore"):
            want = torch.from_numpy(form.dequantize(wide))
        there = held.held(name, torch.from_numpy(wide)).to(DEVICE)
        ids = torch.arange(256, device=DEVICE)
        for table in (there, packing.pack(name, there, 256)):
            assert torch.equal(embed(table, name, ids, 256, 1.0).cpu(), want)


def test_many_rows() -> None:
    raw = torch.from_numpy(table("q4_k", 256, 512)).to(DEVICE)
    ids = torch.arange(2048, device=DEVICE) % 256
    got = embed(packing.pack("q4_k", raw, 256), "q4_k", ids, 512, 1.0)
    assert torch.equal(got, embed(raw, "q4_k", ids, 512, 1.0))
    assert torch.equal(got[:256], got[256:512])


def test_more_rows_than_a_grid_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second dimension of a CUDA grid is at most 65,535. A prompt's chunk may be longer."""

    def kernel(grid: tuple[int, int], block: int, **arguments: Any) -> None:
        assert grid[1] == len(arguments["ids"]) <= 65_535
        arguments["out"].copy_(arguments["ids"][:, None])

    monkeypatch.setattr(launch, "kernel", lambda file, name: kernel)
    raw, ids = torch.from_numpy(table("q8_0", 2, 64)).to(DEVICE), torch.arange(140_000)
    got = embed(raw, "q8_0", ids.to(DEVICE), 64, 1.0).cpu()
    assert torch.equal(got, ids[:, None].expand(-1, 64).float())
