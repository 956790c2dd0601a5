"""Attention over the GPU's KV cache, compared with float64 and with the reference backend."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from g4spec.core import Batch, CacheShape
from g4spec.ops.kv import LayerKV, Space
from g4spec.ops.reference import Ops
from g4spec.ops.spans import Span
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.cache.cache_types import KINDS
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV, Kind
from g4spec.runtime.cuda.cache.heads import Heads
from g4spec.runtime.cuda.portable import torch_attention
from g4spec.runtime.cuda.step import attention
from g4spec.runtime.cuda.step.attention import AttentionOutput
from g4spec.runtime.cuda.step.attention_chunks import Chunks
from g4spec.runtime.cuda.step.packed_layout import concat_rows, unpack
from g4spec.runtime.cuda.step.packed_rows import PackedRows
from tests.gpu.batches import one, rows_of, spread
from tests.gpu.device import DEVICE, EMULATED, needs_gpu
from tests.gpu.parity import stored

pytestmark = pytest.mark.gpu
HEADS = [(8, 8), (16, 8), (12, 4), (32, 4), (16, 1), (5, 1)]
"""Query heads and KV heads."""

LAYERS = [
    (256, (32, 16), 1024),
    (512, (32, 4), None),
    (256, (16, 8), 1024),
    (512, (16, 2), None),
    (128, (64, 8), None),
    (128, (32, 8), 300),
    (64, (16, 1), None),
]
ROTARY_PAIRS = 64
"""Rotated pairs that caches of layers with V = K store separately."""
DIMS = [(64, 0), (128, 0), (256, 0), (512, 0), (512, ROTARY_PAIRS)]
"""Head size, and ROTARY_PAIRS for layers with V = K or 0 for others."""


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    launch.warm([u for u in attention.list_units() if launch.arch() in u.archs])


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(7)
    with torch.device(DEVICE):
        yield


def filled(
    n: int,
    n_kv: int,
    dim: int,
    kind: Kind,
    window: int | None = None,
    n_ctx: int = 0,
    rotary_pairs: int = 0,
) -> CudaKV:
    """Return a cache with positions 0 .. n - 1 in slot 0; unwritten rows are NaN."""
    kv = cache(n_kv, dim, n_ctx or n + 64, kind, window, rotary_pairs)
    fill(kv, 0, 0, n)
    return kv


def cache(
    n_kv: int, dim: int, n_ctx: int, kind: Kind, window: int | None = None, rotary_pairs: int = 0
) -> CudaKV:
    """Return an empty cache of one sequence."""
    return CudaKV(
        CacheShape(n_kv, dim, window, rotary_pairs), Space.single(n_ctx, DEVICE), 16, kind
    )


def fill(kv: CudaKV, slot: int, start: int, end: int) -> None:
    """Append positions start .. end - 1 to a slot."""
    if kv.window is not None:
        start = max(start, end - kv.capacity)
    for begin in range(start, end, 64):
        batch = rows_of([(slot, begin, min(64, end - begin))])
        rows = torch.randn(2, len(batch), kv.n_kv, kv.head_dim)
        kv.append(batch.slots, batch.positions, *rows)


def expected(
    q: torch.Tensor, kv: CudaKV, first: list[int], last: list[int], scale: float, slot: int = 0
) -> torch.Tensor:
    """Compute attention of the sequence in `slot` in float64; row i sees positions first[i] to
    last[i]."""
    lo, hi = min(first), max(last)
    keys, values = (x.double().nan_to_num() for x in kv.read(slot, lo, hi))
    at = torch.arange(lo, hi + 1)
    seen = (at >= torch.tensor(first)[:, None]) & (at <= torch.tensor(last)[:, None])
    rows = q.double().view(len(q), kv.n_kv, -1, q.shape[2])  # [T, n_kv, group, D]
    scores = torch.einsum("thgd,nhd->thgn", rows, keys) * scale
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("thgn,nhd->thgd", weights, values).flatten(1)


attend = functools.partial(attention.attend, values=True)


def run(
    q: torch.Tensor,
    kv: CudaKV,
    first: list[int],
    last: list[int],
    scale: float,
    **more: Any,
) -> AttentionOutput:
    """Run the kernel for rows of the sequence in slot 0."""
    return attend(q, kv, one(0, len(q)), torch.tensor(first), torch.tensor(last), scale, **more)


def check(q: torch.Tensor, kv: CudaKV, first: list[int], last: list[int]) -> torch.Tensor:
    scale = q.shape[2] ** -0.5
    got = run(q, kv, first, last, scale)
    want = expected(q, kv, first, last, scale)
    error = (got.values - want).abs().max().item()
    # Attention weights have half precision; values are about 1, in long contexts up to 5.
    assert error < 5e-3, (error, first[:1], last[-1:])
    assert torch.equal(unpacked(got, len(q)), got.values.half())
    return got.values


def unpacked(got: AttentionOutput, tokens: int) -> torch.Tensor:
    """Return the packed output as half-precision values [T, N]; check its sums and padding."""
    assert len(got.rows) == tokens
    return unpacked_rows(got.rows)


def unpacked_rows(rows: PackedRows) -> torch.Tensor:
    """Return packed rows as half-precision values [T, N]; check their sums and padding."""
    return stored(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "rotary_pairs"), DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_causal_rows(kind: Kind, dim: int, rotary_pairs: int, heads: tuple[int, int]) -> None:
    n_head, n_kv = heads
    for n in (1, 2, 16, 17, 63, 64, 65, 70, 128, 129, 300):
        kv = filled(n, n_kv, dim, kind, rotary_pairs=rotary_pairs)
        for tokens in (1, 2, 8, 9, 16) if EMULATED else (1, 2, 3, 5, 8, 9, 16):
            if tokens <= n:
                q = torch.randn(tokens, n_head, dim).half()
                check(q, kv, [0] * tokens, list(range(n - tokens, n)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "rotary_pairs"), [DIMS[0], *DIMS[2:]])
def test_any_ranges(kind: Kind, dim: int, rotary_pairs: int) -> None:
    kv = filled(700, 2, dim, kind, rotary_pairs=rotary_pairs)
    for tokens in (1, 4, 16):
        for _ in range(3 if EMULATED else 6):
            ends = torch.randint(0, 700, (2, tokens)).sort(0).values.tolist()
            check(torch.randn(tokens, 8, dim).half(), kv, *ends)
        check(torch.randn(tokens, 8, dim).half(), kv, [300] * tokens, [315] * tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dim", "n_kv", "window"),
    [(64, 1, 64), (256, 16, 1024), (256, 8, 1024), (512, 2, 200), (128, 2, 100)],
)
def test_ring_buffer_over_three_windows(kind: Kind, dim: int, n_kv: int, window: int) -> None:
    kv = cache(n_kv, dim, 1 << 20, kind, window)
    end, tokens = 0, 16
    while end < 3 * window + 100:
        batch = one(end, tokens)
        kv.append(batch.slots, batch.positions, *torch.randn(2, tokens, n_kv, dim))
        if end % 5 == 0 or end > 2 * window:
            last = list(range(end, end + tokens))
            first = [max(0, p - window + 1) for p in last]
            check(torch.randn(tokens, 2 * n_kv, dim).half(), kv, first, last)
        end += 1 + end % tokens  # the rest is rejected, and overwritten by the next step
        tokens = 1 + end * 7 % 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dim", "n_kv", "rotary_pairs"),
    [(64, 1, 0), (128, 8, 0), (256, 4, 0), (512, 4, 0), (512, 2, 0), (512, 2, ROTARY_PAIRS)],
)
def test_long_contexts(kind: Kind, dim: int, n_kv: int, rotary_pairs: int) -> None:
    n = 20_000 if dim > 64 else 70_000
    kv = cache(n_kv, dim, n, kind, rotary_pairs=rotary_pairs)
    for start in range(0, n, 4000):
        batch = one(start, min(4000, n - start))
        kv.append(batch.slots, batch.positions, *torch.randn(2, len(batch), n_kv, dim))
    steps = ((5, 6000), (3, 4097), (16, 8200), (8, 16384), (1, n), (16, n))
    for tokens, end in steps[: 1 if EMULATED else None]:
        check(
            4 * torch.randn(tokens, 8 * n_kv, dim).half(),
            kv,
            [0] * tokens,
            list(range(end - tokens, end)),
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dim", "heads", "window", "rotary_pairs"),
    [(*layer, 0) for layer in LAYERS[:3]]
    + [(512, heads, None, ROTARY_PAIRS) for heads in ((32, 4), (16, 2))]
    + [(*layer, 0) for layer in LAYERS[3:]],
)
def test_a_row_is_bit_identical_in_any_batch(
    kind: Kind, dim: int, heads: tuple[int, int], window: int | None, rotary_pairs: int
) -> None:
    n_head, n_kv = (n // 4 for n in heads) if EMULATED and heads[1] % 4 == 0 else heads
    n = 5000
    kv = filled(n, n_kv, dim, kind, window, rotary_pairs=rotary_pairs)
    q = torch.randn(16, n_head, dim).half()
    last = list(range(n - 16, n))
    first = [max(0, p - (window or n) + 1) for p in last]
    together = run(q, kv, first, last, 1.0)
    halves = unpacked(together, 16)
    cuts = [(2, 12), (7, 9), (0, 8), (9, 5), (0, 3), (3, 2), *((i, 1) for i in range(16))]
    for begin, count in cuts[:: 5 if EMULATED else 1]:
        rows = slice(begin, begin + count)
        some = run(q[rows], kv, first[rows], last[rows], 1.0)
        assert torch.equal(some.values, together.values[rows]), (begin, count)
        assert torch.equal(unpacked(some, count), halves[rows])
    order = torch.randperm(16).tolist()
    mixed = run(q[order], kv, [first[i] for i in order], [last[i] for i in order], 1.0)
    assert torch.equal(mixed.values, together.values[order])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "rotary_pairs"), DIMS[1:])
def test_a_row_with_nan_does_not_change_others(kind: Kind, dim: int, rotary_pairs: int) -> None:
    kv = filled(200, 2, dim, kind, rotary_pairs=rotary_pairs)
    q = torch.randn(4, 4, dim).half()
    first, last = [0] * 4, [196, 197, 198, 199]
    good = run(q, kv, first, last, 1.0).values
    broken = one(198, 1)
    kv.append(broken.slots, broken.positions, *torch.full((2, 1, 2, dim), torch.nan))
    bad = run(q, kv, first, last, 1.0).values
    assert torch.equal(bad[:2], good[:2])
    assert bool(bad[2:].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [100, None])
def test_a_row_with_nan_in_torch(kind: Kind, window: int | None) -> None:
    """The same for heads without a kernel. Places that were never written are NaN as well."""
    kv, q, batch = filled(200, 2, 96, kind, window), torch.randn(4, 4, 96), one(196, 4)
    last = batch.positions
    first = (last - (window or 200) + 1).clamp(min=0)
    good = torch_attention.attend(q, kv, batch, first, last, 1.0)
    assert bool(good.isfinite().all())
    broken = one(198, 1)
    kv.append(broken.slots, broken.positions, *torch.full((2, 1, 2, 96), torch.nan))
    bad = torch_attention.attend(q, kv, batch, first, last, 1.0)
    assert torch.equal(bad[:2], good[:2])
    assert bool(bad[2:].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_reference_backend(kind: Kind) -> None:
    kv = filled(150, 4, 256, kind, window=100)
    keys, values = kv.read(0, 40, 149)
    reference = LayerKV(CacheShape(4, 256, None), Space.single(200, DEVICE), 16)
    reference.append(*[getattr(one(40, 110), x) for x in ("slots", "positions")], keys, values)
    q, batch = torch.randn(6, 8, 256).half(), one(144, 6)
    last = batch.positions
    got = attend(q, kv, batch, last - 99, last, 0.1).values
    want = Ops(DEVICE).attend(q.float(), reference, Span(batch, last - 99, last), 0.1)
    assert torch.allclose(got, want, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", [False, True])
def test_shared_keys_and_values_against_the_reference_backend(kind: Kind, plain: bool) -> None:
    """Compares projections, stored rows and attention of each backend, in a layer that appends and
    in one that only reads; and the same in torch."""
    n, n_kv, n_q, dim, ref = 150, 2, 4, 512, Ops("cpu")
    divisors = torch.tensor([1.0] * ROTARY_PAIRS + [1e30] * (dim // 2 - ROTARY_PAIRS), device="cpu")
    freqs = ref.rope_freqs(1e4, dim, divisors)
    q_norm, k_norm = (dim**-0.25 * (0.5 + torch.rand(dim, device="cpu")) for _ in "qk")
    kv = cache(n_kv, dim, n, kind, rotary_pairs=ROTARY_PAIRS)
    reference, here = LayerKV(CacheShape(n_kv, dim, None), Space.single(n), n), one(0, n, "cpu")
    y, at = torch.randn(n, n_q + n_kv, dim, device="cpu"), torch.arange(n, device="cpu")
    wide, angles = ref.rms_norm(y[:, n_q:], None, 1e-6), ref.angles(at, freqs)
    reference.append(here.slots, at, ref.rope(wide * k_norm, angles), wide)
    q = ref.rope(ref.rms_norm(y[:, :n_q], q_norm, 1e-6), angles)
    there = [x.to(DEVICE) for x in (q_norm, k_norm, freqs)]
    owner = Heads(n_q, n_kv, there[0], there[1], True, True, there[2], 1e-6)
    reader = Heads(n_q, 0, there[0], None, True, False, there[2], 1e-6)
    queries = owner(y.flatten(1).to(DEVICE), one(0, n), kv)
    only = reader(y[:, :n_q].flatten(1).contiguous().to(DEVICE), one(0, n), kv)
    assert torch.equal(queries, only)
    tolerance = 2e-3 if kind == "f16" else 2e-2
    for a, b in zip(kv.read(0, 0, n - 1), reference.read(0, 0, n - 1), strict=True):
        assert (a.cpu() - b).abs().max() < tolerance
    rows = slice(n - 16, n)
    span = Span(one(n - 16, 16, "cpu"), at[rows] * 0, at[rows])
    want = ref.attend(q[rows], reference, span, 1.0)
    last, batch = at[rows].to(DEVICE), one(n - 16, 16)
    got = attend(queries[rows], kv, batch, last * 0, last, 1.0, plain=plain).values
    assert (got.cpu() - want).abs().max() < 2 * tolerance
    torch_ = torch_attention.attend(queries[rows], kv, batch, last * 0, last, 1.0)
    assert (torch_.cpu() - want).abs().max() < 2 * tolerance


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 128])
def test_one_graph_serves_every_position(kind: Kind, window: int | None) -> None:
    n_kv, dim, tokens = 2, 256, 5
    kv = filled(64, n_kv, dim, kind, window, 2000)
    batch = one(0, tokens)
    positions = batch.positions
    k, v = torch.zeros(2, tokens, n_kv, dim)
    q = torch.zeros(tokens, 4, dim).half()

    def step() -> AttentionOutput:
        kv.append(batch.slots, positions, k, v)
        first = (
            torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
        )
        return attend(q, kv, batch, first, positions, 1.0)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    start = 0
    while start < 1500:
        positions.copy_(torch.arange(start, start + tokens))
        k.normal_()
        v.normal_()
        q.normal_()
        graph.replay()
        last = list(range(start, start + tokens))
        first = [max(0, p - (window or 10_000) + 1) for p in last]
        assert (out.values - expected(q, kv, first, last, 1.0)).abs().max() < 2e-2  # peaked weights
        eager = run(q, kv, first, last, 1.0)
        assert torch.equal(eager.values, out.values)
        assert torch.equal(unpacked(eager, tokens), unpacked(out, tokens))
        start += 1 + start % 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "rotary_pairs"), DIMS)
def test_without_tensor_cores(kind: Kind, dim: int, rotary_pairs: int) -> None:
    window = 200 if dim == 256 else None
    kv = filled(500, 2, dim, kind, window, rotary_pairs=rotary_pairs)
    q = torch.randn(16, 6, dim).half()
    last = list(range(484, 500))
    first = [max(0, p - (window or 500) + 1) for p in last]
    plain = run(q, kv, first, last, 0.1, plain=True).values
    assert (plain - expected(q, kv, first, last, 0.1)).abs().max() < 1e-4
    for rows in (slice(0, 1), slice(3, 8), slice(15, 16)):
        some = run(q[rows], kv, first[rows], last[rows], 0.1, plain=True).values
        assert torch.equal(some, plain[rows])


SIZES = [(1, 1), (3,) * 8, (16, 16), (5, 5, 5)]
"""Row counts of the sequences of a batch."""
KERNELS = [
    ("tensor", 256, None, 0),
    ("tensor", 512, None, ROTARY_PAIRS),
    ("tensor", 128, 100, 0),
    ("plain", 64, None, 0),
    ("plain", 512, None, ROTARY_PAIRS),
    ("plain", 256, 200, 0),
    ("torch", 96, None, 0),
    ("torch", 96, 100, 0),
]
"""Kernel, head_dim, window, rotary_pairs."""


def causal_attention(
    kernel: str, q: torch.Tensor, kv: CudaKV, batch: Batch, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of causal rows. Return the float32 output and the half-precision output
    that the kernel packs for the next matmul; the torch kernel has only one output."""
    last = batch.positions
    first = (last - (window or 1 << 20) + 1).clamp(min=0)
    if kernel == "torch":
        got = torch_attention.attend(q.float(), kv, batch, first, last, 0.1)
        return got, got
    found = attend(q, kv, batch, first, last, 0.1, plain=kernel == "plain")
    return found.values, unpacked(found, len(q))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kernel", "dim", "window", "rotary_pairs"), KERNELS)
@pytest.mark.parametrize("sizes", SIZES)
def test_sequences_in_any_slots_and_pages(
    kind: Kind, kernel: str, dim: int, window: int | None, rotary_pairs: int, sizes: tuple[int, ...]
) -> None:
    shape = CacheShape(2, dim, window, rotary_pairs)
    check_sequences(shape, kind, sizes, 700, functools.partial(causal_attention, kernel))


@pytest.mark.parametrize("sizes", [(1,) * 20, (16, 16, 16)])
@pytest.mark.parametrize("n_ctx", [700, pytest.param(20000, marks=needs_gpu)])
def test_blocks_with_several_heads(
    n_ctx: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few blocks, each takes as many heads as its list has room for: 3 with 20,000 tokens."""

    def by_few_blocks(
        q: torch.Tensor, kv: CudaKV, batch: Batch, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with monkeypatch.context() as patch:
            if len(batch.sizes) > 1:
                patch.setattr(launch, "processors", lambda device: 1)
            return causal_attention("tensor", q, kv, batch, window)

    check_sequences(CacheShape(4, 64, None, 0), "q8_0", sizes, n_ctx, by_few_blocks)


@pytest.mark.parametrize("window", [None, 1076])
def test_blocks_whose_lists_have_no_room_for_all_heads(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 (head, rows) pairs of 18 chunks. With a window 14 of 19: all rows of a draft's block see
    the window before its first row, one position more than other rows see."""
    if window is None:
        rows, n_ctx, starts = 16, 1120, [1070 + i for i in range(6)]
    else:
        rows, n_ctx, starts = 14, 1 << 15, [window + 63 + 64 * i for i in range(6)]
    kv = CudaKV(CacheShape(2, 64, window), spread(len(starts), n_ctx), 16, "q8_0")
    assert window is None or window + rows <= kv.positions
    for slot, start in enumerate(starts):
        fill(kv, slot, 0, start + rows)
    batch = rows_of([(slot, start, rows) for slot, start in enumerate(starts)])
    first, last = batch.positions * 0, batch.positions
    if window is not None:
        anchors = torch.tensor(starts).repeat_interleave(rows)
        first, last = anchors - window, anchors + rows - 1
    q = torch.randn(len(last), 32, 64).half()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "processors", lambda device: 1)
        got = attend(q, kv, batch, first, last, 0.1).values
    for slot in (0, 5):
        at, lone = slice(slot * rows, (slot + 1) * rows), cache(2, 64, n_ctx, "q8_0", window)
        copy(kv, slot, lone, starts[slot] + rows)
        alone = attend(q[at].contiguous(), lone, one(starts[slot], rows), first[at], last[at], 0.1)
        assert torch.equal(got[at], alone.values), slot


def test_the_only_chunk_of_a_row_adds_to_zero() -> None:
    """Compare with several chunks, where the sum of a negative zero and zeros is zero."""
    chunks, at = Chunks(7, True), torch.arange(5)
    sums = torch.full((5, 1, 1, 1, 64), -0.0)
    tops = torch.tensor([3.0, 1.0]).expand(5, 1, 1, 1, 2).contiguous()
    five = attention._combine(sums, tops, at, at, 1, chunks, values=True).values
    assert not five.view(torch.int32).any()


@pytest.mark.parametrize("dim", [128, 256, 512])
def test_blocks_that_a_warp_combines_do_not_change_the_result(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of three sequences see one chunk, several, and other first chunks."""
    chunks, tokens, n_kv, group, room = Chunks(7, False), 3, 2, 3, 11
    first = torch.tensor([0, 0, 0, 500, 520, 700, 10, 300, 600])
    last = torch.tensor([126, 127, 128, 501, 1600, 1700, 1000, 1001, 1002])
    sums = torch.randn(3, room, n_kv, tokens * group, dim)
    tops = torch.rand(3, room, n_kv, tokens * group, 2) + 0.5
    found = []
    for processors in (1 << 20, 1):
        monkeypatch.setattr(launch, "processors", lambda device, n=processors: n)
        found.append(attention._combine(sums, tops, first, last, tokens, chunks, values=True))
    assert attention._combined_blocks(dim, 1 << 9, sums.device) == min(4, dim // 64)
    one, several = found
    assert torch.equal(one.values, several.values) and one.values.isfinite().all()
    assert torch.equal(one.rows.data, several.rows.data)
    assert torch.equal(unpacked(several, 9), several.values.half())


def check_sequences(
    shape: CacheShape,
    kind: Kind,
    sizes: tuple[int, ...],
    n_ctx: int,
    attention_of: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Check that rows are bit-identical to those of a single sequence in slot 0 with pages in
    order. One sequence is in a slot without pages, as in padded batches of a recorded graph."""
    n_kv, dim, window, rotary_pairs, count = (
        shape.n_kv,
        shape.head_dim,
        shape.window,
        shape.rotary_pairs,
        len(sizes),
    )
    space = spread(count, n_ctx)
    kv = CudaKV(shape, space, 16, kind)
    starts = torch.randint(0, n_ctx - 20, (count,), device="cpu").tolist()
    starts[0], slots = 127, torch.randperm(count, device="cpu").tolist()
    for slot, start, size in zip(slots, starts, sizes, strict=True):
        fill(kv, slot, 0, start + size)
    parts = [*zip(slots, starts, sizes, strict=True), (count, 1, sizes[0])]
    q = torch.randn(sum(size for _, _, size in parts), 2 * n_kv, dim).half()
    values, halves = attention_of(q, kv, rows_of(parts), window)
    begin = 0
    for slot, start, size in parts[:-1]:
        rows, lone = slice(begin, begin + size), cache(n_kv, dim, n_ctx, kind, window, rotary_pairs)
        copy(kv, slot, lone, start + size)
        alone = attention_of(q[rows].contiguous(), lone, one(start, size), window)
        assert torch.equal(values[rows], alone[0]), (slot, start)
        assert torch.equal(halves[rows], alone[1])
        begin += size


def copy(kv: CudaKV, slot: int, to: CudaKV, end: int) -> None:
    """Copy the positions before `end` of a slot to slot 0 of another cache."""
    at = torch.arange(max(0, end - kv.positions), end)
    units, rows = kv.row_indices(torch.full_like(at, slot), at)
    to_units, to_rows = to.row_indices(torch.zeros_like(at), at)
    for source, copied in zip(kv.planes, to.planes, strict=True):
        if source.numel():
            copied[to_units, :, to_rows] = source[units, :, rows]


@pytest.mark.parametrize("sizes", [(3, 7, 1), (16, 5), (9, 16, 1, 16)])
def test_rows_are_bit_identical_in_other_groups(sizes: tuple[int, ...]) -> None:
    """Groups of 16 rows assembled from other batches equal those that a kernel writes at once."""
    n, width = sum(sizes), 4 * 64
    kv = filled(200, 2, 64, "f16")
    q = torch.randn(n, 4, 64).half()
    batch = rows_of([(0, 150, 1)] * n)
    last = batch.positions
    found = attention.attend(q, kv, batch, last * 0, last, 0.1)
    assert found.values is None
    whole = found.rows
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [
        attend(
            q[end - size : end],
            kv,
            rows_of([(0, 150, 1)] * size),
            last[:size] * 0,
            last[:size],
            0.1,
        ).rows
        for end, size in zip(ends, sizes, strict=True)
    ]
    again = concat_rows(parts)
    assert (len(whole), len(again)) == (n, n) and (whole.width, again.width) == (width, width)
    assert all(torch.equal(x, y) for x, y in zip(unpack(whole), unpack(again), strict=True))
