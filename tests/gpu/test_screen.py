"""Finding the largest logit of a large table from the upper bits of its codes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from g4spec import quant
from g4spec.ops.sampling import Sampler
from g4spec.runtime.cuda.build.constants import LOGIT_SPAN
from g4spec.runtime.cuda.step import gemm_tiles, linear, screen
from g4spec.runtime.cuda.step.choose import Choice, Chosen
from g4spec.runtime.cuda.step.picks import Picks
from g4spec.runtime.cuda.weights.matrix import Matrix
from tests.gpu.device import DEVICE
from tests.support.upper_bits import tables

pytestmark = pytest.mark.gpu


def table(n: int, k: int, seed: int = 1) -> tuple[Matrix, torch.Tensor, torch.Tensor]:
    """Return a random Q6_K matrix on the GPU, its values, and the values of their upper bits."""
    g = torch.Generator().manual_seed(seed)
    raw = quant.get("q6_k").quantize((torch.randn(n, k, generator=g) / k**0.5).numpy())
    return Matrix("q6_k", torch.from_numpy(raw).to(DEVICE), n, k), *tables(raw)


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    """Round x [T, K] to 8 bits with one scale per 256 values."""
    units = x.unflatten(1, (-1, 256))
    scale = units.abs().amax(2, keepdim=True) / 127
    return ((units / scale).round() * scale).flatten(1)


def chosen(count: int) -> Chosen:
    return Chosen(
        torch.full((count,), -1, device=DEVICE),
        torch.zeros(count, device=DEVICE),
        torch.full((count,), 7, dtype=torch.int32, device=DEVICE),
    )


@pytest.fixture
def huge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat small matrices as large ones."""
    monkeypatch.setattr(gemm_tiles, "MANY_GROUPS", 2)
    gemm_tiles.gemm_config.cache_clear()
    yield
    gemm_tiles.gemm_config.cache_clear()


@pytest.mark.parametrize("n,k", [(200, 256), (1280, 512), (512, 1280)])
def test_upper_bits(n: int, k: int, huge: None) -> None:
    """Results are right, and no row depends on the other rows."""
    weight, _, coarse = table(n, k)
    by = linear.SplitKWorkspace(torch.device(DEVICE))
    x = 3 * torch.randn(16, k, generator=torch.Generator().manual_seed(k)).to(DEVICE)
    whole = linear.linear_upper(screen.byte_rows(x), weight.weight, by)
    want = in_bytes(x.cpu()) @ coarse.t()
    assert float((whole.cpu() - want).abs().max() / want.abs().max()) < 1e-5
    for count in (1, 8, 9):
        part = linear.linear_upper(screen.byte_rows(x[:count].contiguous()), weight.weight, by)
        assert torch.equal(part, whole[:count]), count
    assert not by.arrived.any()


def test_the_best_of_the_candidates() -> None:
    """The choice is the best of the candidates found by the upper bits, and nearly always the best
    of all; no row depends on the other rows."""
    n, k, cap = 8192, 256, 30.0
    weight, exact, coarse = table(n, k)
    by = linear.SplitKWorkspace(torch.device(DEVICE))
    x = 3 * torch.randn(16, k, generator=torch.Generator().manual_seed(2))
    suppressed = int((x[0] @ exact.t()).argmax())
    choice = Choice(n, DEVICE, suppress=(suppressed,))
    z, found = x @ exact.t(), in_bytes(x) @ coarse.t()
    z[:, suppressed] = found[:, suppressed] = -torch.inf
    got = screen.best(x.to(DEVICE), weight.weight, choice, by, cap, chosen(16))
    assert not got.bad.any()
    ids, best = got.ids.cpu(), z.argmax(1)
    spans = [part.topk(screen.OF_SPAN).indices for part in found.split(LOGIT_SPAN, dim=1)]
    candidates = torch.cat([ids + i * LOGIT_SPAN for i, ids in enumerate(spans)], dim=1)
    want = candidates.gather(1, z.gather(1, candidates).argmax(1, keepdim=True))[:, 0]
    assert int((ids != want).sum()) <= 1 and int((ids != best).sum()) <= 2
    value = z.gather(1, ids[:, None])[:, 0]
    value = cap * torch.tanh(value / cap)
    assert torch.allclose(got.values.cpu(), value, rtol=1e-5, atol=1e-5)
    for count in (1, 15):
        part = screen.best(x[:count].to(DEVICE), weight.weight, choice, by, cap, chosen(count))
        assert torch.equal(part.ids, got.ids[:count])
        assert torch.equal(part.values, got.values[:count])


@pytest.mark.parametrize("sequences,each", [(2, 9), (5, 1)])
def test_rows_of_several_sequences(
    sequences: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than one matmul has, as in drafts of several sequences; each equals a single
    row."""
    n, k, pitch = 8192, 256, 16
    weight, exact, _ = table(n, k)
    by, count = linear.SplitKWorkspace(torch.device(DEVICE)), sequences * each
    x = 3 * exact[torch.arange(count) * 7].contiguous()
    x[count - 1, 3] = torch.nan
    bad = torch.full((sequences * pitch,), 7, dtype=torch.int32, device=DEVICE)
    positions = torch.zeros(sequences * pitch, dtype=torch.int64, device=DEVICE)
    monkeypatch.setattr(screen, "MIN_COLUMNS", n)
    pick = Picks(Choice(n, DEVICE, room=sequences), positions, positions, bad, sequences)
    ids = pick.best(x.to(DEVICE), weight.weight, by, 2, 30.0)
    assert ids is not None and ids.is_contiguous()
    for t in range(count):
        alone = chosen(1)
        screen.best(x[t : t + 1].to(DEVICE), weight.weight, pick.choice, by, 30.0, alone)
        assert torch.equal(alone.ids, ids[t : t + 1])
        assert int(alone.bad) == int(bad[t // each * pitch + 2 + t % each])
    assert int((bad == 7).sum()) == sequences * (pitch - each) and int((bad == 1).sum()) == 1
    pick.choice.set(Sampler(temperature=1.0))
    assert pick.best(x.to(DEVICE), weight.weight, by, 2, 30.0) is None


def test_non_finite_values_are_reported() -> None:
    n, k = 8192, 256
    weight, exact, _ = table(n, k)
    by, x = linear.SplitKWorkspace(torch.device(DEVICE)), exact[[77, 5, 8000]] * 16
    x[1, 5] = torch.nan
    got = screen.best(x.to(DEVICE), weight.weight, Choice(n, DEVICE), by, 0.0, chosen(3))
    assert got.bad.tolist() == [0, 1, 0]
    assert got.ids[::2].tolist() == [77, 8000]


def test_supported_matrices() -> None:
    weight = table(256, 256)[0].weight
    assert not screen.takes(weight, 256)  # small
    large = type(weight)("q6_k", weight.data, 262_144, 5376)
    assert screen.takes(large, 262_144) and not screen.takes(large, 262_143)
    assert not screen.takes(type(weight)("q4_k", weight.data, 262_144, 5376), 262_144)
