"""Matmuls of packed matrices: results, and how the work is split."""

from __future__ import annotations

import pytest
import torch

from g4spec.runtime.cuda.step import linear, packed_layout
from g4spec.runtime.cuda.step import packed_rows as rows
from tests.gpu.device import DEVICE
from tests.gpu.parity import HALF, matrix

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sizes", [(256, 128), (512, 1024), (1280, 200)])
@pytest.mark.parametrize("types", [("q4_k", "q6_k"), ("q6_k", "q4_k"), ("q5_0", "q8_0")])
def test_two_matmuls_in_one_launch(types: tuple[str, str], sizes: tuple[int, int]) -> None:
    """Results are right, and no row depends on the other rows."""
    g = torch.Generator().manual_seed(sum(sizes))
    both = [matrix(g, type, n, 512) for type, n in zip(types, sizes, strict=True)]
    by = linear.SplitKWorkspace(torch.device(DEVICE))
    x = torch.randn(16, 512, generator=g).to(DEVICE)
    want = torch.cat([x.cpu() @ values.t() for _, values in both], dim=1)
    first, second = (m.weight for m, _ in both)
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
    act = (
        torch.nn.functional.silu
        if silu
        else lambda y: torch.nn.functional.gelu(y, approximate="tanh")
    )
    want = act(gates) * ups
    by = linear.SplitKWorkspace(torch.device(DEVICE))
    got = linear.gate_up(rows.pack_rows(x.to(DEVICE)), weight.weight, by, silu=silu)
    assert got.scale is not None
    found = packed_layout.unpack(got)[0][:9].float().cpu() * float(got.scale[0])
    assert float((found - want).abs().max() / want.abs().max()) < 2 * HALF


def test_work_is_split_evenly() -> None:
    """Every unit is computed, and no CTA reads many more bytes than its share."""
    others, run, run_b = linear.share_ctas(21, 48, 36864, 21, 32, 26880, 132)
    assert others * run >= 21 * 48 and (132 - others) * run_b >= 21 * 32
    share = (21 * 48 * 36864 + 21 * 32 * 26880) / 132
    assert max(run * 36864, run_b * 26880) < 1.15 * share


@pytest.mark.parametrize("type", ["q4_k", "q6_k", "q8_0"])
def test_split_k_sums(type: str) -> None:
    """Partial sums added by the reader equal the whole matmul; no row depends on the other rows."""
    g = torch.Generator().manual_seed(5)
    weight, values = matrix(g, type, 128, 2304)
    by = linear.SplitKWorkspace(torch.device(DEVICE))
    x = torch.randn(16, 2304, generator=g).to(DEVICE)
    parts = linear.linear(rows.pack_rows(x), weight.weight, by, parts=True)
    assert parts.dim() == 3 and 2 <= len(parts) <= linear.MAX_SLICES
    want = x.cpu() @ values.t()
    assert float((parts.sum(0).cpu() - want).abs().max() / want.abs().max()) < HALF
    for count in (1, 7, 8, 9):
        few = linear.linear(rows.pack_rows(x[:count].contiguous()), weight.weight, by, parts=True)
        assert torch.equal(few, parts[:, :count]), count
    assert not by.arrived.any()


def test_split_k_of_published_sizes() -> None:
    """The matrices of Gemma 4 31B on 132 multiprocessors: o, queries to values, down, gate and up,
    lm_head. K is split only if no CTA gets much more work than others."""
    shapes = [(32, 21), (21, 64), (84, 21), (84, 42), (21, 168), (21, 1024), (21, 72)]
    assert [linear.split_k_slices(*s, 132, 8) for s in shapes] == [6, 2, 6, 3, 0, 0, 0]
    for units, groups in shapes:
        n = linear.split_k_slices(units, groups, 132, 8)
        assert n * groups <= 132
