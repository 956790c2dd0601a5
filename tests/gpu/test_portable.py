"""Portable matmuls on the file's bytes, compared with float64 and independent of the other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.runtime.cuda.portable import portable
from g4spec.runtime.cuda.weights import dequant, held
from g4spec.runtime.cuda.weights.dequant import Weight
from tests.gpu.device import DEVICE
from tests.support.quant_blocks import random_blocks

pytestmark = pytest.mark.gpu

SHAPES = [(128, 64), (7, 704), (261, 256), (70, 2112), (20, 5376)]
CASES = [(f, n, k) for f in portable.FORMATS for n, k in SHAPES if k % quant.get(f).block == 0]


def weight(name: str, n: int, k: int, matrices: int = 1) -> tuple[Weight, torch.Tensor]:
    """Return random matrices on the GPU, and their values [matrices * n, k] in float64."""
    raw = random_blocks(name, matrices * n, k)
    data = held.held(name, torch.from_numpy(raw)).to(DEVICE)
    plain = {name: dtype for dtype, name in portable.PLAIN.items()}.get(name)
    values = torch.from_numpy(quant.get(name).dequantize(raw)).double()
    if plain is None:
        return Weight(name, data, n, k, matrices), values
    return Weight("", data.view(plain), n, k, matrices), values


def close(got: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> None:
    """Compare sums of k products in float32, in 32 lanes; the tolerance is far below the worst
    case."""
    allowed = 2.0**-20 * (x.double().abs() @ values.abs().T) + 1e-30
    assert ((got.cpu().double() - x.double() @ values.T).abs() <= allowed).all()


@pytest.mark.parametrize(("name", "n", "k"), CASES)
def test_products_of_one_to_sixteen_rows(name: str, n: int, k: int) -> None:
    matrix, values = weight(name, n, k)
    assert portable.format_of(matrix) == name and portable.takes(matrix)
    torch.manual_seed(k)
    x = torch.randn(16, k) * torch.exp(torch.randn(16, 1))
    full = portable.linear(x.to(DEVICE), matrix)
    close(full, x, values)
    for count in range(1, 16):
        assert torch.equal(portable.linear(x[:count].to(DEVICE), matrix), full[:count]), count
    for shift in (1, 6, 11):
        rolled = portable.linear(torch.roll(x, shift, dims=0).to(DEVICE), matrix)
        assert torch.equal(rolled, torch.roll(full, shift, dims=0)), shift


@pytest.mark.parametrize("name", portable.FORMATS)
def test_a_matrix_per_row(name: str) -> None:
    """Bit-identical to a matmul with only that matrix."""
    n, k, used = 37, 512, 3
    stack, _ = weight(name, n, k, 5)
    torch.manual_seed(0)
    x, ids = torch.randn(4, k, device=DEVICE), torch.randint(0, 5, (4, used)).to(DEVICE)
    got = portable.visits(x, ids.flatten(), stack).view(4, used, n)
    for row, chosen in enumerate(ids.tolist()):
        for place, e in enumerate(chosen):
            one = Weight(stack.type, stack.data[e * n : (e + 1) * n].clone(), n, k)
            want = portable.linear(x[row : row + 1], one)[0]
            assert torch.equal(got[row, place], want), (row, place)
    visited = x.repeat_interleave(used, dim=0)
    assert torch.equal(portable.visits(visited, ids.flatten(), stack), got.view(-1, n))


@pytest.mark.parametrize("name", dequant.FILE_TYPES)
@pytest.mark.parametrize(("n", "k"), [(3, 256), (70, 1792)])
def test_values_as_halves(name: str, n: int, k: int) -> None:
    matrix, values = weight(name, n, k, 2)
    out = torch.full((2 * n + 1, k), torch.nan, dtype=torch.float16, device=DEVICE)
    dequant.dequantize(matrix, out[:-1])
    assert (out[:-1].cpu().double() - values).abs().max() <= 2.0**-11 * values.abs().max()
    assert out[-1].isnan().all()


@pytest.mark.parametrize("name", portable.FORMATS)
def test_tensors_of_another_shape_are_refused(name: str) -> None:
    matrix, _ = weight(name, 4, 256)
    with pytest.raises(AssertionError):
        portable.linear(torch.zeros(1, 512, device=DEVICE), matrix)
    assert np.prod(portable.linear(torch.ones(1, 256, device=DEVICE), matrix).shape) == 4
    packed = Weight("q4_k", torch.zeros(1, 1, 64, dtype=torch.uint8, device=DEVICE), 4, 256)
    assert not portable.takes(packed)
    plain = torch.zeros(4, 260, device=DEVICE)
    assert not portable.takes(Weight("", plain, 4, 260))  # not a multiple of 8
    assert not portable.takes(Weight("", plain.view(-1)[1:1025], 4, 256))  # not on 16 bytes
