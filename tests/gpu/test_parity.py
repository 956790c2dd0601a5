"""Every operation of the GPU backend compared with the reference (`tests.gpu.parity`)."""

from __future__ import annotations

import pytest
import torch

from g4spec.ops.reference import Ops
from tests.gpu.device import DEVICE
from tests.gpu.parity import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, seed: int) -> None:
    from g4spec.runtime.cuda.ops import CudaOps

    cuda, checked = CudaOps(DEVICE), 0
    junk = torch.full((1 << 24,), 0xFF, dtype=torch.uint8, device=DEVICE)
    del junk  # memory that a kernel does not write is NaN
    for got, want, tolerance in CASES[name](cuda, Ops(), torch.Generator().manual_seed(seed)):
        found = got.double().cpu()
        assert found.shape == want.shape, checked
        rows = want.double().abs().amax(-1).clamp(min=1e-30)
        error = float(((found - want.double()).abs().amax(-1) / rows).max())
        assert error <= tolerance, (checked, error)
        checked += 1
    assert checked
