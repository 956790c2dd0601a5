"""Products of packed matrices: what is multiplied in one launch."""

from __future__ import annotations

import pytest
import torch

from g4spec.runtime.cuda import linear, rows
from tests.gpu.device import DEVICE
from tests.gpu.parity import HALF, matrix

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sizes", [(256, 128), (512, 1024), (1280, 200)])
@pytest.mark.parametrize("types", [("q4_k", "q6_k"), ("q6_k", "q4_k"), ("q5_0", "q8_0")])
def test_two_side_by_side(types: tuple[str, str], sizes: tuple[int, int]) -> None:
    """Right, and no row depends on those beside it."""
    g = torch.Generator().manual_seed(sum(sizes))
    both = [matrix(g, type, n, 512) for type, n in zip(types, sizes, strict=True)]
    by = linear.Exchange(torch.device(DEVICE))
    x = torch.randn(16, 512, generator=g).to(DEVICE)
    want = torch.cat([x.cpu() @ values.t() for _, values in both], dim=1)
    first, second = (m.alone for m, _ in both)
    whole = linear.linear_two(rows.pack_rows(x), first, second, by)
    assert float((whole.cpu() - want).abs().max() / want.abs().max()) < HALF
    for count in (1, 7, 8, 9):
        part = linear.linear_two(rows.pack_rows(x[:count].contiguous()), first, second, by)
        assert torch.equal(part, whole[:count]), count
    assert not by.arrived.any()


@pytest.mark.parametrize("silu", [False, True])
def test_gates_activated_by_either(silu: bool) -> None:
    g = torch.Generator().manual_seed(1)
    weight, values = matrix(g, "q4_k", 1024, 256)
    x = 3 * torch.randn(9, 256, generator=g)
    both = (x @ values.t()).view(9, -1, 2, 16)
    gates, ups = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
    act = torch.nn.functional.silu if silu else lambda y: torch.nn.functional.gelu(
        y, approximate="tanh")  # fmt: skip
    want = act(gates) * ups
    by = linear.Exchange(torch.device(DEVICE))
    got = linear.gate_up(rows.pack_rows(x.to(DEVICE)), weight.alone, by, silu=silu)
    assert got.scale is not None
    found = rows.unpack(got)[0][:9].float().cpu() * float(got.scale[0])
    assert float((found - want).abs().max() / want.abs().max()) < 2 * HALF


def test_shares() -> None:
    """Every unit is done, and no CTA has much more than its share of the bytes."""
    others, run, run_b = linear.shares(21, 48, 36864, 21, 32, 26880, 132)
    assert others * run >= 21 * 48 and (132 - others) * run_b >= 21 * 32
    share = (21 * 48 * 36864 + 21 * 32 * 26880) / 132
    assert max(run * 36864, run_b * 26880) < 1.15 * share
