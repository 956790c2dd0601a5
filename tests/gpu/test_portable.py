"""Products straight from file bytes: against float64, and whatever rows are computed beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.runtime.cuda import portable
from tests.gpu.device import DEVICE
from tests.quant_blocks import random_blocks

pytestmark = pytest.mark.gpu

SHAPES = [(128, 64), (7, 704), (641, 256), (2816, 2112), (300, 5376)]
CASES = [(f, n, k) for f in portable.FORMATS for n, k in SHAPES if k % quant.get(f).block == 0]


@pytest.mark.parametrize(("name", "n", "k"), CASES)
def test_products_of_one_to_sixteen_rows(name: str, n: int, k: int) -> None:
    raw = random_blocks(name, n, k)
    weight = portable.Matrix(name, torch.from_numpy(raw).to(DEVICE))
    values = torch.from_numpy(quant.get(name).dequantize(raw)).double()
    torch.manual_seed(k)
    x = torch.randn(16, k) * torch.exp(torch.randn(16, 1))
    full = portable.linear(x.to(DEVICE), weight)
    expected = x.double() @ values.T
    # Sums of k products in float32, in 32 lanes: far from the worst case, with room to spare.
    allowed = 2.0**-20 * (x.double().abs() @ values.abs().T) + 1e-30
    assert ((full.cpu().double() - expected).abs() <= allowed).all()
    for count in range(1, 16):
        assert torch.equal(portable.linear(x[:count].to(DEVICE), weight), full[:count]), count
    for shift in (1, 6, 11):
        rolled = portable.linear(torch.roll(x, shift, dims=0).to(DEVICE), weight)
        assert torch.equal(rolled, torch.roll(full, shift, dims=0)), shift


@pytest.mark.parametrize("name", portable.FORMATS)
def test_tensors_of_another_shape_are_refused(name: str) -> None:
    with pytest.raises(AssertionError):
        portable.Matrix(name, torch.zeros(4, 7, dtype=torch.uint8, device=DEVICE))
    rows = quant.get(name).row_bytes(256)
    weight = portable.Matrix(name, torch.zeros(4, rows, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(AssertionError):
        portable.linear(torch.zeros(1, 512, device=DEVICE), weight)
    assert np.prod(portable.linear(torch.ones(1, 256, device=DEVICE), weight).shape) == 4
