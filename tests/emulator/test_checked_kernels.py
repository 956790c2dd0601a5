"""One or a few launches of the kernels with the most synchronization, in the checked emulator."""

from collections.abc import Iterator

import pytest
import torch

from g4spec.core import CacheShape
from g4spec.models.spec import LayerSpec
from g4spec.ops.kv import Space
from g4spec.ops.reference import Ops
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV, Kind
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.prefill import prefill_attention
from g4spec.runtime.cuda.prefill.prefill_attention import Chunk, HeadWeights
from g4spec.runtime.cuda.step import gemm_tiles, linear, screen
from g4spec.runtime.cuda.step import packed_rows as rows
from g4spec.runtime.cuda.step.choose import Choice, Chosen
from tests.emulator import kernels
from tests.gpu import parity, test_attention, test_attention_window, test_experts
from tests.gpu.device import EMULATED

pytestmark = pytest.mark.skipif(not EMULATED, reason="the emulator replaces a missing GPU")


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    torch.manual_seed(3)
    with kernels.installed("sm_90a", checked=True):
        yield


@pytest.mark.parametrize(
    ("kind", "dim", "n_kv", "rotary_pairs"),
    [("f16", 512, 1, 0), ("q8_0", 256, 2, 0), ("f16", 512, 1, 64), ("q8_0", 512, 1, 64)],
)
def test_attention_of_a_few_rows(kind: Kind, dim: int, n_kv: int, rotary_pairs: int) -> None:
    n = 420
    kv = test_attention.filled(n, n_kv, dim, kind, rotary_pairs=rotary_pairs)
    test_attention.check(torch.randn(1, 8, dim).half(), kv, [0], [n - 1])


def test_attention_of_sequences() -> None:
    """27 rows including a sequence in the spare slot: more than a group of 16."""
    sizes = (9, 9)
    test_attention.test_sequences_in_any_slots_and_pages("f16", "tensor", 128, None, 0, sizes)
    test_attention_window.test_sequences_in_any_slots(2, 300, 2, sizes, warps=16)
    for warps in (4, 8):
        test_attention_window.test_sequences_in_any_slots(2, 300, 2, (3, 3), warps)


WIDE = 6000
"""Window of which a layer with three KV heads has chunks of 256 positions."""


@pytest.mark.parametrize(
    ("n_kv", "window", "start", "count", "at_once"),
    [
        (2, 300, 250, 13, None),
        (2, 300, 400, 3, 1),
        (3, 300, 190, 4, 1),
        (3, 300, 254, 4, 2),
        (3, 300, 382, 4, 1),
        (3, WIDE, 254, 4, 1),
        (3, WIDE, 700, 1, 1),
        (3, WIDE, 600, 2, 2),
    ],
)
def test_attention_of_a_layer_with_a_window(
    n_kv: int, window: int, start: int, count: int, at_once: int | None
) -> None:
    """Chunks of 128 keys and, with a wide window, of 256; with one multiprocessor blocks of 3 heads
    have 4 warps, with two 8."""
    layer = test_attention_window.Layer(n_kv, window, 4, start)
    assert layer.attend(layer.product(count), at_once=at_once).isfinite().all()


def test_experts_of_a_layer() -> None:
    shape = test_experts.ExpertShape(experts=16, k=4, width=768, dense=256, expert=320)
    layer = test_experts.make(shape, ("iq4_xs", "q5_0", "q4_k", "q8_0"))
    test_experts.check(layer, test_experts.randn(16, 768))


def test_a_matmul() -> None:
    pairs = parity.linear(CudaOps("cpu"), Ops(), torch.Generator().manual_seed(0))
    got, want, _ = next(pairs)
    assert got.shape == want.shape


def test_matmuls_that_wrap_their_ring_and_two_in_one_launch() -> None:
    g, by = torch.Generator().manual_seed(0), linear.SplitKWorkspace(torch.device("cpu"))
    sizes = (("q8_0", 256, 1088), ("q4_k", 256, 512), ("q6_k", 128, 512))
    small, first, second = (parity.matrix(g, *of)[0] for of in sizes)
    x = rows.pack_rows(torch.randn(12, 1088, generator=g))
    assert linear.linear(x, small.weight, by).isfinite().all()
    x = rows.pack_rows(torch.randn(3, 512, generator=g))
    assert linear.linear_two(x, first.weight, second.weight, by).isfinite().all()


def test_alternating_warp_groups_with_an_odd_number_of_stages() -> None:
    g, by = torch.Generator().manual_seed(0), linear.SplitKWorkspace(torch.device("cpu"))
    by.count = 1  # a CTA has all units of K
    matrix, _ = parity.matrix(g, "q6_k", 128, 24 * 256)
    how = gemm_tiles.gemm_config("q6_k", 256, 1, 2, launch.arch())
    assert how.stages % 2 and how.rows == 128, how
    x = rows.pack_rows(torch.randn(12, 24 * 256, generator=g))
    first, *more = (linear.linear(x, matrix.weight, by) for _ in range(8))
    assert all(torch.equal(first, y) for y in more)  # in whatever order copies arrive


def test_largest_logits_from_the_upper_bits() -> None:
    g, by = torch.Generator().manual_seed(0), linear.SplitKWorkspace(torch.device("cpu"))
    by.count = 3  # CTAs share groups, and there are more units than stages
    table, values = parity.matrix(g, "q6_k", 300, 9 * 256)
    wanted = torch.randint(300, (9,), generator=g)
    into = Chosen(torch.zeros_like(wanted), torch.zeros(9), torch.zeros(9, dtype=torch.int32))
    screen.best(values[wanted].contiguous(), table.weight, Choice(300, "cpu"), by, 30.0, into)
    assert torch.equal(into.ids, wanted) and not into.bad.any()


@pytest.mark.parametrize(("dim", "group", "window"), [(256, 2, 100), (512, 2, None)])
def test_attention_of_many_rows(
    dim: int, group: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_attention, "PROMPT_BLOCK", 64)
    n_ctx, n_kv, own, device = 256, 2, dim != 512, torch.device("cpu")
    spec = LayerSpec(0, window, n_kv * group, n_kv, dim, 64, 1e4, v_from_k=not own)
    pairs = 0 if own else 64
    way = prefill_attention.kind(dim, pairs, launch.arch())(spec, n_ctx, n_ctx, device)
    cache = CudaKV(CacheShape(n_kv, dim, window, pairs), Space.single(n_ctx), 16)
    norms = HeadWeights(*(0.2 + 0.4 * torch.rand(dim) for _ in "qk"), own, 1e-6)
    start = 0
    for count, real in ((64, 64), (192, 150)):
        angle = torch.rand(count, 64)
        qkv = torch.randn(count, dim * n_kv * (group + 1 + own)).half()
        out = torch.full((count, n_kv * group * dim), torch.nan).half()
        turns = torch.stack((angle.cos(), angle.sin()), -1)
        rows = torch.zeros(count, dtype=torch.int64)
        chunk = Chunk(rows, rows, rows, (count,), 0, start, real)
        way.prepare(qkv, norms, turns, cache, chunk)
        way.attend(out, start)
        start += count
        assert out.isfinite().all()
