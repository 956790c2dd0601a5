"""Which multiprocessors and chunks are at which side, from latencies of a GPU that is made up."""

from __future__ import annotations

import numpy as np
import torch

from g4spec.runtime.cuda import sides

MASK = 0xAB000


def latencies(side: np.ndarray, chunks: int, noise: float, far: float = 580.0) -> np.ndarray:
    rng = np.random.default_rng(1)
    at = np.array([(i * sides.CHUNK & MASK).bit_count() & 1 for i in range(chunks)])
    out = 920 + far * (side[:, None] != at) + rng.normal(0, noise, (len(side), chunks))
    return out + rng.normal(0, noise, chunks) + rng.normal(0, noise, (len(side), 1))


def test_multiprocessors_by_their_side() -> None:
    side = np.random.default_rng(0).permutation(np.arange(132) % 2)
    found = sides.processors(latencies(side, 64, 80.0))
    assert found is not None and (found == (side ^ side[0])).all()


def test_one_side_is_none() -> None:
    side = np.arange(128) % 2
    assert sides.processors(latencies(side, 64, 80.0, far=0.0)) is None
    missing = latencies(side, 64, 80.0)
    missing[3] = 0
    assert sides.processors(missing) is None
    assert sides.processors(latencies(side * (np.arange(128) > 120), 64, 20.0)) is None


def test_bits_that_change_the_side() -> None:
    both = latencies(np.arange(2), 512, 60.0)
    assert sides.page_mask(both[0] - both[1]) == MASK
    both[0, 77] += 2000  # a chunk that is not where it should be
    both[0, 78] += 2000
    assert sides.page_mask(both[0] - both[1]) is None
    assert sides.page_mask(np.where(np.arange(512) & 2, 1.0, -1.0)) is None  # pairs on one side


def test_what_is_put_is_read() -> None:
    pairs, count = 700, 700 * 8192 - 768
    memory = torch.zeros((pairs + 1) * 8192, dtype=torch.uint8)
    base = memory[-memory.data_ptr() % 8192 :][: pairs * 8192]
    place = sides.Place(base, MASK, torch.tensor([0b10110]), (np.uint64(0b10110),))
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    for at in range(0, count, 18432):
        place.put(data[at : at + 18432], at)
    assert torch.equal(place.read(0, count), data)
    assert torch.equal(place.read(768, 9216), data[768:][:9216])
    chunk = place.base.view(pairs, 2, sides.CHUNK)
    for pair in (0, 5, 300, 650):
        at = base.data_ptr() % sides.PAGE + pair * 8192
        side = (at & MASK).bit_count() + (0b10110 >> at // sides.PAGE) & 1
        assert torch.equal(chunk[pair, side], data[pair * 4096 :][:4096])
        assert torch.equal(chunk[pair, 1 - side], data[(700 + pair) * 4096 :][:4096])
