"""Prefill against the reference: every layer's residual, and what the caches hold afterwards."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.models.gemma4_config import shared_kv
from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV, Kind
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.prefill.prefill import Prefill, prefill_attention, workspace
from g4spec.runtime.cuda.prefill.prefill_attention import HeadWeights
from g4spec.runtime.cuda.prefill.prefill_model import LongModel
from g4spec.runtime.cuda.weights import packing
from g4spec.runtime.cuda.weights.dequant import Weight, dequantize
from g4spec.runtime.cuda.weights.matrix import beside
from g4spec.runtime.target import Target
from tests.gpu.device import DEVICE, needs_gpu
from tests.gpu.prefill_models import Small, dense, small

pytestmark = pytest.mark.gpu

PACKED = ("q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0")
N_CTX = 320


def tolerance(layer: int) -> float:
    """How far the residual entering a layer may be off, relatively: random layers amplify what
    the first ones round."""
    return 2e-3 * 1.7**layer if layer else 0.0


@pytest.mark.parametrize("columns", [512, 192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("type", PACKED)
def test_dequantized_values(type: str, dtype: torch.dtype, columns: int) -> None:
    if columns % quant.get(type).block:
        pytest.skip("no such matrix")
    rows, matrices, fmt = 200, 2, quant.get(type)
    x = np.random.default_rng(0).standard_normal((matrices, rows, columns), np.float32)
    raw = torch.from_numpy(fmt.quantize(x))
    unit = packing.unit_of(type, columns)
    data = torch.cat([packing.pack(type, m, unit) for m in raw]).to(DEVICE)
    out = torch.full((matrices * rows + 1, columns), torch.nan, dtype=dtype, device=DEVICE)
    dequantize(Weight(type, data, rows, columns, matrices), out[:-1])
    want = torch.from_numpy(fmt.dequantize(raw.numpy())).view(-1, columns)
    error = (out[:-1].cpu().float() - want).abs().max()
    assert error <= torch.finfo(dtype).eps / 2 * want.abs().max()
    assert ((out[:-1].cpu() == want.to(dtype)).float().mean()) > 0.99  # two roundings differ rarely
    assert out[-1].isnan().all()


def check(
    model: Small, chunk: int, count: int, kind: Kind = "f16", *, loose: float = 1.0,
    share: float = 1.0, portable: bool = False,
) -> None:  # fmt: skip
    """Residuals of `count` tokens, read `chunk` at a time, and the caches.

    Args:
        loose: by how much more they may differ. `share`: of rows that must be close.
    """
    n, taps = len(model.config.layers), range(len(model.config.layers) + 1)
    ids = [(7 * i * i + 3 * i) % 150 + 5 for i in range(count)]
    target = model.target(N_CTX, N_CTX)
    target.taps = tuple(taps)
    want = next(iter(target.prefill(ids))).taps.view(count, n + 1, -1)
    prefill = model.prefill(N_CTX, chunk, kind, portable)
    got = torch.full_like(want, torch.nan, device=DEVICE)
    x, told = target.embed(torch.tensor(ids)), None
    if model.config.n_ple:
        told = target.model._per_layer_inputs(torch.tensor(ids), x)
    for at in range(0, count, chunk):
        rows = slice(at, min(at + chunk, count))
        prefill(x[rows].to(DEVICE), at, {i: got[rows, i] for i in taps},
                None if told is None else told[rows].to(DEVICE))  # fmt: skip
    error = (got.cpu() - want).norm(dim=-1) / want.norm(dim=-1)  # [T, n + 1]
    assert torch.equal(got[:, 0].cpu(), want[:, 0])
    worst = error.sort(dim=0).values[int(share * (count - 1))]
    limits = [tolerance(i) * loose for i in taps]
    assert (worst <= torch.tensor(limits)).all(), (worst, limits)
    for layer, (mine, theirs) in enumerate(zip(prefill.caches, target.caches, strict=True)):
        first = 0 if mine.window is None else max(0, count - mine.window)
        for a, b in zip(mine.read(first, count - 1), theirs.read(first, count - 1), strict=True):
            worst = ((a.cpu() - b).norm(dim=-1) / b.norm(dim=-1)).flatten().sort().values
            limit = tolerance(layer) * loose + (1e-3 if kind == "f16" else 1e-2)
            assert worst[int(share * (len(worst) - 1))] < limit, (layer, worst[-5:])


@pytest.mark.parametrize("chunk", [256, 64, 37, 203])
def test_dense(chunk: int) -> None:
    check(small(dense(), {"": "q8_0"}), chunk, 203)


@pytest.mark.parametrize("window", [1, 64, 100])
def test_windows(window: int) -> None:
    check(small(dense(window=window), {"": "q8_0"}), 48, 300)


def test_one_token_a_chunk() -> None:
    check(small(dense(), {"": "q6_k"}), 1, 40)


@pytest.mark.parametrize("type", [*PACKED, "f16"])
def test_types(type: str) -> None:
    check(small(dense(3), {"": type}), 128, 150)


def test_types_mixed_within_a_product() -> None:
    check(small(dense(3), {"": "q4_k", "attn_v": "q6_k", "ffn_up": "q5_k"}), 128, 150)


def test_widths_that_do_not_divide_into_256() -> None:
    check(small(dense(3, n_ff=704), {"": "q8_0", "ffn_down": "q5_0"}, n_embd=192), 128, 150)


def test_bytes_in_the_cache() -> None:
    check(small(dense(3), {"": "q8_0"}), 64, 150, "q8_0", loose=4)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize(("chunk", "window"), [(128, 24), (50, 64), (203, 150), (7, 100)])
def test_published_head_sizes(chunk: int, window: int, group: int, portable: bool) -> None:
    layers = tuple(replace(s, head_dim=512 if s.window is None else 256, n_head=8,
                           n_kv=1 if s.window is None else 8 // group)
                   for s in dense(3, window))  # fmt: skip
    check(small(layers, {"": "q4_k"}), chunk, 203, portable=portable)


@pytest.mark.parametrize("portable", [False, True])
def test_bytes_of_keys_that_are_values(portable: bool) -> None:
    layers = tuple(replace(s, head_dim=512 if s.window is None else 256, n_head=2, n_kv=1)
                   for s in dense(3))  # fmt: skip
    check(small(layers, {"": "q8_0"}), 70, 150, "q8_0", loose=4, portable=portable)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_heads_of_256_without_a_window(kind: Kind) -> None:
    layers = tuple(replace(s, head_dim=256, n_head=8, n_kv=2) for s in dense(3))
    check(small(layers, {"": "q4_k"}), 100, 300, kind, loose=4 if kind == "q8_0" else 1)


def test_per_layer_embeddings_and_shared_caches() -> None:
    layers = dense(6, v_from_k=False, n_ple=64)
    sources = shared_kv([s.window is not None for s in layers], 3)
    layers = tuple(replace(s, kv_from=source, n_ff=512 if source is None else 1024)
                   for s, source in zip(layers, sources, strict=True))  # fmt: skip
    check(small(layers, {"": "q8_0"}), 64, 150)


def test_experts() -> None:
    layers = dense(3, n_expert=16, n_expert_used=4, n_ff_expert=192)
    # A choice between two experts that are nearly equal may fall the other way.
    model = small(layers, {"": "q8_0", "ffn_gate_up_exps": "q4_k", "ffn_down_exps": "q5_0"})
    check(model, 128, 150, loose=3, share=0.9)  # experts compute in bf16


@pytest.mark.parametrize(
    ("dim", "group", "window"), [(256, 2, 1024), (256, 8, None), (512, 8, None)]
)
@pytest.mark.parametrize(
    ("first", "second"), [(100, 30), (2500, 801), (1, 3300), (64, 2048), (1, 130)]
)
def test_long_attention(dim: int, group: int, window: int | None, first: int, second: int) -> None:
    """Up to thousands of keys in two chunks: what sm_90 has against two products."""
    n_ctx, n_kv = 3400, 2
    spec = LayerSpec(0, window, n_kv * group, n_kv, dim, 64, 1e4, v_from_k=dim == 512)
    own = dim != 512
    device, g = torch.device(DEVICE, 0), torch.Generator(DEVICE).manual_seed(0)
    way = prefill_attention.kind(spec, 64, launch.arch())
    ways = [prefill_attention.Scores(spec, n_ctx, n_ctx, device), way(spec, n_ctx, n_ctx, device)]
    turning = 0 if own else 64
    caches = [CudaKV(n_kv, dim, n_ctx, window, 16, DEVICE, turning=turning) for _ in ways]
    norms = HeadWeights(*(0.2 + 0.4 * torch.rand(dim, device=device, generator=g) for _ in "qk"))
    for w in ways:
        w.queries.fill_(torch.nan), w.keys.fill_(torch.nan), w.values.fill_(torch.nan)
    start = 0
    for count in (first, second):
        columns = dim * n_kv * (group + 1 + own)
        qkv = torch.randn(count, columns, device=device, generator=g).half()
        angle = torch.rand(count, 64, device=device, generator=g)
        turns = torch.stack((angle.cos(), angle.sin()), -1)
        out = [torch.full((count, n_kv * group * dim), torch.nan, device=device).half()
               for _ in ways]  # fmt: skip
        for w, cache, o in zip(ways, caches, out, strict=True):
            w.prepare(qkv, norms, turns, start, cache, own, 1e-6)
            w.attend(o, start)
        start += count
        difference = (out[0].float() - out[1].float()).norm(dim=-1) / out[0].float().norm(dim=-1)
        assert difference.max() < 3e-3, difference.max()
    assert torch.equal(caches[0].keys.view(torch.int16), caches[1].keys.view(torch.int16))
    assert torch.equal(caches[0].values.view(torch.int16), caches[1].values.view(torch.int16))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("types", [{"": "q4_k"}, {"": "q8_0", "attn_v": "f16", "ffn_up": "q5_1"}])
def test_model_of_a_file(types: dict[str, str], split: bool) -> None:
    """Weights as `CudaOps` loads them."""
    layers = dense(3, n_expert=16, n_expert_used=16, n_ff_expert=256, split_experts=split)
    model, ids = small(layers, types), [(11 * i) % 150 + 5 for i in range(150)]
    reference = model.target(N_CTX, N_CTX)
    reference.taps = (1, 3)
    want = next(iter(reference.prefill(ids)))
    target = Target(model.config, model.matrices(), CudaOps(DEVICE), N_CTX, 64)
    long = LongModel(target.model, target.caches, 64, N_CTX, beside)
    hidden, tapped = long.forward(torch.tensor(ids, device=DEVICE), 0, (1, 3))
    error = (hidden.cpu() - want.hidden).norm(dim=-1) / want.hidden.norm(dim=-1)
    assert error.max() < 3 * tolerance(3), error.max()
    got = torch.cat([tapped[1], tapped[3]], dim=1).cpu()
    assert (got - want.taps).norm() < 1e-2 * want.taps.norm()


@needs_gpu
def test_workspace_is_known_before() -> None:
    layers = dense(3, n_expert=16, n_expert_used=4, n_ff_expert=192)
    layers = tuple(replace(s, head_dim=512 if s.window is None else 256, n_head=8,
                           n_kv=1 if s.window is None else 4) for s in layers)  # fmt: skip
    model = small(layers, {"": "q8_0"})
    target = model.prefill(N_CTX, 64)
    gc.collect()
    before = torch.cuda.memory_allocated()
    caches, freqs = target.caches, [torch.ones(s.head_dim // 2, device=DEVICE) for s in layers]
    for s, f in zip(layers, freqs, strict=True):
        f[64:] *= s.window is not None
    kept = Prefill(model.config, target.layers, caches, freqs, 4096, 8192)
    took = torch.cuda.memory_allocated() - before
    want, passing = workspace(model.config, 4096, 8192, launch.arch())
    assert want <= took <= want + (8 << 20), (want, took)  # what the allocator rounds up
    x = torch.randn(4096, model.config.n_embd, device=DEVICE)
    kept(x[:100].clone(), 0)  # cuBLAS has its workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept(x, 0)
    peak = torch.cuda.max_memory_allocated() - before
    assert passing / 2 <= peak <= passing + (8 << 20), (passing, peak)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 16, 4), (333, 128, 8), (4096, 128, 8)])
def test_routing(tokens: int, experts: int, k: int) -> None:
    g = torch.Generator(DEVICE).manual_seed(0)
    scores = torch.randn(tokens, experts, device=DEVICE, generator=g)
    scores[:, 3] = scores[:, 5]  # the lower id wins
    gains = torch.rand(experts, device=DEVICE, generator=g) + 0.5
    ids = torch.full((tokens, k), -1, dtype=torch.int32, device=DEVICE)
    weights = torch.full((tokens, k), torch.nan, device=DEVICE)
    name = f"route<{experts}, {k}>"
    launch.kernel("prefill_experts.cu", name)(
        -(-tokens // 4), 128, scores, gains, ids, weights, np.int32(tokens), pdl=False)  # fmt: skip
    best, want = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids.long(), want[:, :k])
    torch.testing.assert_close(weights, best[:, :k].softmax(-1) * gains[want[:, :k]])
    n = tokens * k
    places, visits = (torch.full((n,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    ends = torch.full((experts,), -1, dtype=torch.int32, device=DEVICE)
    launch.kernel("prefill_experts.cu", "order")(
        experts, 1024, ids, places, visits, ends, np.int32(n), pdl=False)  # fmt: skip
    order = ids.flatten().long().sort(stable=True).indices
    assert torch.equal(visits.long(), order)
    assert torch.equal(places[order].long(), torch.arange(n, device=DEVICE))
    assert torch.equal(ends.long(), ids.flatten().long().bincount(minlength=experts).cumsum(0))
