"""Matmuls of more than 16 rows: each row is bit-identical to a matmul of that row."""

from __future__ import annotations

import pytest
import torch

from g4spec.runtime.cuda.step import linear as narrow
from g4spec.runtime.cuda.step import linear_wide
from g4spec.runtime.cuda.step import packed_rows as rows
from g4spec.runtime.cuda.weights import packing
from tests.gpu.device import DEVICE, EMULATED
from tests.gpu.parity import HALF, matrix, stored

pytestmark = pytest.mark.gpu

FORMS = (False, True)
"""Values of linear_wide.WGMMA."""

COUNTS = (17, 37, 50) if EMULATED else (17, 32, 33, 48, 50, 64, 65, 96, 100, 127, 128, 129, 200)
MOST = max(COUNTS)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Force one of the kernel variants for more than 16 rows."""
    monkeypatch.setattr(linear_wide, "WGMMA", request.param)


def single_rows(x: torch.Tensor) -> list[tuple[slice, rows.PackedRows]]:
    """Compute row 0 of x by itself, and further rows in groups of 16."""
    begin = [(0, 1), (1, 16), *((at, min(at + 16, len(x))) for at in range(16, len(x), 16))]
    return [(slice(*at), rows.pack_rows(x[slice(*at)].contiguous())) for at in begin]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("size", [(128, 64), (200, 512), (384, 1280)])
@pytest.mark.parametrize("type", packing.PARTS)
def test_a_row_has_the_bits_of_a_single_row(type: str, size: tuple[int, int]) -> None:
    n, k = size
    if packing.units_of(type) == (256,):
        k = max(k, 256)
    g = torch.Generator().manual_seed(n)
    weight, values = matrix(g, type, n, k)
    by = narrow.SplitKWorkspace(torch.device(DEVICE))
    x = torch.randn(MOST, k, generator=g).to(DEVICE)
    for parts in (False, True):
        want = [(at, narrow.linear(r, weight.weight, by, parts=parts)) for at, r in single_rows(x)]
        for count in COUNTS:
            got = linear_wide.linear(rows.pack_rows(x[:count]), weight.weight, by, parts=parts)
            for at, each in want:
                have = got[..., at, :]
                assert torch.equal(have, each[..., : have.shape[-2], :]), (count, at, parts)
            whole = got if got.dim() == 2 else got.sum(0)
            exact = x[:count].cpu() @ values.t()
            assert float((whole.cpu() - exact).abs().max() / exact.abs().max()) < HALF
    assert not by.arrived.any()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("types", [("q4_k", "q6_k"), ("q5_0", "q8_0")])
def test_two_matmuls_in_one_launch(types: tuple[str, str]) -> None:
    g = torch.Generator().manual_seed(3)
    first, second = (
        matrix(g, type, n, 512)[0].weight for type, n in zip(types, (512, 1000), strict=True)
    )
    by = narrow.SplitKWorkspace(torch.device(DEVICE))
    x = torch.randn(MOST, 512, generator=g).to(DEVICE)
    want = torch.cat([narrow.linear_two(r, first, second, by) for _, r in single_rows(x)])
    for count in COUNTS:
        got = linear_wide.linear_two(rows.pack_rows(x[:count]), first, second, by)
        assert torch.equal(got, want[:count]), count
    assert not by.arrived.any()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("type", ["q4_k", "q8_0", "q6_k"])
def test_gate_and_up(type: str) -> None:
    """The output is the input of the next matmul: half-precision rows, their sums, and zeros after
    the last row."""
    g = torch.Generator().manual_seed(4)
    weight = matrix(g, type, 1280, 256)[0].weight
    by = narrow.SplitKWorkspace(torch.device(DEVICE))
    x = torch.randn(MOST, 256, generator=g).to(DEVICE)
    want = torch.cat([stored(narrow.gate_up(r, weight, by)) for _, r in single_rows(x)])
    for count in COUNTS:
        got = linear_wide.gate_up(rows.pack_rows(x[:count]), weight, by)
        assert torch.equal(stored(got), want[:count]), count
        assert got.scale is not None and len(got.scale) == 16 * got.groups
    assert not by.arrived.any()


@pytest.mark.parametrize("count", COUNTS)
def test_packed_rows(count: int) -> None:
    """Rows in several groups equal each group by itself, with scales and norms."""
    g = torch.Generator().manual_seed(5)
    x, h = (torch.randn(count, 512, generator=g).to(DEVICE) for _ in "xh")
    weight = torch.rand(512, generator=g).to(DEVICE)
    step = rows.Residual(weight, 1e-6)
    packed, normed = rows.pack_rows(x), step.rows(h, x, [weight])
    assert packed.scale is not None
    values = stored(packed), stored(normed[1][0])
    for at in range(0, count, 16):
        part = slice(at, at + 16)
        one, (out, (other,)) = rows.pack_rows(x[part]), step.rows(h[part], x[part], [weight])
        assert one.scale is not None
        assert torch.equal(values[0][part], stored(one))
        assert torch.equal(packed.scale[part][: len(one)], one.scale[: len(one)])
        assert torch.equal(values[1][part], stored(other))
        assert torch.equal(normed[0][part], out)
