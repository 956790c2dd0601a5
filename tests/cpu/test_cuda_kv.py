"""The GPU's cache: its rows, its ring and its two ways to store a row (on any device)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.advisor.facts import facts
from g4spec.advisor.figures import Fixed
from g4spec.advisor.memory_needs import LARGE, own_slots, own_token_bytes, slot_bytes
from g4spec.advisor.schema import Size
from g4spec.advisor.subjects import named_target
from g4spec.core import MAX_STEP_ROWS, CacheShape
from g4spec.gguf.reader import TensorInfo
from g4spec.measure import synthetic
from g4spec.models import gemma4
from g4spec.models.spec import Checkpoint, LayerSpec
from g4spec.quant.formats import q8_0
from g4spec.runtime.cuda import gpu_memory as memory
from g4spec.runtime.cuda.cache import cuda_kv as kv
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.step import attention


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


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_keys_that_are_values_where_they_do_not_turn(kind: kv.Kind) -> None:
    g = torch.Generator().manual_seed(3)
    values, weight = torch.randn(9, 2, 512, generator=g), 1 + torch.rand(512, generator=g)
    keys = values * weight
    keys.view(9, 2, 2, 256)[..., :64] = torch.randn(9, 2, 2, 64, generator=g)
    cache = CudaKV(2, 512, 256, None, 16, "cpu", kind, turning=64)
    cache.append(torch.arange(100, 109), keys, values)
    read, stored = cache.read(100, 108)  # a cache that nobody told the weight
    assert torch.equal(read.view(9, 2, 2, 256)[..., 64:], stored.view(9, 2, 2, 256)[..., 64:])
    cache.weight = weight
    error = 2e-3 if kind == "f16" else 5e-2
    for got, want in zip(cache.read(100, 108), (keys, values), strict=True):
        assert (got - want).abs().max() < error
    assert all(bool(x.isnan().all()) for x in cache.read(0, 99))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(
    "shape", [CacheShape(4, 512, None, 64), CacheShape(4, 512, None), CacheShape(2, 512, 200, 32),
              CacheShape(2, 256, None, 64), CacheShape(1, 512, None, 256)]
)  # fmt: skip
def test_estimated_bytes_are_those_of_the_planes(shape: CacheShape, kind: kv.Kind) -> None:
    got = memory.Card(torch.device("cpu"), kind).cache([shape], 1000, 64)
    made = CudaKV(shape.n_kv, shape.head_dim, 1000 + MAX_STEP_ROWS, shape.window, MAX_STEP_ROWS,
                  "cpu", kind, shape.turning)  # fmt: skip
    planes = (made.keys, made.values, made.key_scales, made.value_scales)
    assert got == sum(p.nbytes for p in planes)


def test_estimated_weights_are_those_that_are_loaded() -> None:
    def info(name: str, type: str, *shape: int) -> TensorInfo:
        form = quant.get(type)
        return TensorInfo(name, shape, form.type, 0, form.nbytes(shape))

    card, old = (memory.Card(torch.device("cpu"), "f16", portable) for portable in (False, True))
    whole, odd = info("a", "q8_0", 8, 64), info("b", "q8_0", 8, 96)
    assert card.weights([whole]) == old.weights([whole]) == 8 * 68
    assert (card.weights([odd]), old.weights([odd])) == (8 * 96 * 4, 8 * 102)
    assert card.weights([info("c", "f16", 8, 96), info("d", "f16", 96)]) == 8 * 192 + 96 * 4
    for one in (card, old):  # no kernel takes this type, so float32 is kept
        assert one.weights([info("e", "iq3_xxs", 8, 256)]) == 8 * 256 * 4


def test_chunks_by_the_size_of_a_card() -> None:
    sizes = {8: 512, 16: 512, 24: 1024, 32: 1024, 35: 1024, 40: 2048, 48: 2048, 80: 4096, 141: 4096}
    assert {gib: memory.chunk(gib << 30) for gib in sizes} == sizes


@pytest.mark.parametrize(("gib", "arch"), [
    (16, "sm_75"), (24, "sm_86"), (32, "sm_120"), (48, "sm_86"), (80, "sm_80"), (141, "sm_90a"),
])  # fmt: skip
def test_doctor_counts_what_prompts_take(
    gib: int, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.launch, "arch", lambda index: arch)
    card = memory.Card(torch.device("cuda", 0), "q8_0", arch == "sm_75")
    for size, shape in synthetic.TARGETS.items():
        config = gemma4.parse_hf(Checkpoint(shape, {}))
        needed = card.workspace(config, 8192, memory.chunk(gib << 30))
        large = gib << 30 >= LARGE
        row = facts().get(Fixed, f"fixed-g4spec-{size.split('-')[0]}{'-large' * large}")
        assert needed <= row.gib * 2**30
        assert large or needed > 0.8 * row.gib * 2**30


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("context", [512, 4096, 32_768])
def test_doctor_counts_what_caches_take(kind: kv.Kind, context: int) -> None:
    card = memory.Card(torch.device("cuda", 0), kind, False)
    for size, shape in synthetic.TARGETS.items():
        caches = gemma4.caches(gemma4.parse_hf(Checkpoint(shape, {})))
        known = named_target(facts(), facts().get(Size, size.split("-")[0])).caches
        counted = own_token_bytes(known, kind) * context
        counted += slot_bytes(known, kind) * own_slots(known, context)
        steps = own_token_bytes(known, kind) * 128  # the next multiple, and the step's rows
        assert 0 <= card.cache(caches, context, 1024) - counted <= steps


@pytest.mark.parametrize(("head_dim", "n_kv"), [(64, 1), (128, 2), (128, 4), (256, 2), (512, 4)])
def test_no_cache_has_more_chunks_than_are_added(head_dim: int, n_kv: int) -> None:
    for n_ctx in (4096, 131_072, 262_144):
        cache = CudaKV(n_kv, head_dim, 64, None, 32, "cpu", "f16")
        cache.capacity = n_ctx + 2 * MAX_STEP_ROWS
        chunks = attention.Chunks.of(cache)
        assert chunks.most(cache.capacity, cache.capacity) <= 256
        narrow = head_dim <= 128 and n_kv < 4
        assert chunks.shift == (6 if narrow and n_ctx < 262_144 else 7)


def test_global_layers_of_the_large_models_store_640_columns() -> None:
    assert kv.row_bytes(4, 512, "f16") == 4 * 1024 * 2
    assert kv.row_bytes(4, 512, "f16", turning=64) == 4 * 640 * 2
    assert kv.row_bytes(4, 512, "q8_0", turning=64) == 4 * (640 + 40)
    spec = LayerSpec(0, None, 32, 4, 512, 64, 1e6, rope_partial=0.25, v_from_k=True)
    own = replace(spec, v_from_k=False)
    config = gemma4.Config(160, 64, 4096, 1e-6, 30.0, (spec, own))
    assert [s.turning for s in gemma4.caches(config)] == [64, 0]


def test_capacity_is_whole_tiles_and_at_most_the_context() -> None:
    assert kv.capacity(1000, None, 512) == 1024
    assert kv.capacity(100_000, 1024, 1) == 1152
    assert kv.capacity(100_000, 1024, 512) == 1536
    assert kv.capacity(500, 1024, 16) == 512
    assert kv.row_bytes(4, 512, "q8_0") == 2 * 4 * 544
