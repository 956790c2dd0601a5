"""`doctor --self-test` on this machine's kernels, and on ones that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from g4spec.runtime.cuda import kernel_selftest as selftest
from g4spec.runtime.cuda.ops import CudaOps
from tests.gpu.device import DEVICE

pytestmark = pytest.mark.gpu


def test_the_kernels_pass() -> None:
    found = list(selftest.checks(CudaOps(DEVICE)))
    assert len(found) == 10 and all(ok for ok, _ in found), found


def test_wrong_kernels_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = CudaOps.linear

    def company(self: CudaOps, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return linear(self, x, weight) * (1 + len(x) * 2.0**-20)

    def wrong(self: CudaOps, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return linear(self, x, weight) * 1.01

    for broken in (company, wrong):
        monkeypatch.setattr(CudaOps, "linear", broken)
        ok, text = next(selftest.checks(CudaOps(DEVICE)))
        assert not ok, text
