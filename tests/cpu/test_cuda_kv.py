"""The GPU's KV cache: rows, rings and both storage types (these tests run on any device)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.advisor import cache_sizes
from g4spec.advisor.facts import facts
from g4spec.advisor.figures import FixedCostFact
from g4spec.advisor.memory_needs import LARGE, fixed_cost
from g4spec.core import MAX_STEP_ROWS, PAGE, CacheShape
from g4spec.gguf.header import TensorInfo
from g4spec.measure import synthetic
from g4spec.models import gemma4
from g4spec.models.spec import Checkpoint, LayerSpec
from g4spec.ops.kv import Space
from g4spec.ops.kv_size import pages_of
from g4spec.quant.formats import q8_0
from g4spec.runtime.cuda import gpu_memory as memory
from g4spec.runtime.cuda.build import nvrtc
from g4spec.runtime.cuda.cache import cuda_kv as kv
from g4spec.runtime.cuda.cache import cuda_kv_size as kv_size
from g4spec.runtime.cuda.cache.cache_types import KINDS, TYPES
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.step.attention_chunks import Chunks
from tests.gpu.batches import rows_of, spread


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


def make_cache(shape: CacheShape, kind: kv.Kind, n_ctx: int = 4096, slots: int = 3) -> CudaKV:
    """Return a cache whose pages are in a shuffled order; the last slot has none."""
    return CudaKV(shape, spread(slots, n_ctx, device="cpu"), 5, kind)


def randn(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_numbers_of_the_quant_type(kind: kv.Kind) -> None:
    """On the CPU `--cache-type` rounds with the quant type of that name."""
    cache, rows = make_cache(CacheShape(2, 64, None), kind), randn(2, 9, 2, 64)
    batch = rows_of([(1, 100, 9)], "cpu")
    cache.append(batch.slots, batch.positions, *rows)
    for got, x in zip(cache.read(1, 100, 108), rows.numpy(), strict=True):
        assert np.array_equal(got, quant.get(kind).dequantize(quant.get(kind).quantize(x)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_keeps_its_window_and_has_nan_in_unwritten_slots(kind: kv.Kind) -> None:
    cache = make_cache(CacheShape(2, 32, 100), kind)
    assert cache.capacity == 128  # 100 + 16, in tiles of 128
    assert cache.keys.shape == (4, 2, 128, 32)
    rows = randn(300, 2, 32)
    for start in range(0, 300, 20):
        batch = rows_of([(1, start, 20)], "cpu")
        cache.append(
            batch.slots, batch.positions, rows[start : start + 20], -rows[start : start + 20]
        )
        first = max(0, start + 20 - 116)
        keys, values = cache.read(1, first, start + 19)
        assert torch.allclose(keys, rows[first : start + 20], atol=0.02)
        assert torch.equal(values, -keys)
    for slot in (0, 2, 3):
        assert all(bool(x.isnan().all()) for x in cache.read(slot, 0, 127))


@pytest.mark.parametrize("kind", KINDS)
def test_pages_keep_everything_of_every_slot(kind: kv.Kind) -> None:
    cache, rows = make_cache(CacheShape(2, 32, None), kind, n_ctx=500), randn(3, 400, 2, 32)
    assert cache.keys.shape == (3 * 5 + 1, 2, PAGE, 32) and cache.positions == 5 * PAGE
    for start in range(0, 400, 40):
        batch = rows_of([(slot, start, 40) for slot in (2, 0, 1)], "cpu")
        some = torch.cat([rows[slot, start : start + 40] for slot in (2, 0, 1)])
        cache.append(batch.slots, batch.positions, some, -some)
    for slot in range(3):
        keys, values = cache.read(slot, 0, 399)
        assert torch.allclose(keys, rows[slot], atol=0.02) and torch.equal(values, -keys)
        assert all(bool(x.isnan().all()) for x in cache.read(slot, 400, 5 * PAGE - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_page_go_to_the_spare_page(kind: kv.Kind) -> None:
    """These are rows of a slot without pages and rows before position 0."""
    cache = make_cache(CacheShape(1, 32, None), kind, n_ctx=500)
    batch = rows_of([(3, 0, 3), (3, 300, 2), (1, -1, 1)], "cpu")
    cache.append(batch.slots, batch.positions, *randn(2, 6, 1, 32))
    held = cache.key_scales if TYPES[kind].block else cache.keys
    assert not held[0].isnan().all() and bool(held[1:].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [3, 90, 301])
def test_a_ring_restored_into_another_slot(kind: kv.Kind, end: int) -> None:
    cache, other = (
        make_cache(CacheShape(2, 64, 100), kind),
        make_cache(CacheShape(2, 64, 100), kind),
    )
    for start in range(0, end, 10):
        batch = rows_of([(2, start, min(10, end - start))], "cpu")
        cache.append(batch.slots, batch.positions, *randn(2, len(batch), 2, 64, seed=start))
    rows = cache.snapshot(2, end)
    assert all(x.device.type == "cpu" and len(x) == min(end, 100) for x in rows)
    other.restore(0, end, rows)
    seen = max(0, end - 100), end - 1
    for mine, its in zip(other.read(0, *seen), cache.read(2, *seen), strict=True):
        assert torch.equal(mine, its)
    for plane, kept in zip(other.snapshot(0, end), rows, strict=True):
        assert torch.equal(plane.view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_values_share_the_unrotated_part_of_keys(kind: kv.Kind) -> None:
    values, weight = randn(9, 2, 512, seed=3), 1 + torch.rand(512)
    keys = values * weight
    keys.view(9, 2, 2, 256)[..., :64] = randn(9, 2, 2, 64, seed=4)
    cache = make_cache(CacheShape(2, 512, None, 64), kind, n_ctx=256)
    batch = rows_of([(1, 100, 9)], "cpu")
    cache.append(batch.slots, batch.positions, keys, values)
    read, stored = cache.read(1, 100, 108)  # a cache without the weight
    assert torch.equal(read.view(9, 2, 2, 256)[..., 64:], stored.view(9, 2, 2, 256)[..., 64:])
    cache.weight = weight
    error = 2e-3 if kind == "f16" else 5e-2
    for got, want in zip(cache.read(1, 100, 108), (keys, values), strict=True):
        assert (got - want).abs().max() < error
    assert all(bool(x.isnan().all()) for x in cache.read(1, 0, 99))
    whole, _ = cache.whole(torch.tensor(1))
    assert torch.equal(whole[100:109] * cache.taken_over(weight), cache.read(1, 100, 108)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape",
    [
        CacheShape(4, 512, None, 64),
        CacheShape(4, 512, None),
        CacheShape(2, 512, 200, 32),
        CacheShape(2, 256, None, 64),
        CacheShape(1, 512, None, 256),
    ],
)
def test_estimated_bytes_are_those_of_the_planes(shape: CacheShape, kind: kv.Kind) -> None:
    card, space = memory.Card(torch.device("cpu"), kind), Space(3, 1000, 7)
    got = 8 * card.page([shape]) + 3 * card.slot([shape], 1000, 32)
    assert got == sum(p.nbytes for p in CudaKV(shape, space, 32, kind).planes)


def test_estimated_weights_are_those_that_are_loaded() -> None:
    def info(name: str, type: str, *shape: int) -> TensorInfo:
        form = quant.get(type)
        return TensorInfo(name, shape, form.type, 0, form.nbytes(shape))

    card, old = (memory.Card(torch.device("cpu"), "f16", portable) for portable in (False, True))
    whole, odd = info("a", "q8_0", 8, 64), info("b", "q8_0", 8, 96)
    assert card.weights([whole]) == old.weights([whole]) == 8 * 68
    assert (card.weights([odd]), old.weights([odd])) == (8 * 96 * 4, 8 * 102)
    assert card.weights([info("c", "f16", 8, 96), info("d", "f16", 96)]) == 8 * 192 + 96 * 4
    for one in (card, old):  # blocks that are rewritten: codes and 8 scales of 4 bits, one factor
        assert one.weights([info("e", "iq3_xxs", 8, 256)]) == 8 * (128 + 4 + 2)


def test_chunks_by_the_size_of_a_card() -> None:
    sizes = {8: 512, 16: 512, 24: 1024, 32: 1024, 35: 1024, 40: 2048, 48: 2048, 80: 4096, 141: 4096}
    assert {gib: memory.chunk(gib << 30) for gib in sizes} == sizes


@pytest.mark.parametrize(
    ("gib", "arch"),
    [
        (16, "sm_75"),
        (32, "sm_70"),
        (24, "sm_75"),
        (24, "sm_86"),
        (32, "sm_120"),
        (48, "sm_75"),
        (48, "sm_86"),
        (80, "sm_80"),
        (141, "sm_90a"),
        (180, "sm_100"),
        (128, "sm_121"),
    ],
)
def test_doctor_counts_prefill_memory(gib: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.launch, "arch", lambda index: arch)
    card = memory.Card(torch.device("cuda", 0), "q8_0", arch in ("sm_70", "sm_75"))
    for size, shape in synthetic.TARGETS.items():
        config = gemma4.parse_hf(Checkpoint(shape, {}))
        needed = card.workspace(config, 8192, memory.chunk(gib << 30), 1)
        large = gib << 30 >= LARGE
        cost = f"fixed-g4spec-{size.split('-')[0]}{'-large' * large}"
        row = facts().get(FixedCostFact, cost)
        assert needed <= row.gib * 2**30
        assert large or needed > 0.8 * row.gib * 2**30
        for context in (32_768, 131_072, config.n_ctx):
            needed = card.workspace(config, context, memory.chunk(gib << 30), 1)
            counted = fixed_cost(facts(), cost, context)
            assert needed <= counted + (64 << 20)
            assert large or needed > 0.8 * counted


@pytest.mark.parametrize(("head_dim", "n_kv"), [(64, 1), (128, 2), (128, 4), (256, 2), (512, 4)])
def test_no_cache_has_more_chunks_than_are_added(head_dim: int, n_kv: int) -> None:
    for n_ctx in (4096, 131_072, 262_144):
        cache = CudaKV(CacheShape(n_kv, head_dim, None), Space(1, n_ctx, 0))
        assert cache.positions == pages_of(n_ctx + 2 * MAX_STEP_ROWS) * PAGE
        chunks = Chunks.of(cache, cache.positions)
        assert chunks.most(cache.positions, cache.positions) <= 256
        narrow = head_dim <= 128 and n_kv < 4
        assert chunks.shift == (6 if narrow and n_ctx < 262_144 else 7)


def test_global_layers_of_the_large_models_store_640_columns() -> None:
    wide, shared = CacheShape(4, 512, None), CacheShape(4, 512, None, 64)
    assert kv_size.row_bytes(wide, "f16") == 4 * 1024 * 2
    assert kv_size.row_bytes(wide, "q8_0") == 2 * 4 * 544
    assert kv_size.row_bytes(shared, "f16") == 4 * 640 * 2
    assert kv_size.row_bytes(shared, "q8_0") == 4 * (640 + 40)
    spec = LayerSpec(0, None, 32, 4, 512, 64, 1e6, rope_partial=0.25, v_from_k=True)
    own = replace(spec, v_from_k=False)
    config = gemma4.Config(160, 64, 4096, 1e-6, 30.0, (spec, own))
    assert [s.rotary_pairs for s in gemma4.caches(config)] == [64, 0]


def test_a_ring_is_whole_tiles_and_at_most_the_context() -> None:
    assert kv_size.capacity(100_000, 1024, 1) == 1152
    assert kv_size.capacity(100_000, 1024, 32) == 1152
    assert kv_size.capacity(100_000, 1024, 512) == 1536
    assert kv_size.capacity(500, 1024, 16) == 640  # 500 and the rows of a step and a draft


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_type_is_known_everywhere(kind: kv.Kind) -> None:
    """A type without a CPU counterpart, kernels or advice is incomplete."""
    header = nvrtc.CUDA / "include" / "cache_types.cuh"
    assert quant.readable()[kind].decode is not None
    assert f"struct {TYPES[kind].struct} {{" in header.read_text()
    assert cache_sizes.BITS[kind] == TYPES[kind].bits
    assert len({type.number for type in TYPES.values()}) == len(KINDS) == len(TYPES)
