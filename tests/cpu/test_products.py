"""Matmuls of prompts: several blocks are computed at once only if that does not change any bit."""

from __future__ import annotations

import pytest
import torch

from g4spec.runtime.cuda.weights.dequant import Products

SIZE = 4


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 11, 16])
@pytest.mark.parametrize("most", [1, 2, 4, 8])
def test_several_blocks_give_the_same_bits(blocks: int, most: int) -> None:
    """The fake matmul's bits depend on its rows from more than `most` blocks on."""
    products, calls = Products(torch.empty(0), SIZE), list[int]()

    def multiply(rows: torch.Tensor, to: torch.Tensor) -> None:
        calls.append(len(rows) // SIZE)
        to.copy_(rows * 2 + (1e-3 if len(rows) > most * SIZE else 0))

    x = torch.randn(blocks * SIZE, 3, generator=torch.Generator().manual_seed(blocks))
    for _ in range(2):
        out = torch.empty_like(x)
        calls.clear()
        products.in_runs(("test",), x, out, multiply)
        assert torch.equal(out, x * 2)
    assert max(calls) == max(r for r in (1, 2, 4, 8) if r <= min(most, blocks))
    assert sum(calls) == blocks  # what was compared once is not compared again


def test_a_shorter_last_block() -> None:
    products = Products(torch.empty(0), SIZE)
    x, out = torch.randn(3, 2), torch.empty(3, 2)

    def multiply(rows: torch.Tensor, to: torch.Tensor) -> None:
        to.copy_(rows + 1)

    products.in_runs(("test",), x, out, multiply)
    assert torch.equal(out, x + 1)
