"""GEMM kernels of GPUs before sm_90, which copy weights and activations with cp.async."""

from __future__ import annotations

import pytest
import torch

from g4spec.runtime.cuda.step import linear, linear_wide
from g4spec.runtime.cuda.step import packed_rows as rows
from tests.emulator import kernels
from tests.gpu.parity import HALF, matrix
from tests.support.selection import sample


@pytest.mark.parametrize("type", sample(["q4_k", "q8_0", "q2_k"], 1))
def test_few_rows_and_many(type: str) -> None:
    """cp.async.mbarrier.arrive waits for all earlier copies of its thread, including those of other
    stages: weights of all stages are requested before any activations."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN
    g = torch.Generator().manual_seed(1)
    with kernels.installed("sm_86"):
        weight, values = matrix(g, type, 128, 1024)
        by, x = linear.SplitKWorkspace(torch.device("cpu")), torch.randn(20, 1024, generator=g)
        one = linear.linear(rows.pack_rows(x[:1]), weight.weight, by)
        many = linear_wide.linear(rows.pack_rows(x), weight.weight, by)
    torch.use_deterministic_algorithms(deterministic)
    want = x @ values.t()
    assert float((many - want).abs().max() / want.abs().max()) < HALF
    assert torch.equal(many[:1], one)
