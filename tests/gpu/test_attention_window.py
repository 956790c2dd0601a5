"""The fused attention kernel of sliding layers, compared with float64 over the stored rows, with
the kernels that it replaces, and row by row."""

from __future__ import annotations

import copy as copies
from collections.abc import Iterator

import pytest
import torch

from g4spec.core import MAX_STEP_ROWS, Batch, CacheShape
from g4spec.ops.kv import LayerKV, Space
from g4spec.ops.reference import Ops
from g4spec.ops.spans import Span
from g4spec.ops.weights import Attention
from g4spec.ranges import MAX_PARALLEL
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import WINDOW_TOKENS
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV, Kind
from g4spec.runtime.cuda.cache.heads import Heads
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.step import attention_window
from g4spec.runtime.cuda.step.attention_window import ProjectedQkv, takes
from g4spec.runtime.cuda.step.linear import SplitKWorkspace
from g4spec.runtime.cycle_costs import bucket
from tests.gpu import parity
from tests.gpu.batches import one, rows_of, spread
from tests.gpu.device import DEVICE, EMULATED
from tests.gpu.test_attention import cache, copy, expected, fill, unpacked_rows

pytestmark = pytest.mark.gpu
DIM, SCALE = 256, 256**-0.5
LAYERS = [(3, 300, 4), (4 if EMULATED else 16, 1024, 2)]
"""KV heads, window, split-K parts of the projection: chunks of 128 keys, and with 16 KV heads of
256, for which the emulator takes long."""
STARTS = [250, 0, 7, 1020, 4090, 1279]


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    launch.warm([u for u in attention_window.list_units() if launch.arch() in u.archs])


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(5)
    with torch.device(DEVICE):
        yield


def multiprocessors(blocks: int, warps: int) -> int:
    """Return for how many multiprocessors so many blocks have `warps` warps (4: at least three
    blocks of at most four tokens)."""
    return {16: blocks, 8: -(-blocks // 2), 4: 1}[warps]


def skip_without_room(kv: CudaKV) -> None:
    """Skip the test where the kernel needs more shared memory than the GPU has."""
    if launch.arch() not in attention_window._archs(attention_window._chunk(kv)):
        pytest.skip(f"no room on {launch.arch()}")


class Layer:
    """Heads, and a cache with random rows at positions 0 .. start - 1 and nothing after them."""

    def __init__(self, n_kv: int, window: int, slices: int, start: int) -> None:
        q, k = (1 + 0.1 * torch.randn(DIM) for _ in "qk")
        freqs = Ops("cpu").rope_freqs(1e4, DIM).to(DEVICE)
        self.heads = Heads(2 * n_kv, n_kv, q, k, True, False, freqs, 1e-6)
        self.window, self.slices, self.start = window, slices, start
        self.arrived = torch.zeros(4 * n_kv, dtype=torch.int32)
        self.kv = cache(n_kv, DIM, 8192, "q8_0", window)
        fill(self.kv, 0, 0, start)
        skip_without_room(self.kv)

    def copy(self) -> Layer:
        other = copies.copy(self)
        other.kv = cache(self.kv.n_kv, DIM, 8192, "q8_0", self.window)
        for plane, mine in zip(other.kv.planes, self.kv.planes, strict=True):
            plane.copy_(mine)
        return other

    def product(self, count: int) -> torch.Tensor:
        return torch.randn(self.slices, count, 4 * self.kv.n_kv * DIM)

    def span(self, count: int, skip: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(self.start + skip, self.start + skip + count)
        return (at - self.window + 1).clamp(min=0), at

    def attend(
        self,
        y: torch.Tensor,
        skip: int = 0,
        last: torch.Tensor | None = None,
        at_once: int | None = None,
    ) -> torch.Tensor:
        """Return the half-precision output [T, N] of rows y, `skip` positions after the start.
        `last`: last visible position of each row."""
        first, at = self.span(y.shape[1], skip)
        junk = torch.full((1 << 22,), 0xFF, dtype=torch.uint8)
        del junk  # memory that the kernel does not write is NaN
        q, last = ProjectedQkv(self.heads, y), at if last is None else last
        batch = one(self.start + skip, len(at))
        blocks = at_once or torch.cuda.get_device_properties(DEVICE).multi_processor_count
        out = attention_window.attend(q, self.kv, batch, first, last, SCALE, self.arrived, blocks)
        assert not self.arrived.any()
        return unpacked_rows(out)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("count", [13, 1, 8, 3, 16])
@pytest.mark.parametrize(("n_kv", "window", "slices"), LAYERS)
def test_stored_rows_and_attention(
    n_kv: int, window: int, slices: int, start: int, count: int
) -> None:
    layer = Layer(n_kv, window, slices, start)
    assert takes(layer.heads, layer.kv)
    other, y = layer.copy(), layer.product(count)
    first, at = layer.span(count)
    q = other.heads(y, one(start, count), other.kv)
    got = layer.attend(y)
    for mine, theirs in zip(layer.kv.planes, other.kv.planes, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    want = expected(q, layer.kv, first.tolist(), at.tolist(), SCALE)
    assert (got - want).abs().max() < 4e-3  # weights in half precision, values about 1


@pytest.mark.parametrize(("n_kv", "window", "slices"), LAYERS)
@pytest.mark.parametrize("start", [0, 249, 4090])
def test_a_row_is_bit_identical_in_any_batch(
    n_kv: int, window: int, slices: int, start: int
) -> None:
    layer = Layer(n_kv, window, slices, start)
    y = layer.product(16)
    together = layer.copy().attend(y)
    for step in (5,) if EMULATED else (1, 3, 5, 8):
        alone = layer.copy()
        for skip in range(0, 16, step):
            some = alone.attend(y[:, skip : skip + step].contiguous(), skip)
            assert torch.equal(some, together[skip : skip + step]), (step, skip)


@pytest.mark.parametrize("start", [1500, 0, 190, 254, 382, 1020, 4090])
@pytest.mark.parametrize("count", [4, 16, 3, 11, 1])
@pytest.mark.parametrize(("n_kv", "window", "slices"), LAYERS)
def test_bits_do_not_depend_on_the_chunks_of_a_block(
    n_kv: int, window: int, slices: int, start: int, count: int
) -> None:
    """Steps also cross the border of a tile of 64 keys, of a chunk, and of the ring."""
    layer = Layer(n_kv, window, slices, start)
    y, others = layer.product(count), [layer.copy(), layer.copy(), layer.copy()]
    want = layer.attend(y, at_once=1 << 20)  # one
    blocks = n_kv * -(-count // 4)
    sizes = [multiprocessors(blocks, 4), multiprocessors(blocks, 8), 2 * blocks]
    for other, at_once in zip(others, sizes, strict=True):
        assert torch.equal(other.attend(y, at_once=at_once), want)
        for mine, theirs in zip(other.kv.planes, layer.kv.planes, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("start", [120, 700])
@pytest.mark.parametrize(("n_kv", "window", "slices"), LAYERS[:1])
def test_rows_that_see_each_other(n_kv: int, window: int, slices: int, start: int) -> None:
    layer = Layer(n_kv, window, slices, start)
    other, y = layer.copy(), layer.product(14)
    first, at = layer.span(14)
    got = layer.attend(y, last=at[-1].expand(14).contiguous())
    want = expected(
        other.heads(y, one(start, 14), other.kv),
        layer.kv,
        first.tolist(),
        [int(at[-1])] * 14,
        SCALE,
    )
    assert (got - want).abs().max() < 4e-3


@pytest.mark.parametrize("warps", [16, 8, 4])
@pytest.mark.parametrize(("n_kv", "window", "slices"), LAYERS)
def test_a_row_with_nan_does_not_change_others(
    n_kv: int, window: int, slices: int, warps: int
) -> None:
    at_once = multiprocessors(n_kv, warps)
    layer = Layer(n_kv, window, slices, 1500)
    y = layer.product(4)
    good = layer.copy().attend(y, at_once=at_once)
    bad_y = y.clone()
    bad_y[:, 2, 2 * n_kv * DIM :] = torch.nan  # keys and values of the third row
    bad = layer.copy().attend(bad_y, at_once=at_once)
    assert torch.equal(bad[:2], good[:2])
    assert bool(bad[2:].isnan().all())
    gone = one(1500 - window, 1)  # the last position outside the window of the first row
    layer.kv.append(gone.slots, gone.positions, *torch.full((2, 1, n_kv, DIM), torch.nan))
    assert torch.equal(layer.attend(y, at_once=at_once), good)


@pytest.mark.parametrize(
    ("kind", "window", "group", "dim"),
    [("f16", 300, 2, 256), ("q8_0", None, 2, 256), ("q8_0", 300, 4, 256), ("q8_0", 300, 2, 128)],
)
def test_unsupported_layers(kind: Kind, window: int | None, group: int, dim: int) -> None:
    freqs = Ops("cpu").rope_freqs(1e4, dim).to(DEVICE)
    heads = Heads(2 * group, 2, None, None, True, False, freqs, 1e-6)
    assert not takes(heads, cache(2, dim, 4096, kind, window))
    assert not takes(heads, None)


@pytest.mark.parametrize(("n_kv", "window", "slices"), LAYERS)
@pytest.mark.parametrize(
    ("sizes", "warps"),
    [((1, 1, 1), 4), ((1, 1, 1), 8), ((3,), 4), ((3,), 8), ((5,) * 8, 16), ((16, 16), 16)],
)
def test_sequences_in_any_slots(
    n_kv: int, window: int, slices: int, sizes: tuple[int, ...], warps: int
) -> None:
    """Rows, and the cache after them, are bit-identical to those of a single sequence in slot 0.
    One more sequence is in the slot after the others."""
    layer, count, size = Layer(n_kv, window, slices, 0), len(sizes), sizes[0]
    kv = CudaKV(CacheShape(n_kv, DIM, window), spread(count, 8192), 16, "q8_0")
    starts = [0, *torch.randint(1, 3000, (count - 1,), device="cpu").tolist()]
    slots = torch.randperm(count, device="cpu").tolist()
    for slot, start in zip(slots, starts, strict=True):
        fill(kv, slot, 0, start)
    lone = [cache(n_kv, DIM, 8192, "q8_0", window) for _ in sizes]
    for to, slot, start in zip(lone, slots, starts, strict=True):
        copy(kv, slot, to, start)
    parts = [*zip(slots, starts, sizes, strict=True), (count, 1, size)]
    batch = rows_of(parts)
    y = torch.randn(slices, len(batch), 4 * n_kv * DIM)

    def attend(y: torch.Tensor, kv: CudaKV, batch: Batch, at_once: int) -> torch.Tensor:
        last, arrived = batch.positions, torch.zeros(4 * n_kv * 9, dtype=torch.int32)
        first = (last - window + 1).clamp(min=0)
        out = attention_window.attend(
            ProjectedQkv(layer.heads, y), kv, batch, first, last, SCALE, arrived, at_once
        )
        assert not arrived.any()
        return unpacked_rows(out)

    together = attend(y, kv, batch, multiprocessors(n_kv * len(parts), warps))
    for i, (slot, start, _) in enumerate(parts[:-1]):
        rows = slice(i * size, (i + 1) * size)
        alone = attend(y[:, rows].contiguous(), lone[i], one(start, size), 132)
        assert torch.equal(together[rows], alone), (slot, start)
        seen = max(0, start + size - window), start + size - 1
        for mine, its in zip(kv.read(slot, *seen), lone[i].read(0, *seen), strict=True):
            assert torch.equal(mine, its)


def test_counters_for_the_most_sequences() -> None:
    each = attention_window.MAX_KV_HEADS * -(-MAX_STEP_ROWS // WINDOW_TOKENS)
    assert len(SplitKWorkspace(torch.device(DEVICE)).arrived) >= bucket(MAX_PARALLEL) * each


def test_through_the_operations() -> None:
    """From the layer's input to the input of the next matmul, compared with the reference; also one
    row by itself."""
    g = torch.Generator("cpu").manual_seed(3)
    cuda, ref = CudaOps(str(DEVICE)), Ops("cpu")
    n_kv, hidden, shape = 2, 256, CacheShape(2, DIM, 300)
    sizes = (("q4_k", 2 * n_kv), ("q4_k", n_kv), ("q6_k", n_kv))
    with torch.device("cpu"):
        both = [parity.matrix(g, type, n * DIM, hidden) for type, n in sizes]
        freqs, norm = ref.rope_freqs(1e4, DIM), 1 + parity.randn(g, DIM, scale=0.1)
        mine, theirs = (CudaKV(shape, Space.single(512, DEVICE), 16, "q8_0") for _ in range(2))
        skip_without_room(mine)
        reference = LayerKV(shape, Space.single(512), 16)
        ours = Attention(
            *(m for m, _ in both),
            norm.to(DEVICE),
            norm.to(DEVICE),
            True,
            DIM,
            1e-6,
            freqs.to(DEVICE),
        )
        other = Attention(*(x for _, x in both), norm, norm, True, DIM, 1e-6, freqs)
        for start in range(0, 352, 16):
            x, here, batch = parity.randn(g, 16, hidden), one(start, 16, "cpu"), one(start, 16)
            first = (here.positions - 299).clamp(min=0)
            q = ref.qkv(x, other, here, reference)
            want = ref.attend(q, reference, Span(here, first, here.positions), SCALE)
            x, first, last = x.to(DEVICE), first.to(DEVICE), batch.positions
            for plane, its in zip(theirs.planes, mine.planes, strict=True):
                plane.copy_(its)
            q = cuda.qkv(x, ours, batch, mine)
            assert isinstance(q, ProjectedQkv)
            got = parity.numbers(cuda.attend(q, mine, Span(batch, first, last), SCALE))
            assert (got.cpu() - want).abs().max() < 0.02 * want.abs().max()  # of Q8_0
            for i in range(16) if start in (112, 336) else ():
                row, own = slice(i, i + 1), one(start + i, 1)
                q = cuda.qkv(x[row], ours, own, theirs)
                alone = cuda.attend(q, theirs, Span(own, first[row], last[row]), SCALE)
                assert torch.equal(parity.numbers(alone)[0], got[i]), start + i
