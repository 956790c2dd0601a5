"""wgmma GEMM: each row has the same bits as with the kernels for at most 16 rows."""

from __future__ import annotations

import pytest
import torch

from g4spec.runtime.cuda.step import linear, linear_wide
from g4spec.runtime.cuda.step import packed_rows as rows
from tests.emulator import kernels
from tests.gpu.device import EMULATED
from tests.gpu.parity import matrix

pytestmark = pytest.mark.skipif(not EMULATED, reason="tests/gpu/test_linear_wide.py runs them")


@pytest.mark.parametrize(
    ("type", "size", "count", "checked"),
    [
        ("q4_k", (200, 768), 37, True),
        ("q5_k", (256, 512), 50, False),
        ("q6_k", (128, 512), 20, False),
        ("q4_k", (256, 256), 100, False),
        ("q6_k", (128, 256), 128, False),
        ("q3_k", (256, 256), 40, False),
        ("iq2_s", (128, 256), 70, False),
        ("q8_0", (128, 320), 50, False),
        ("q5_1", (128, 256), 33, False),
    ],
)
def test_bits_of_16_rows(
    type: str,
    size: tuple[int, int],
    count: int,
    checked: bool,
) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    g = torch.Generator().manual_seed(1)
    x = torch.randn(count, size[1], generator=g)
    with kernels.installed("sm_90a", checked=checked):
        weight, workspace = (
            matrix(g, type, *size)[0].weight,
            linear.SplitKWorkspace(torch.device("cpu")),
        )
        got = linear_wide.linear(rows.pack_rows(x), weight, workspace)
        parts = (rows.pack_rows(x[at : at + 16].contiguous()) for at in range(0, count, 16))
        want = torch.cat([linear.linear(part, weight, workspace) for part in parts])
    torch.use_deterministic_algorithms(deterministic)
    assert torch.equal(got, want) and not workspace.arrived.any()
