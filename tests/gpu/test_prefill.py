"""Prefill compared with the reference: every layer's residual, and the caches afterwards."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.core import MAX_STEP_ROWS, PROMPT_BLOCK, CacheShape
from g4spec.errors import InputError
from g4spec.models.gemma4_config import shared_kv
from g4spec.models.spec import LayerSpec
from g4spec.ops.kv import Space
from g4spec.runtime.batches import batch_of
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.cache.cache_types import KINDS
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV, Kind
from g4spec.runtime.cuda.prefill import long_ops, plan, prefill_attention, reader
from g4spec.runtime.cuda.prefill.prefill_attention import Chunk, HeadWeights
from g4spec.runtime.cuda.prefill.prefill_experts import Experts, Stacks
from g4spec.runtime.cuda.step.recorded import RUNS_BEFORE_RECORDING
from g4spec.runtime.cuda.weights import held, packing
from g4spec.runtime.cuda.weights.dequant import Products, Weight, dequantize
from tests.gpu.device import DEVICE, EMULATED, needs_gpu
from tests.gpu.parity import quantized
from tests.gpu.prefill_models import SLOT, Small, dense, small

pytestmark = pytest.mark.gpu

WRITABLE = tuple(name for name in packing.PARTS if quant.get(name).encode)
N_CTX = 1536


def tolerance(layer: int) -> float:
    """Return the relative tolerance of the residual before each layer: random layers amplify the
    rounding errors of the first ones."""
    return 2e-3 * 1.7**layer if layer else 0.0


@pytest.mark.parametrize("columns", [512, 192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("type", packing.PARTS)
def test_dequantized_values(type: str, dtype: torch.dtype, columns: int) -> None:
    if columns % quant.get(type).block:
        pytest.skip("no such matrix")
    rows, matrices, fmt = 200, 2, quant.get(type)
    x = np.random.default_rng(0).standard_normal((matrices, rows, columns), np.float32)
    raw = torch.from_numpy(quantized(type, x))
    unit = packing.unit_of(type, columns)
    data = torch.cat([packing.pack(type, held.held(type, m), unit) for m in raw]).to(DEVICE)
    out = torch.full((matrices * rows + 1, columns), torch.nan, dtype=dtype, device=DEVICE)
    dequantize(Weight(type, data, rows, columns, matrices), out[:-1])
    want = torch.from_numpy(fmt.dequantize(raw.numpy())).view(-1, columns)
    error = (out[:-1].cpu().float() - want).abs().max()
    assert error <= torch.finfo(dtype).eps / 2 * want.abs().max()
    assert ((out[:-1].cpu() == want.to(dtype)).float().mean()) > 0.99  # two roundings differ rarely
    assert out[-1].isnan().all()


BLOCK = 64 if EMULATED else PROMPT_BLOCK
"""Rows of a prompt block in these tests, small because the emulator is slow."""


@pytest.fixture(autouse=True)
def _block(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefill_attention, plan, long_ops, reader):
        monkeypatch.setattr(module, "PROMPT_BLOCK", BLOCK)
    monkeypatch.setattr(plan, "max_short_block", lambda arch: BLOCK // 4)


def read(
    model: Small,
    ids: list[int],
    chunks: list[int],
    kind: Kind = "f16",
    *,
    portable: bool = False,
    before: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, list[CudaKV]]:
    """Read `ids` in chunks of `blocks` blocks.

    Args:
        before: another prompt that was read into the slot earlier.

    Returns:
        Rows after the final norm [T, H], taps [T, n + 1, H], caches.
    """
    on = model.reader(N_CTX, BLOCK * max(chunks), kind, portable)
    for prompt in (before, ids):
        out, at = [], 0
        for blocks in chunks:
            part = prompt[at : at + blocks * BLOCK]
            out += [on.read(SLOT, part, at)] if part else []
            at += len(part)
        assert at == len(prompt)
    hidden, taps = (torch.cat([getattr(o, name) for o in out]) for name in ("hidden", "taps"))
    return hidden, taps.view(len(ids), len(model.config.layers) + 1, -1), on.target.caches


def check(
    model: Small,
    count: int,
    kind: Kind = "f16",
    *,
    loose: float = 1.0,
    share: float = 1.0,
    portable: bool = False,
) -> None:
    """Compare residuals of `count` tokens, and the caches, with the reference.

    Args:
        loose: factor on the tolerance.
        share: fraction of rows that must be within it.
    """
    ids = [(7 * i * i + 3 * i) % 150 + 5 for i in range(count)]
    want_hidden, want, theirs = model.wanted(ids, kind)
    hidden, got, mine = read(model, ids, [2] * (count // (2 * BLOCK) + 1), kind, portable=portable)
    error = (got.cpu() - want).norm(dim=-1) / want.norm(dim=-1)  # [T, n + 1]
    assert torch.equal(got[:, 0].cpu(), want[:, 0])
    worst = error.sort(dim=0).values[int(share * (count - 1))]
    limits = [tolerance(i) * loose for i in range(len(worst))]
    assert (worst <= torch.tensor(limits)).all(), (worst, limits)
    last = ((hidden.cpu() - want_hidden).norm(dim=-1) / want_hidden.norm(dim=-1)).sort().values
    assert last[int(share * (count - 1))] <= limits[-1]
    for layer, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        first = 0 if a.window is None else max(0, count - a.window)
        found = zip(a.read(SLOT, first, count - 1), b.read(0, first, count - 1), strict=True)
        for x, y in found:
            worst = ((x.cpu() - y).norm(dim=-1) / y.norm(dim=-1)).flatten().sort().values
            limit = tolerance(layer) * loose + (1e-3 if kind == "f16" else 1e-2)
            assert worst[int(share * (len(worst) - 1))] < limit, (layer, worst[-5:])


@pytest.mark.parametrize("count", [203, 2 * BLOCK, 1])
def test_dense(count: int) -> None:
    check(small(dense(), {"": "q8_0"}), count)


@pytest.mark.parametrize("window", [1, 64, 112])
def test_windows(window: int) -> None:
    """With 112, a ring has no room for the whole tile of its first row."""
    check(small(dense(3, window=window), {"": "q8_0"}), 300)


@pytest.mark.parametrize("type", [*WRITABLE, "f16"])
def test_types(type: str) -> None:
    check(small(dense(3), {"": type}), 80)


def test_types_mixed_within_a_product() -> None:
    check(small(dense(3), {"": "q4_k", "attn_v": "q6_k", "ffn_up": "q5_k"}), 80)


def test_widths_that_do_not_divide_into_256() -> None:
    check(small(dense(3, n_ff=704), {"": "q8_0", "ffn_down": "q5_0"}, n_embd=192), 80)


def test_q8_0_cache() -> None:
    check(small(dense(3), {"": "q8_0"}), 150, "q8_0", loose=5)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("window", [24, 64, 150])
def test_published_head_sizes(window: int, group: int, portable: bool) -> None:
    heads = max(2, group) if EMULATED else 8
    layers = tuple(
        replace(
            s,
            head_dim=512 if s.window is None else 256,
            n_head=heads,
            n_kv=1 if s.window is None else heads // group,
        )
        for s in dense(3, window)
    )
    check(small(layers, {"": "q4_k"}), 203, portable=portable)


@pytest.mark.parametrize("portable", [False, True])
def test_q8_0_cache_with_shared_keys_and_values(portable: bool) -> None:
    layers = tuple(
        replace(s, head_dim=512 if s.window is None else 256, n_head=2, n_kv=1) for s in dense(3)
    )
    check(small(layers, {"": "q8_0"}), 150, "q8_0", loose=5, portable=portable)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_256_without_a_window(kind: Kind) -> None:
    layers = tuple(replace(s, head_dim=256, n_head=2, n_kv=1) for s in dense(3))
    check(small(layers, {"": "q4_k"}), 300, kind, loose=5 if kind == "q8_0" else 1)


def shared_caches() -> tuple[LayerSpec, ...]:
    layers = dense(6, v_from_k=False, n_ple=64)
    sources = shared_kv([s.window is not None for s in layers], 3)
    return tuple(
        replace(s, kv_from=source, n_ff=512 if source is None else 1024)
        for s, source in zip(layers, sources, strict=True)
    )


def test_per_layer_embeddings_and_shared_caches() -> None:
    check(small(shared_caches(), {"": "q8_0"}), 150)


@pytest.mark.parametrize("portable", [False, True])
def test_experts(portable: bool) -> None:
    layers = dense(3, n_expert=16, n_expert_used=4, n_ff_expert=192)
    # If two experts have nearly equal scores, either may be chosen.
    model = small(layers, {"": "q8_0", "ffn_gate_up_exps": "q4_k", "ffn_down_exps": "q5_0"})
    check(model, 150, loose=3, share=0.9, portable=portable)  # experts compute in bf16


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("types", [{"": "q4_k"}, {"": "q8_0", "attn_v": "f16", "ffn_up": "q5_1"}])
def test_all_experts(types: dict[str, str], split: bool) -> None:
    layers = dense(3, n_expert=16, n_expert_used=16, n_ff_expert=256, split_experts=split)
    check(small(layers, types), 80, loose=3)


def published(window: int, n_layer: int = 3) -> tuple[LayerSpec, ...]:
    layers = dense(3, window)[3 - n_layer :]
    return tuple(
        replace(s, index=i, head_dim=512 if s.window is None else 256, n_head=2, n_kv=1)
        for i, s in enumerate(layers)
    )


def experts() -> tuple[LayerSpec, ...]:
    layers = dense(3, n_expert=16, n_expert_used=4, n_ff_expert=192)[1:]
    return tuple(replace(s, index=i) for i, s in enumerate(layers))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two float32 tensors are bit-identical."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check_bits(model: Small, kind: Kind, portable: bool = False) -> None:
    """Check that bits only depend on the tokens up to the end of a block: not on chunks, on where
    they begin, on earlier use of the slot, or on later tokens."""
    count = BLOCK // 2 + BLOCK * (1 if EMULATED else 2)
    ids = [(11 * i * i + 5 * i) % 150 + 5 for i in range(count)]
    hidden, taps, caches = read(model, ids, [8], kind, portable=portable)
    for chunks in [[1, 1]] if EMULATED else [[1, 1, 1], [2, 8], [1, 8]]:
        again = read(model, ids, chunks, kind, portable=portable, before=ids[::-1])
        assert same(hidden, again[0]) and same(taps, again[1]), chunks
        for a, b in zip(caches, again[2], strict=True):
            first = 0 if a.window is None else max(0, count - a.window)
            stored = (c.read(SLOT, first, count - 1) for c in (a, b))
            assert all(same(x, y) for x, y in zip(*stored, strict=True)), chunks
    fewer = count - BLOCK  # ends within a block
    part, _, _ = read(model, ids[:fewer], [8], kind, portable=portable)
    assert same(hidden[:fewer], part)


@pytest.mark.parametrize(
    ("layers", "kind", "portable"),
    [
        (dense(3), "q8_0", False),
        (published(100), "f16", False),
        (published(100), "q8_0", True),
        (published(100, 2), "q8_0", False),
    ],
)
def test_bits_do_not_depend_on_chunks(
    layers: tuple[LayerSpec, ...], kind: Kind, portable: bool
) -> None:
    check_bits(small(layers, {"": "q8_0"}), kind, portable)


def test_a_chunk_shorter_than_a_block() -> None:
    """The whole block is computed anyway."""
    ids = [2, 7, 11, 13] * (BLOCK // 8)
    rows = [
        small(dense(3), {"": "q8_0"}).reader(N_CTX, chunk).read(SLOT, ids, 0)
        for chunk in (len(ids), BLOCK)
    ]
    assert same(rows[0].hidden, rows[1].hidden)


@pytest.mark.parametrize("count", [1, 16, 17, 48])
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_last_block_has_the_bits_of_steps(
    kind: Kind, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is computed at once, with a full ring, also once recorded, and if the first prompt
    was short."""
    monkeypatch.setattr(plan, "max_short_block", lambda arch: 48)
    monkeypatch.setattr(plan, "rows_at_once", lambda *_: 16 if count == 48 else 32)
    layers = dense(3, 64, head_dim=128, n_expert=16, n_expert_used=4, n_ff_expert=192)
    types = {"": "q4_k", "ffn_down_exps": "q8_0", "token_embd": "q6_k"}
    model, start = small(layers, types), 2 * BLOCK
    ids = [(11 * i * i + 5 * i) % 150 + 5 for i in range(start + count)]
    whole, _, caches = read(model, ids, [8], kind)
    on = model.reader(N_CTX, BLOCK * 8, kind)
    on.target.logits(on.read(SLOT, ids[start:], 0).hidden)
    parts = [on.read(SLOT, ids[:start], 0).hidden]
    for at in range(start, len(ids), MAX_STEP_ROWS):
        tokens = ids[at : at + MAX_STEP_ROWS]
        batch = batch_of(on.target.ops, [(SLOT, at, tokens)])
        parts.append(on.target.forward(batch).hidden)
    assert same(torch.cat(parts), whole)
    on.read(SLOT, ids[:start], 0)  # other rows of the ring
    for _ in range(RUNS_BEFORE_RECORDING + 2):
        assert same(on.read(SLOT, ids[start:], start).hidden, whole[start:])
    for a, b in zip(caches, on.target.caches, strict=True):
        first = 0 if a.window is None else max(0, len(ids) - a.window)
        stored = (c.read(SLOT, first, len(ids) - 1) for c in (a, b))
        assert all(same(x, y) for x, y in zip(*stored, strict=True))


def test_bits_do_not_depend_on_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps of 16 rows have a kernel for layers with a window that adds otherwise."""
    monkeypatch.setattr(plan, "max_short_block", lambda arch: 48)
    layers = tuple(
        replace(s, head_dim=512 if s.window is None else 256, n_head=4, n_kv=2 if s.window else 1)
        for s in dense(3, 300)
    )
    model, ids = small(layers, {"": "q4_k"}), [(11 * i * i) % 150 + 5 for i in range(40)]
    found = []
    for rows in (16, 48) if EMULATED else (16, 32, 48):
        monkeypatch.setattr(plan, "rows_at_once", lambda *_, rows=rows: rows)
        found.append(read(model, ids, [8], "q8_0")[0])
    assert all(same(found[0], other) for other in found[1:])


def test_which_last_blocks_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    on = small(dense(3), {"": "q8_0"}).reader(N_CTX, BLOCK)
    block, most = BLOCK, BLOCK // 4
    counts = [
        1,
        most,
        most + 1,
        block - 1,
        block,
        block + 1,
        2 * block + most,
        2 * block + most + 1,
    ]
    assert [on._short_rows(n) for n in counts] == [1, most, 0, 0, 0, 1, most, 0]
    monkeypatch.setattr(reader, "SLACK", BLOCK // 8)
    rows = [BLOCK // 8, most, block, block, block, block + BLOCK // 8, 2 * block + most, 3 * block]
    assert [on.prefill_rows(n) for n in counts] == rows


@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=needs_gpu)])
def test_bits_of_experts_do_not_depend_on_chunks(portable: bool) -> None:
    model = small(experts(), {"": "q8_0", "ffn_gate_up_exps": "q4_k"})
    check_bits(model, "f16", portable)


def test_bits_of_shared_caches_do_not_depend_on_chunks() -> None:
    check_bits(small(shared_caches(), {"": "q8_0"}), "f16")


@needs_gpu
@pytest.mark.parametrize("rows", [512, 1024, 4096])
def test_experts_of_a_row_do_not_depend_on_the_batch(rows: int) -> None:
    """At the sizes of the 26B-A4B, for every kernel that torch's grouped matmul may choose."""
    spec = LayerSpec(0, None, 16, 2, 512, 2112, 1e6, n_expert=128, n_expert_used=8, n_ff_expert=704)
    g, h, arch = torch.Generator(DEVICE).manual_seed(0), 2816, launch.arch()
    device = torch.device(DEVICE)
    whole_chunk, on = (Experts(spec, h, most, device, arch) for most in (4096, rows))
    products = Products(torch.empty(128 * 1408 * h, dtype=torch.float16, device=DEVICE), 512)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(*shape, device=DEVICE, generator=g) * shape[-1] ** -0.5).to(dtype)

    def stack(n: int, k: int) -> Weight:
        return Weight("", random(128 * n, k, dtype=torch.bfloat16), n, k, 128)

    w = Stacks([stack(1408, h)], stack(h, 704), interleaved=True)
    router, gains = random(128, h), torch.ones(128, device=DEVICE)
    x, routed = random(4096, h, dtype=torch.bfloat16), random(4096, h)

    def run(on: Experts, first: int, last: int) -> torch.Tensor:
        count = last - first
        on.rows[:count], on.routed[:count] = x[first:last], routed[first:last]
        y = on(w, router, gains, products, count)
        return y[on.places[: count * 8].long()]

    whole = run(whole_chunk, 0, 4096)
    for first in range(0, 4096, rows):
        assert torch.equal(run(on, first, first + rows), whole[first * 8 : (first + rows) * 8])


@pytest.mark.parametrize(
    ("dim", "group", "window"), [(256, 2, 1024), (256, 8, None), (512, 8, None)]
)
@pytest.mark.parametrize(("first", "second"), [(2560, 1024), (512, 2560), (512, 512)])
def test_long_attention(dim: int, group: int, window: int | None, first: int, second: int) -> None:
    """Up to thousands of keys in two chunks: the sm_90 kernel compared with two matmuls."""
    first, second = (n * BLOCK // 512 for n in (first, second))
    n_ctx, n_kv = first + second, 2
    spec = LayerSpec(0, window, n_kv * group, n_kv, dim, 64, 1e4, v_from_k=dim == 512)
    own, pairs = dim != 512, 0 if dim != 512 else 64
    device, g = torch.device(DEVICE), torch.Generator(DEVICE).manual_seed(0)
    way = prefill_attention.kind(dim, pairs, launch.arch())
    ways = [prefill_attention.Scores(spec, n_ctx, n_ctx, device), way(spec, n_ctx, n_ctx, device)]
    shape = CacheShape(n_kv, dim, window, pairs)
    caches = [CudaKV(shape, Space.single(n_ctx, DEVICE), 16) for _ in ways]
    norms = HeadWeights(
        *(0.2 + 0.4 * torch.rand(dim, device=device, generator=g) for _ in "qk"), own, 1e-6
    )
    for w in ways:
        w.queries.fill_(torch.nan), w.keys.fill_(torch.nan), w.values.fill_(torch.nan)
    start = 0
    for count in (first, second):
        columns = dim * n_kv * (group + 1 + own)
        qkv = torch.randn(count, columns, device=device, generator=g).half()
        angle = torch.rand(count, 64, device=device, generator=g)
        turns = torch.stack((angle.cos(), angle.sin()), -1)
        out = [
            torch.full((count, n_kv * group * dim), torch.nan, device=device).half() for _ in ways
        ]
        rows = torch.zeros(count, dtype=torch.int64, device=device)
        chunk = Chunk(rows, rows, rows, (count,), 0, start, count)
        for w, cache, o in zip(ways, caches, out, strict=True):
            w.prepare(qkv, norms, turns, cache, chunk)
            w.attend(o, start)
        start += count
        difference = (out[0].float() - out[1].float()).norm(dim=-1) / out[0].float().norm(dim=-1)
        assert difference.max() < 3e-3, difference.max()
    for a, b in zip(
        caches[0].read(0, max(0, start - (window or start)), start - 1),
        caches[1].read(0, max(0, start - (window or start)), start - 1),
        strict=True,
    ):
        assert same(a, b)


@pytest.mark.parametrize("dim", [256, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_not_hidden(kind: Kind, dim: int) -> None:
    """Its keys and values are NaN in the cache, and so is what later rows read of it."""
    own, pairs, broken = dim == 256, 0 if dim == 256 else 64, 5
    spec = LayerSpec(0, None, 4, 2, dim, 64, 1e4, v_from_k=not own)
    way = prefill_attention.kind(dim, pairs, launch.arch())(
        spec, BLOCK, BLOCK, torch.device(DEVICE)
    )
    cache = CudaKV(CacheShape(2, dim, None, pairs), Space.single(BLOCK, DEVICE), 16, kind)
    qkv = torch.randn(BLOCK, dim * (6 + 2 * own), generator=torch.Generator().manual_seed(0))
    qkv[broken] = torch.inf
    turns = torch.tensor([1.0, 0.0], device=DEVICE).repeat(BLOCK, 64, 1)
    rows = torch.zeros(BLOCK, dtype=torch.int64, device=DEVICE)
    chunk = Chunk(rows, rows, rows, (BLOCK,), 0, 0, BLOCK)
    norms = HeadWeights(*torch.ones(2, dim, device=DEVICE), own, 1e-6)
    way.prepare(qkv.half().to(DEVICE), norms, turns, cache, chunk)
    for read in cache.read(0, 0, BLOCK - 1):
        assert read[broken].isnan().all()
        assert read[:broken].isfinite().all() and read[broken + 1 :].isfinite().all()
    out = torch.zeros(BLOCK, 4 * dim, dtype=torch.float16, device=DEVICE)
    way.attend(out, 0)
    assert out[broken:].isnan().all()


def test_more_rotated_pairs_than_the_cache_stores() -> None:
    model = small(published(24, 2), {"": "q8_0"})
    model.reference["rope_freqs.weight"][64:71] = 1.0
    with pytest.raises(InputError, match="the first 64 pairs"):
        model.reader(N_CTX, BLOCK)


@needs_gpu
def test_workspace_is_known_before() -> None:
    layers = dense(3, n_expert=16, n_expert_used=4, n_ff_expert=192)
    layers = tuple(
        replace(
            s,
            head_dim=512 if s.window is None else 256,
            n_head=8,
            n_kv=1 if s.window is None else 4,
        )
        for s in layers
    )
    on = small(layers, {"": "q8_0"}).reader(8192, 4096)
    on.target.taps, config = (), on.target.config
    gc.collect()
    before = torch.cuda.memory_allocated()
    kept = on._chunk_model()
    took = torch.cuda.memory_allocated() - before
    want, passing = plan.workspace(config, 4096, 8192, launch.arch())
    assert want <= took <= want + (8 << 20), (want, took)  # rounding by the allocator
    on._long = kept
    on.read(SLOT, [7] * 500, 0)  # cuBLAS has its workspace, and weights are packed
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    on.read(SLOT, [7] * 4096, 0)
    residual = 2 * 4 * 4096 * config.n_embd  # and its norm
    peak = torch.cuda.max_memory_allocated() - before - residual
    assert passing / 2 <= peak <= passing + (8 << 20), (passing, peak)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 16, 4), (333, 128, 8), (4096, 128, 8)])
def test_routing(tokens: int, experts: int, k: int) -> None:
    tokens = min(tokens, 1001) if EMULATED else tokens
    g = torch.Generator(DEVICE).manual_seed(0)
    scores = torch.randn(tokens, experts, device=DEVICE, generator=g)
    scores[:, 3] = scores[:, 5]  # the lower id wins
    gains = torch.rand(experts, device=DEVICE, generator=g) + 0.5
    ids = torch.full((tokens, k), -1, dtype=torch.int32, device=DEVICE)
    weights = torch.full((tokens, k), torch.nan, device=DEVICE)
    name = f"route<{experts}, {k}>"
    launch.kernel("prefill_experts.cu", name)(
        -(-tokens // 4),
        128,
        scores=scores,
        gains=gains,
        ids=ids,
        weights=weights,
        tokens=tokens,
        pdl=False,
    )
    best, want = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids.long(), want[:, :k])
    torch.testing.assert_close(weights, best[:, :k].softmax(-1) * gains[want[:, :k]])
    n = tokens * k
    places, visits = (torch.full((n,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    ends = torch.full((experts,), -1, dtype=torch.int32, device=DEVICE)
    launch.kernel("prefill_experts.cu", "order")(
        experts, 1024, ids=ids, places=places, visits=visits, ends=ends, n=n, pdl=False
    )
    order = ids.flatten().long().sort(stable=True).indices
    assert torch.equal(visits.long(), order)
    assert torch.equal(places[order].long(), torch.arange(n, device=DEVICE))
    assert torch.equal(ends.long(), ids.flatten().long().bincount(minlength=experts).cumsum(0))
