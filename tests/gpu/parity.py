"""A parity case for every operation that `CudaOps` overrides: random inputs, compared with the
reference.

A case takes both backends and a generator. It yields pairs (found, wanted) with a tolerance: the
largest error relative to the largest wanted value of a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from g4spec import quant
from g4spec.core import CacheShape, Reach
from g4spec.ops.kv import LayerKV, Space
from g4spec.ops.reference import Ops
from g4spec.ops.sampling import Sampler
from g4spec.ops.spans import Span
from g4spec.ops.weights import Attention, ExpertLayer
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.cache.heads import HEAD_DIMS
from g4spec.runtime.cuda.portable import products
from g4spec.runtime.cuda.step import screen
from g4spec.runtime.cuda.step.choose import Choice
from g4spec.runtime.cuda.step.packed_layout import unpack
from g4spec.runtime.cuda.step.packed_rows import PackedRows
from g4spec.runtime.cuda.step.picks import Picks
from g4spec.runtime.cuda.weights import packing, samples
from g4spec.runtime.cuda.weights.matrix import Matrix
from tests.gpu.batches import rows_of, spread
from tests.gpu.device import DEVICE, EMULATED
from tests.support.quant_blocks import random_blocks

Pair = tuple[Any, torch.Tensor, float]
Case = Callable[[Any, Ops, torch.Generator], Iterator[Pair]]

HALF = 2.0**-9
"""Error of a sum after two roundings to half precision."""

TYPES = ("", *samples.COMPILED, "q3_k") if EMULATED else ("", *packing.PARTS)
LARGE = 8192
"""Number of rows from which a table counts as large."""
COUNTS = (1, 3, 8, 9, 16, 40)


def randn(g: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=g)


def matrix(
    g: torch.Generator, type: str, *shape: int, dtype: torch.dtype = torch.float16
) -> tuple[Matrix, torch.Tensor]:
    """Return a random matrix on the GPU, and its values."""
    values = randn(g, *shape) / shape[-1] ** 0.5
    count, rows = (shape[0], shape[1]) if len(shape) == 3 else (1, shape[0])
    flat = values.view(count * rows, shape[-1])
    if not type:
        stored = flat.to(dtype)
        return Matrix("", stored.to(DEVICE), rows, shape[-1], count), stored.float().view(shape)
    raw = quantized(type, flat.numpy())
    exact = torch.from_numpy(quant.get(type).dequantize(raw)).view(shape)
    return Matrix(type, torch.from_numpy(raw).to(DEVICE), rows, shape[-1], count), exact


def quantized(type: str, values: np.ndarray) -> np.ndarray:
    """Return quantized bytes of values; random bytes of the same size for types that cannot be
    written."""
    if quant.get(type).encode is not None:
        return quant.get(type).quantize(values)
    found = random_blocks(type, math.prod(values.shape[:-1]), values.shape[-1])
    return found.reshape(*values.shape[:-1], -1)


def to_gpu(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.to(DEVICE)


def stored(packed: PackedRows) -> torch.Tensor:
    """Return the half-precision rows [T, K]; check their sums and the zeros after row T."""
    parts = values, sums16, sums32, floats = unpack(packed)
    assert values.shape == (packed.padded, packed.width)
    assert not any(part[packed.count :].any() for part in parts)
    of_halves = 2.0**-21, 2.0**-25  # two roundings; the last bit of a subnormal half
    for columns, sums, (share, least) in (
        (16, sums16, of_halves),
        (32, sums32, of_halves),
        (32, floats / -1024.0, (2.0**-22, 0.0)),
    ):
        groups = values.double().unflatten(1, (-1, columns))
        want, bound = groups.sum(-1), groups.abs().sum(-1) * share + least
        right = (sums.double() - want).abs() <= bound
        assert bool((right | want.isnan() & sums.isnan()).all())
    return values[: packed.count]


def numbers(x: Any) -> torch.Tensor:
    return products.numbers(x)


def embed(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    ids = torch.tensor([0, 7, 127, 128, 299, 64, 64])
    for type in TYPES:
        table, values = matrix(g, type, 300, 256)
        want = ref.embed(values, ids, 16.0)
        yield cuda.embed(table, ids.to(DEVICE), 16.0), want, 1e-6
        cuda.linear(randn(g, 1, 256).to(DEVICE), table)  # packs it
        yield cuda.embed(table, ids.to(DEVICE), 16.0), want, 1e-6


def linear(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    for type in TYPES:
        for k, n in ((256, 200), (512, 1024), (1280, 128)):
            weight, values = matrix(g, type, n, k)
            for count in COUNTS:
                x = randn(g, count, k, scale=float(np.exp(2 * count % 7)))
                yield cuda.linear(x.to(DEVICE), weight), ref.linear(x, values), HALF
    weight, values = matrix(g, "", 96, 192, dtype=torch.bfloat16)
    x = randn(g, 5, 192)
    yield cuda.linear(x.to(DEVICE), weight), ref.linear(x, values), HALF
    yield cuda.linear(x.to(DEVICE), values.to(DEVICE)), ref.linear(x, values), 1e-4


def logits(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    for cap, scale in ((0.0, 1.0), (30.0, 1.0), (30.0, 0.5), (0.0, 2.0)):
        table, values = matrix(g, "q6_k", 1000, 256)
        x = randn(g, 5, 256, scale=20.0)
        want = ref.logits(x, values, cap, scale)
        yield cuda.logits(x.to(DEVICE), table, cap, scale), want, 2 * HALF


def pick(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    """Compare logits of picked tokens, of a large table that is read in part and in other ways."""
    table, values = matrix(g, "q6_k", LARGE, 256)
    x = randn(g, 5, 256) + 64 * values[torch.randint(LARGE, (5,), generator=g)]
    z = ref.logits(x, values, 30.0)
    greedy, hot = Choice(LARGE, DEVICE), Choice(LARGE, DEVICE)
    hot.set(Sampler(temperature=1e-6))
    for choice in (greedy, hot, None):
        ids = torch.zeros(5, dtype=torch.int64, device=DEVICE)
        own = choice and Picks(choice, torch.arange(5, device=DEVICE), ids, ids.int())
        with patch.object(screen, "MIN_COLUMNS", LARGE):
            got = cuda.pick(x.to(DEVICE), table, own or (lambda y, at: y.argmax(1)), 0, 30.0)
        yield z.gather(1, got.cpu()[:, None]), z.amax(1, keepdim=True), 1e-4


def rms_norm(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    for shape in ((3, 256), (1, 5376), (20, 2816), (4, 6, 64), (2, 49)):
        x, w = randn(g, *shape), randn(g, shape[-1])
        yield cuda.rms_norm(x.to(DEVICE), w.to(DEVICE), 1e-6), ref.rms_norm(x, w, 1e-6), 1e-5
        yield cuda.rms_norm(x.to(DEVICE), None, 1e-6), ref.rms_norm(x, None, 1e-6), 1e-5


def norm_rows(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    for count in COUNTS:
        for width in (256, 2816, 5376):
            x, w = randn(g, count, width), randn(g, width)
            yield (
                numbers(cuda.norm_rows(x.to(DEVICE), w.to(DEVICE), 1e-6)),
                ref.norm_rows(x, w, 1e-6),
                HALF,
            )


def norm_residual_norm(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    scale = torch.tensor([0.7])
    for count in COUNTS:
        h, x, w, f = (randn(g, *shape) for shape in ((count, 512), (count, 512), (512,), (512,)))
        for args in ((w, 1e-6, f, scale), (None, 1e-6, f, None), (w, 1e-6, None, scale)):
            there_ = [a if isinstance(a, float) else to_gpu(a) for a in args]
            for exact in (False, True):
                want = ref.norm_residual_norm(h, x, *args)
                got = cuda.norm_residual_norm(h.to(DEVICE), x.to(DEVICE), *there_, unpacked=exact)
                yield got[0], want[0], 1e-5
                if args[2] is not None:
                    yield numbers(got[1]), want[1], 1e-5 if exact else HALF


STEPS = [(0, 16), (16, 16), (32, 16), (48, 9), (57, 1), (58, 8), (66, 16)]
"""First position and row count of a sequence's steps; they cross the end of a ring."""


def caches(shape: CacheShape, slots: int = 1) -> tuple[CudaKV, LayerKV]:
    """Return a cache of the GPU, with shuffled pages, and the reference's."""
    space = Space(slots, 512, slots * 5)
    for slot in range(slots):
        space.assign(slot, range(1 + 5 * slot, 6 + 5 * slot))
    return CudaKV(shape, spread(slots, 512), 16), LayerKV(shape, space, 16)


def qkv(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    """Compare queries, and appended keys and values, across the end of a ring and for several
    sequences at once."""
    for dim, n_kv, pairs, own_v, normed in (
        (256, 1, False, True, True),
        (512, 2, False, False, True),
        (64, 2, True, True, False),
    ):
        both = [
            matrix(g, t, n * dim, 256) for t, n in (("q4_k", 4), ("q4_k", n_kv), ("q6_k", n_kv))
        ]
        norm, freqs = 1 + randn(g, dim, scale=0.1), ref.rope_freqs(1e4, dim)

        def projections(
            i: int,
            place: Callable[[Any], Any],
            both: Any = both,
            dim: int = dim,
            own_v: bool = own_v,
            normed: bool = normed,
            norm: Any = norm,
            freqs: Any = freqs,
            pairs: bool = pairs,
        ) -> Attention:
            n = place(norm) if normed else None
            return Attention(
                both[0][i],
                both[1][i],
                both[2][i] if own_v else None,
                n,
                n,
                normed,
                dim,
                1e-6,
                place(freqs),
                pairs,
            )

        ours, its = projections(0, to_gpu), projections(1, lambda t: t)
        mine, theirs = caches(CacheShape(n_kv, dim, 40 if own_v else None), 3)
        steps = [[(1, *step)] for step in STEPS]
        steps += [[(2, 0, 3), (0, 0, 3), (1, 82, 3)], [(0, 3, 16), (1, 85, 5)]]
        for parts in steps:
            batch, x = rows_of(parts, "cpu"), randn(g, sum(n for *_, n in parts), 256)
            got = cuda.qkv(x.to(DEVICE), ours, rows_of(parts), mine)
            yield got, ref.qkv(x, its, batch, theirs), 2 * HALF
            yield from same_rows(mine, theirs, parts)
        parts = [(1, 90, 20)]
        x = randn(g, 20, 256)
        none = cuda.qkv(x.to(DEVICE), ours, rows_of(parts), mine, queries=False)
        ref.qkv(x, its, rows_of(parts, "cpu"), theirs, queries=False)
        assert none.shape[1] == 0
        yield from same_rows(mine, theirs, parts)


def same_rows(mine: CudaKV, theirs: LayerKV, parts: list[tuple[int, int, int]]) -> Iterator[Pair]:
    """Compare the cached rows (slot, first position, rows)."""
    for slot, start, count in parts:
        seen = slot, start, start + count - 1
        for a, b in zip(mine.read(*seen), theirs.read(*seen), strict=True):
            yield a, b, 2 * HALF


def keys_values(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    """Compare key and value projections: fused, already packed, and of different shapes."""
    for dim, n_kv, way in (
        (128, 2, "together"),
        (256, 1, "together"),
        (64, 2, "packed"),
        (64, 1, "narrow"),
        (128, 1, "unlike"),
    ):
        freqs = ref.rope_freqs(1e4, dim)
        layers: tuple[list[Attention], ...] = ([], [])
        turns = freqs.to(DEVICE), freqs
        for i in range(3):
            types = ("q8_0", "q8_0", "q4_k" if way == "unlike" and i == 1 else "q8_0")
            made = [matrix(g, type, n_kv * dim, 256) for type in types]
            norm = 1 + randn(g, dim, scale=0.1)
            norms = norm.to(DEVICE), norm
            for side in (0, 1):
                layers[side].append(
                    Attention(
                        *(m[side] for m in made),
                        norms[side],
                        norms[side],
                        False,
                        dim,
                        1e-6,
                        turns[side],
                    )  # type: ignore[arg-type]
                )
        shapes = [CacheShape(n_kv, dim, window) for window in (40, None, 40)]
        pairs = [caches(shape, 2) for shape in shapes]
        both = [[pair[side] for pair in pairs] for side in (0, 1)]
        if way == "packed":
            x = randn(g, 1, 256)
            cuda.qkv(x.to(DEVICE), layers[0][1], rows_of([(0, 0, 1)]), both[0][1])
        for parts in ([(1, 0, 9)], [(1, 9, 40)], [(0, 0, 1), (1, 49, 1)], [(1, 50, 16), (0, 1, 3)]):
            x = randn(g, sum(n for *_, n in parts), 256)
            rows = cuda.norm_rows(x.to(DEVICE), torch.ones(256, device=DEVICE), 1e-6)
            cuda.keys_values(rows, layers[0], rows_of(parts), both[0])
            rows = ref.norm_rows(x, torch.ones(256), 1e-6)
            ref.keys_values(rows, layers[1], rows_of(parts, "cpu"), both[1])
            for pair in pairs:
                yield from same_rows(*pair, parts)
        assert (cuda._contexts[layers[0][0].k] is not None) == (way == "together"), way


def attend(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    """Compare attention of one sequence, of several with equal row counts, and with different
    ones."""
    for dim, n_kv, n_head, window in (
        (256, 1, 2, 128),
        (512, 2, 4, None),
        (64, 2, 4, 100),
        (96, 1, 2, None),
    ):
        mine, theirs = caches(CacheShape(n_kv, dim, window), 3)
        for slot, end in ((0, 40), (1, 200), (2, 480)):
            for start in range(0, end, 16):
                rows, part = randn(g, 2, 16, n_kv, dim).half().float(), [(slot, start, 16)]
                for kv, batch in ((mine, rows_of(part)), (theirs, rows_of(part, "cpu"))):
                    kv.append(batch.slots, batch.positions, *rows.to(batch.slots.device))
        for parts in (
            [(1, 192, 1)],
            [(2, 464, 16)],
            [(1, 195, 7), (0, 24, 7), (2, 470, 7)],
            [(0, 3, 2), (2, 470, 9), (1, 192, 16)],
        ):
            here, batch = rows_of(parts, "cpu"), rows_of(parts)
            q = randn(g, len(here), n_head, dim, scale=dim**-0.5).half()
            last = here.positions
            first = last * 0 if window is None else (last - window + 1).clamp(min=0)
            want = ref.attend(q.float(), theirs, Span(here, first, last), 1.0)
            q = (q if dim in HEAD_DIMS else q.float()).to(DEVICE)
            got = cuda.attend(q, mine, Span(batch, first.to(DEVICE), batch.positions), 1.0)
            yield numbers(got), want, 2 * HALF


def gated(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    for activation in ("gelu_tanh", "silu"):
        for types in (("q4_k", "q4_k", "q5_0"), ("q8_0", "q5_k", "q8_0"), ("", "", "")):
            shapes = ((640, 256), (640, 256), (256, 640))
            both = [matrix(g, t, *s) for t, s in zip(types, shapes, strict=True)]
            for count in COUNTS:
                x = randn(g, count, 256)
                want = ref.gated(x, *(v for _, v in both), getattr(ref, activation))
                got = cuda.gated(x.to(DEVICE), *(m for m, _ in both), getattr(cuda, activation))
                yield got, want, 4 * HALF


def modulated(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    gate, down = matrix(g, "q4_k", 256, 512), matrix(g, "q4_k", 512, 256)
    for count in COUNTS:
        x, by = randn(g, count, 512, scale=300.0), randn(g, count, 3, 256)
        want = ref.modulated(x, gate[1], by[:, 1], down[1], ref.gelu_tanh)
        got = cuda.modulated(x.to(DEVICE), gate[0], by.to(DEVICE)[:, 1], down[0], cuda.gelu_tanh)
        yield got, want, 4 * HALF


def per_layer_inputs(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    proj, norm = randn(g, 4 * 64, 256), randn(g, 64)
    for count in COUNTS:
        tokens, x = randn(g, count, 4 * 64), randn(g, count, 256)
        want = ref.per_layer_inputs(tokens, x, proj, norm, 1e-6)
        got = cuda.per_layer_inputs(
            tokens.to(DEVICE), x.to(DEVICE), proj.to(DEVICE), norm.to(DEVICE), 1e-6
        )
        yield got.flatten(1), want.flatten(1), 1e-4


def experts(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    for split in (False, True):
        up = matrix(g, "q4_k", 8, 128, 256) if split else (None, None)
        gate = matrix(g, "q4_k", 8, 128 if split else 256, 256)
        down = matrix(g, "q5_0", 8, 256, 128)
        for count in COUNTS:
            x, weights = randn(g, count, 256), torch.rand(count, 3, generator=g)
            ids = torch.stack([torch.randperm(8, generator=g)[:3] for _ in range(count)])
            want = ref.experts(x, ids, weights, gate[1], up[1], down[1], ref.gelu_tanh)
            there = [t.to(DEVICE) for t in (x, ids, weights)]
            got = cuda.experts(*there, gate[0], up[0], down[0], cuda.gelu_tanh)
            yield got, want, 4 * HALF


def expert_layer(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    """Compare a layer as in the 26B-A4B with fewer and narrower experts, for more rows than a step
    has."""
    h, dense, expert, count_, used = 2816, 192, 64, 128, 8
    both = {
        "gate": matrix(g, "q4_k", dense, h),
        "up": matrix(g, "q4_k", dense, h),
        "down": matrix(g, "q8_0", h, dense),
        "gate_exps": matrix(g, "q4_k", count_, 2 * expert, h),
        "down_exps": matrix(g, "q8_0", count_, h, expert),
    }
    numbers_ = {
        "router": randn(g, count_, h, scale=0.5),
        "gains": torch.rand(count_, generator=g) + 0.5,
        **{
            name: 1 + randn(g, h, scale=0.1)
            for name in (
                "post_attention",
                "ffn_norm",
                "post",
                "post_dense",
                "router_norm",
                "expert_norm",
                "post_experts",
            )
        },
    }
    following, scale = 1 + randn(g, h, scale=0.1), torch.tensor([0.8])
    layers = [
        ExpertLayer(
            n_used=used,
            up_exps=None,
            eps=1e-6,
            **{k: v[i] for k, v in both.items()},
            **{k: v if i else v.to(DEVICE) for k, v in numbers_.items()},
        )
        for i in (0, 1)
    ]
    scale_there = scale.to(DEVICE)
    for count in (1, 2, 7, 8, 9, 16, 33):
        attended, x = randn(g, count, h), randn(g, count, h)
        for last in (None, following):
            want = ref.expert_layer(attended, x, layers[1], last, scale)
            got = cuda.expert_layer(
                attended.to(DEVICE), x.to(DEVICE), layers[0], to_gpu(last), scale_there
            )
            yield got[0], want[0], 4 * HALF
            if last is not None:
                yield numbers(got[1]), want[1], 4 * HALF


def spans(cuda: Any, ref: Ops, g: torch.Generator) -> Iterator[Pair]:
    backs = (None, 0, 7, 1023, 1024)
    for parts in (
        [(0, 0, 1)],
        [(0, 3, 16)],
        [(0, 5000, 130)],
        [(1, 4, 3), (0, 2000, 3)],
        [(1, 4, 3), (0, 2000, 1)],
    ):
        for ways in itertools.product((False, True), repeat=2):
            reaches = [Reach(back, *ways) for back in backs]
            got = cuda.spans(rows_of(parts), reaches)
            want = ref.spans(rows_of(parts, "cpu"), reaches)
            for reach in reaches:
                yield got[reach].first[None], want[reach].first[None], 0.0
                yield got[reach].last[None], want[reach].last[None], 0.0


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        embed,
        linear,
        logits,
        pick,
        rms_norm,
        norm_rows,
        norm_residual_norm,
        qkv,
        keys_values,
        attend,
        gated,
        modulated,
        per_layer_inputs,
        experts,
        expert_layer,
        spans,
    )
}
