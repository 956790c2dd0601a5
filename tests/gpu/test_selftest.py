"""`doctor --self-test` passes with this machine's kernels and fails with wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec.advisor import machine_probe, measured
from g4spec.advisor.facts import facts
from g4spec.advisor.selftest import run
from g4spec.runtime.cuda import kernel_selftest as selftest
from g4spec.runtime.cuda import model_selftest
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.weights import packing, samples
from tests.gpu.device import DEVICE, EMULATED, needs_gpu

pytestmark = pytest.mark.gpu

TITLES = [f"kernels of a {title}" for title in model_selftest.MODELS]


def test_the_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    types = [*packing.PARTS]
    if EMULATED:
        types = [*samples.COMPILED]
        monkeypatch.setattr(packing, "PARTS", {n: packing.PARTS[n] for n in types})
    found = list(selftest.checks(CudaOps(DEVICE)))
    assert len(found) == len(types) + 2 and all(ok for ok, _ in found), found


@needs_gpu
def test_doctor_checks_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It also finds the bandwidth again that it stored under the GPU's UUID."""
    monkeypatch.setattr(measured, "folder", lambda: tmp_path)
    found = run()
    here = machine_probe.probe(facts()).measured
    assert here is not None and here.read > 100
    assert f"read bandwidth measured here: {here.read:.0f} GB/s" in str(found)
    assert all(check.ok is not False for check in found), found
    for text in ("kernel: Q4_K matmul", "kernel: IQ2_XXS matmul", *TITLES):
        assert any(check.ok and check.text.startswith(text) for check in found), text
    assert sum(check.text.startswith("step time measured here: ") for check in found) == (
        2 * torch.cuda.device_count()
    )


@needs_gpu
def test_wrong_kernels_of_models_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = CudaOps.logits

    def depends_on_batch(self: CudaOps, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return logits(self, x, *rest) * (1 + len(x) * 2.0**-20)

    def wrong(self: CudaOps, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return logits(self, x, *rest) * 1.1

    for broken in (depends_on_batch, wrong):
        monkeypatch.setattr(CudaOps, "logits", broken)
        ok, text = next(model_selftest.checks(CudaBackend(DEVICE)))
        assert not ok, text


def test_wrong_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = CudaOps.linear

    def depends_on_batch(self: CudaOps, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return linear(self, x, weight) * (1 + len(x) * 2.0**-20)

    def wrong(self: CudaOps, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return linear(self, x, weight) * 1.01

    for broken in (depends_on_batch, wrong):
        monkeypatch.setattr(CudaOps, "linear", broken)
        ok, text = next(selftest.checks(CudaOps(DEVICE)))
        assert not ok, text
