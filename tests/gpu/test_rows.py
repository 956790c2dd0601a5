"""The kernels between matmuls compared with the reference; rows do not depend on the batch."""

from __future__ import annotations

import pytest
import torch

from g4spec.core import PAGE, Batch, CacheShape
from g4spec.ops.kv import Space
from g4spec.ops.reference import Ops
from g4spec.runtime.cuda.cache.cache_types import KINDS
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV, Kind
from g4spec.runtime.cuda.cache.heads import Heads
from g4spec.runtime.cuda.step import packed_layout
from g4spec.runtime.cuda.step import packed_rows as rows
from tests.gpu.batches import rows_of, spread
from tests.gpu.device import DEVICE
from tests.gpu.parity import stored

pytestmark = pytest.mark.gpu

EPS = 1e-6
REF = Ops("cpu")
HALF = 2.0**-11  # relative error of a number in half precision


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE) * scale


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


@pytest.fixture(autouse=True)
def _poison() -> None:
    """Fill free memory with NaN, so that torch.empty returns NaN."""
    junk = [torch.full((n,), 0xFF, dtype=torch.uint8, device=DEVICE) for n in (1 << 16, 1 << 22)]
    del junk


def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Compute the norm in float64 on the CPU."""
    return REF.rms_norm(x.double().cpu(), None if weight is None else weight.double().cpu(), EPS)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Return the largest error relative to the largest value of the row."""
    got, want = got.double().cpu(), want.double().cpu()
    assert got.shape == want.shape
    error = (got - want).abs().amax(-1) / want.abs().amax(-1).clamp(min=1e-30)
    assert float(error.max()) <= tolerance, float(error.max())


def check_rows(packed: rows.PackedRows, want: torch.Tensor, tolerance: float = HALF) -> None:
    """Compare values, sums and padding of rows with float64 values [T, K]."""
    n, values = packed.count, stored(packed)
    scale = 1.0 if packed.scale is None else packed.scale[:n, None].double()
    close(values[:n].double() * scale, want, tolerance)


def same_rows(a: rows.PackedRows, first: int, b: rows.PackedRows) -> bool:
    """Return True if rows first ... of `a` are bit-identical to all rows of `b`."""
    pairs = zip(packed_layout.unpack(a), packed_layout.unpack(b), strict=True)
    return all(torch.equal(x[first : first + b.count], y[: b.count]) for x, y in pairs)


@pytest.mark.parametrize("width", [64, 5376, 26880])
@pytest.mark.parametrize("count", [1, 8, 9, 16])
def test_pack(width: int, count: int) -> None:
    x = randn(count, width, scale=300.0)
    x[0] *= 1e6
    if count > 3:
        x[1], x[2] = 0.0, x[2] * 1e-12
        x[3] *= 2.0**-140
    packed = rows.pack_rows(x)
    assert packed.scale is not None
    check_rows(packed, x)
    most = packed_layout.unpack(packed)[0][:count].abs().amax(1).float()
    normal = x.abs().amax(1) > 1e-20
    assert bool(((most >= 512) & (most <= 1024))[normal].all())
    assert packed.scale[:count].log2().frac().abs().max() == 0


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_pack_keeps_non_finite_values(bad: float) -> None:
    x = randn(2, 128)
    x[1, 77] = bad
    values = packed_layout.unpack(rows.pack_rows(x))[0]
    assert bool(torch.isfinite(values[0]).all()) and not bool(torch.isfinite(values[1, 77]))


@pytest.mark.parametrize("width", [64, 192, 2816, 5376])
@pytest.mark.parametrize("count", [1, 7, 16])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(width: int, count: int, weighted: bool) -> None:
    x, weight = randn(count, width, scale=40.0), randn(width) if weighted else None
    want = norm(x, weight)
    close(rows.rms_norm(x, weight, EPS), want, 1e-6)
    check_rows(rows.rms_norm_rows(x, weight, EPS), want)


def test_rms_norm_of_heads_and_many_rows() -> None:
    x, weight = randn(300, 3, 20), randn(20)
    close(rows.rms_norm(x, weight, EPS), norm(x, weight), 1e-6)


def test_residual_of_many_rows() -> None:
    h, x, weight, following = randn(300, 5376), randn(300, 5376), randn(5376), randn(5376)
    step = rows.Residual(weight, EPS)
    want = residual(h, x, weight, None)
    out, y = step.numbers(h, x, following)
    close(out, want, 3e-7)
    close(y, norm(want, following), 2e-6)
    close(step(h, x), want, 3e-7)


def residual(
    h: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    """Compute the reference in float64."""
    h, x = h.double().cpu(), x.double().cpu()
    y = x + (h if weight is None else norm(h, weight))
    return y if scale is None else y * scale.double().cpu()


@pytest.mark.parametrize("width", [192, 2816, 5376])
@pytest.mark.parametrize("count", [1, 3, 8, 9, 16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_residual(width: int, count: int, weighted: bool, scaled: bool) -> None:
    h, x = randn(count, width, scale=30.0), randn(count, width, scale=100.0)
    weight, following = randn(width) if weighted else None, [randn(width) for _ in range(3)]
    scale = torch.tensor([0.73], device=DEVICE) if scaled else None
    step = rows.Residual(weight, EPS, scale)
    want = residual(h, x, weight, scale)
    close(step(h, x), want, 3e-7)
    for n in (1, 3):
        out, packed = step.rows(h, x, following[:n])
        close(out, want, 3e-7)
        for p, w in zip(packed, following, strict=False):
            check_rows(p, norm(want, w))
    out, y = step.numbers(h, x, following[0])
    close(out, want, 3e-7)
    close(y, norm(want, following[0]), 2e-6)


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_residual_of_partial_sums(slices: int) -> None:
    h, x, weight = randn(slices, 6, 1536), randn(6, 1536), randn(1536)
    want = residual(h.sum(0), x, weight, None)
    out, (packed,) = rows.Residual(weight, EPS).rows(h, x, [None])
    close(out, want, 1e-6)
    check_rows(packed, norm(want, None), HALF * 1.01)


@pytest.mark.parametrize("count", [5, 20])
def test_rows_in_parts_have_the_bits_of_whole_ones(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare both forms of a width that does not fill the block, with padding rows."""
    h, x, weight, next_weight = randn(count, 4672), randn(count, 4672), randn(4672), randn(4672)
    found = []
    for split in (False, True):
        monkeypatch.setattr(rows, "splits", lambda *_, split=split: split)
        out, (packed,) = rows.Residual(weight, EPS).rows(h, x, [next_weight])
        found.append((out, *packed_layout.unpack(packed)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("width", [1536, 5376])
def test_a_row_does_not_depend_on_the_batch(width: int) -> None:
    h, x, weight, next_weight = randn(16, width), randn(16, width), randn(width), randn(width)
    step = rows.Residual(weight, EPS)
    out, (packed,) = step.rows(h, x, [next_weight])
    for count in range(1, 17):
        for first in {0, 16 - count}:
            part = slice(first, first + count)
            small, (small_packed,) = step.rows(h[part].clone(), x[part].clone(), [next_weight])
            assert torch.equal(out[part], small)
            assert same_rows(packed, first, small_packed)


WHERE = [(2, 0), (0, 5), (1, 127), (1, 129), (0, 100_000), (2, 262_142), (1, 7), (3, 1), (3, -1)]
"""Slot and position of rows. Slot 3 has no page."""
KEPT = 7
"""Number of rows that have a page; they come first."""


def batch_of(where: list[tuple[int, int]]) -> Batch:
    return rows_of([(slot, position, 1) for slot, position in where])


def heads_cache(shape: CacheShape, kind: Kind) -> CudaKV:
    """Return a cache for long texts, with pages at the positions of `WHERE`."""
    space = Space(4, 1 << 18, KEPT, DEVICE)
    for i, (slot, position) in enumerate(WHERE[:KEPT]):
        space.assign(slot, [KEPT - i], position // PAGE)
    return CudaKV(shape, space, 64, kind)


def written(kv: CudaKV, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where rows with their own page or ring are stored, and a mask of the rows never
    written."""
    units, at = kv.row_indices(batch.slots, batch.positions)
    rest = torch.ones(kv.keys.shape[0], kv.capacity, dtype=torch.bool, device=DEVICE)
    rest[units, at] = False
    return units[:KEPT], at[:KEPT], rest


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["target", "v_from_k", "draft", "plain", "q", "kv"])
def test_heads(dim: int, pairs: bool, kind: Kind, form: str, window: int | None) -> None:
    n_q, n_kv = {"q": (6, 0), "kv": (0, 3)}.get(form, (6, 3))
    v_from_k, v_norm, normed = form == "v_from_k", form in ("target", "v_from_k"), form != "plain"
    batch = batch_of(WHERE)
    count = len(batch)
    y = randn(count, (n_q + n_kv * (1 if v_from_k else 2)) * dim, scale=3.0)
    q_norm, k_norm = (randn(dim), randn(dim)) if normed else (None, None)
    freqs = REF.rope_freqs(1e4, dim).to(DEVICE)
    heads = Heads(n_q, n_kv, q_norm, k_norm, v_norm, v_from_k, freqs, EPS, pairs)
    kv = heads_cache(CacheShape(n_kv, dim, window), kind) if n_kv else None
    q = heads(y, batch, kv)

    rotate = REF.rope_interleaved if pairs else REF.rope

    def turned(part: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        part = part if weight is None else REF.rms_norm(part, weight.cpu(), EPS)
        return rotate(part, REF.angles(batch.positions.cpu(), freqs.cpu()))

    wide = y.cpu().view(count, -1, dim)
    if n_q:
        close(q, turned(wide[:, :n_q], q_norm), 6e-4)
    if kv is None:
        return
    k = wide[:, n_q : n_q + n_kv]
    v = k if v_from_k else wide[:, n_q + n_kv :]
    want = heads_cache(CacheShape(n_kv, dim, window), kind)
    v = REF.rms_norm(v, None, EPS) if v_norm else v
    want.append(batch.slots, batch.positions, turned(k, k_norm).to(DEVICE), v.to(DEVICE))
    units, at, rest = written(kv, batch)
    for ours, theirs in zip(kv.planes, want.planes, strict=True):
        if not ours.numel():
            continue
        mine, its = ours[units, :, at], theirs[units, :, at]
        if ours.dtype is torch.uint8:  # a few codes may differ by one rounding
            off = (mine.int() - its.int()).abs()
            assert int(off.max()) <= 1 and float((off > 0).float().mean()) < 5e-3
        else:
            close(mine, its, 6e-4)
        left, before = ours.transpose(1, 2)[rest], theirs.transpose(1, 2)[rest]
        assert torch.equal(left.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_with_shared_keys_and_values(kind: Kind) -> None:
    """Only rotated columns are stored; in the others, queries are multiplied by the norm's weight
    instead."""
    n_q, n_kv, dim, rotary_pairs = 3, 2, 512, 64
    batch = batch_of(WHERE)
    count = len(batch)
    y, q_norm, k_norm = randn(count, (n_q + n_kv) * dim, scale=3.0), randn(dim), randn(dim)
    divisors = torch.tensor([1.0] * rotary_pairs + [1e30] * (dim // 2 - rotary_pairs))
    freqs = REF.rope_freqs(1e4, dim, divisors)
    heads = Heads(n_q, n_kv, q_norm, k_norm, True, True, freqs.to(DEVICE), EPS)
    kv, want = (heads_cache(CacheShape(n_kv, dim, None, rotary_pairs), kind) for _ in range(2))
    q, wide = heads(y, batch, kv), y.cpu().view(count, -1, dim)

    def turned(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        angles = REF.angles(batch.positions.cpu(), freqs)
        return REF.rope(REF.rms_norm(part, weight.cpu(), EPS), angles)

    taken = k_norm.cpu().clone().view(2, -1)
    taken[:, :rotary_pairs] = 1
    close(q, turned(wide[:, :n_q], q_norm) * taken.flatten(), 6e-4)
    k = wide[:, n_q:]
    values = REF.rms_norm(k, None, EPS).to(DEVICE)
    want.append(batch.slots, batch.positions, turned(k, k_norm).to(DEVICE), values)
    assert kv.keys.shape[-1] == 2 * rotary_pairs and kv.weight is k_norm
    want.weight = k_norm
    for slot, position in WHERE[:KEPT]:
        seen = slot, position, position
        for ours, theirs in zip(kv.read(*seen), want.read(*seen), strict=True):
            close(ours, theirs, 6e-4 if kind == "f16" else 1.5e-2)
    rest = written(kv, batch)[2]
    unwritten = kv.keys if kind == "f16" else kv.key_scales
    assert bool(unwritten.transpose(1, 2)[rest].isnan().all())


@pytest.mark.parametrize(("dim", "rotary_pairs"), [(256, 0), (512, 64)])
def test_heads_do_not_depend_on_the_batch(dim: int, rotary_pairs: int) -> None:
    freqs = REF.rope_freqs(1e4, dim).to(DEVICE)
    heads = Heads(4, 2, randn(dim), randn(dim), True, rotary_pairs > 0, freqs, EPS)
    parts = [(1, 1000, 16), (0, 3, 16), (2, 128, 16)]
    y, batch = randn(48, (6 if rotary_pairs else 8) * dim), rows_of(parts)

    def cache() -> CudaKV:
        return CudaKV(CacheShape(2, dim, None, rotary_pairs), spread(3, 4096), 16)

    whole = cache()
    q = heads(y, batch, whole)
    for slot, start, begin in ((1, 1000, 0), (2, 128, 32)):
        for first, count in ((0, 1), (15, 1), (3, 5), (0, 16)):
            rows, kv = slice(begin + first, begin + first + count), cache()
            part = rows_of([(slot, start + first, count)])
            assert torch.equal(heads(y[rows].clone(), part, kv), q[rows])
            seen = slot, start + first, start + first + count - 1
            for mine, its in zip(kv.read(*seen), whole.read(*seen), strict=True):
                assert torch.equal(mine, its)


def test_heads_of_partial_sums() -> None:
    heads = Heads(4, 0, randn(256), None, True, False, REF.rope_freqs(1e4, 256).to(DEVICE), EPS)
    y, batch = randn(4, 5, 4 * 256), rows_of([(0, 0, 5)])
    got, want = heads(y, batch, None), heads(y.sum(0), batch, None)
    close(got, want, 2e-3)
