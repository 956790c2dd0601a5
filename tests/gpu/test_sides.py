"""Matrices that lie where the memory's sides are: the same bits as in order, wherever the chunks are
and whichever multiprocessor reads them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.runtime.cuda import dequant, embedding, linear, packing, rows, sides
from g4spec.runtime.cuda.matrix import Matrix, beside, join
from tests.gpu.device import DEVICE, needs_gpu

pytestmark = pytest.mark.gpu
K = 1280


class Anywhere(sides.Sides):
    """Sides of a GPU that has none: pages begin at either."""

    def _pages(self, base: torch.Tensor) -> torch.Tensor:
        count = -(-(base.data_ptr() % sides.PAGE + len(base)) // sides.PAGE)
        bits = torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(count))
        return bits.to(base.device)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = tuple(np.uint64(word) for word in (0x9249_2492_4924_9249, 0x0F0F_3333_5555_1111, 5))
    monkeypatch.setattr(sides, "of", lambda device: Anywhere(masks, 0xAB000, 0, 0))
    monkeypatch.setattr(sides, "LEAST", 0)


def made(type: str, n: int, seed: int, placed: bool, k: int = K) -> Matrix:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5
    raw = torch.from_numpy(quant.get(type).quantize(values.numpy())).to(DEVICE)
    return Matrix(type, raw, n, k, placed=placed)


def compared(find: Callable[[bool, linear.Exchange], torch.Tensor]) -> None:
    by = linear.Exchange(torch.device(DEVICE))
    want, got = find(False, by), find(True, by)
    assert torch.equal(got, want)
    assert not by.arrived.any() and not by.drawn.any()


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("n", [128, 200, 1024, 2688])
@pytest.mark.parametrize("type", list(packing.PARTS))
def test_products(type: str, n: int, tokens: int) -> None:
    x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(n)).to(DEVICE)

    def find(placed: bool, by: linear.Exchange) -> torch.Tensor:
        weight = made(type, n, 1, placed).alone
        assert (weight.place is not None) == placed
        parts = linear.linear(rows.pack_rows(x), weight, by, parts=True)
        return torch.stack([linear.linear(rows.pack_rows(x), weight, by), parts.view(
            -1, tokens, n)[0]])  # fmt: skip

    compared(find)


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize("sizes", [(256, 128), (512, 1024), (1280, 200)])
@pytest.mark.parametrize("types", [("q4_k", "q6_k"), ("q5_0", "q8_0")])
def test_two_side_by_side(types: tuple[str, str], sizes: tuple[int, int]) -> None:
    x = torch.randn(16, K, generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def find(placed: bool, by: linear.Exchange) -> torch.Tensor:
        both = [made(t, n, i, placed).alone for i, (t, n) in enumerate(zip(types, sizes, strict=True))]
        return linear.linear_two(rows.pack_rows(x), *both, by)

    compared(find)


@pytest.mark.usefixtures("placed")
def test_gates_and_ups() -> None:
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def find(placed: bool, by: linear.Exchange) -> torch.Tensor:
        (pair,) = beside(*(made("q4_k", 512, i, placed) for i in range(2)))
        assert (pair.place is not None) == placed
        return linear.gate_up(rows.pack_rows(x), pair, by).data

    compared(find)


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize("type", list(packing.PARTS))
def test_numbers_and_rows_of_a_table(type: str) -> None:
    ids = torch.tensor([0, 7, 299, 128, 64], device=DEVICE)

    def find(placed: bool, by: linear.Exchange) -> torch.Tensor:
        table = made(type, 300, 4, placed).alone
        row = embedding.embed(table.data, type, ids, K, 2.0, table.place)
        return torch.cat([dequant.plain(table).float(), row])

    compared(find)


@pytest.mark.usefixtures("placed")
def test_a_part_of_several() -> None:
    """Matrices packed together, one of them read alone."""

    def find(placed: bool, by: linear.Exchange) -> torch.Tensor:
        several = [made("q4_k", n, n, placed) for n in (256, 128, 384)]
        join(several)
        return torch.cat([dequant.plain(m.alone) for m in reversed(several)])

    compared(find)


@needs_gpu
def test_what_is_measured() -> None:
    """Where a GPU has two sides, each chunk of new memory is at the one it is said to be at."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = sides.of(device)
    if found is None:
        pytest.skip("this GPU has one side")
    place = found.place(64 << 20, device)
    chunks = torch.randint(0, 2 * place.pairs, (512,), device=device)
    far = [sides.latencies(place.base, chunks * sides.CHUNK, processor)
           for processor in (found.here, found.there)]  # fmt: skip
    at = chunks * sides.CHUNK + place.base.data_ptr() % sides.PAGE
    page = at // sides.PAGE
    side = sides.parity(at & place.mask) ^ place.pages[page // 64] >> page % 64 & 1
    assert torch.equal(side, (far[0] > far[1]).long())
