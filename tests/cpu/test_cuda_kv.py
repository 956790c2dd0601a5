"""The GPU's cache: its rows, its ring and its two ways to store a row (on any device)."""

import numpy as np
import pytest
import torch

from g4spec.quant.formats import q8_0
from g4spec.runtime.cuda import kv
from g4spec.runtime.cuda.kv import CudaKV


@pytest.mark.parametrize("spread", [0.0, 1e-9, 1e-5, 1.0, 300.0])
def test_q8_0_stores_the_numbers_of_the_format(spread: float) -> None:
    x = torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(1)) * spread
    x[0, 0, :32] = torch.arange(32) - 15.5  # halves, to see their rounding
    x[0, 0, 0] = 127.0
    codes, scales = kv.quantize(x, torch.tensor(127.0))
    expected = q8_0.encode(x.numpy().reshape(-1)).view(q8_0.DTYPE)
    assert np.array_equal(codes.numpy().reshape(-1, 32).astype(np.int16) - 128, expected["q"])
    assert np.array_equal(scales.numpy().reshape(-1).view(np.uint16), expected["d"].view(np.uint16))
    decoded = torch.from_numpy(q8_0.decode(expected.view(np.uint8).reshape(-1))).view(x.shape)
    assert torch.equal(kv.dequantize(codes, scales), decoded)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_ring_keeps_its_window_and_shows_what_was_never_written(kind: kv.Kind) -> None:
    cache = CudaKV(2, 32, 4096, 100, 5, "cpu", kind)
    assert cache.capacity == 128  # 100 + 16, in tiles of 128
    assert all(bool(x.isnan().all()) for x in cache.read(0, 127))
    rows = torch.randn(300, 2, 32, generator=torch.Generator().manual_seed(2))
    for start in range(0, 300, 20):
        cache.append(
            torch.arange(start, start + 20), rows[start : start + 20], -rows[start : start + 20]
        )
        first = max(0, start + 20 - 116)
        keys, values = cache.read(first, start + 19)
        assert torch.allclose(keys, rows[first : start + 20], atol=0.02)
        assert torch.equal(values, -keys)


def test_capacity_is_whole_tiles_and_at_most_the_context() -> None:
    assert kv.capacity(1000, None, 512) == 1024
    assert kv.capacity(100_000, 1024, 1) == 1152
    assert kv.capacity(100_000, 1024, 512) == 1536
    assert kv.capacity(500, 1024, 16) == 512
    assert kv.row_bytes(4, 512, "q8_0") == 2 * 4 * 544
