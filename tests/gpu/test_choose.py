"""Tokens chosen on the GPU are those of the CPU's sampler, for each sequence of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from g4spec.ops.sampling import NotFinite, Sampler, gumbel
from g4spec.runtime.cuda.build.constants import RowFault
from g4spec.runtime.cuda.step.choose import Choice, Chosen, mode_of
from tests.gpu.device import DEVICE, EMULATED, needs_gpu

pytestmark = pytest.mark.gpu

SAMPLERS = {
    "greedy": Sampler(),
    "temperature": Sampler(temperature=1.0, seed=7),
    "hot": Sampler(temperature=2.5, seed=2**63 + 11),
    "top-k": Sampler(temperature=1.0, top_k=64, seed=3),
    "top-k-1": Sampler(temperature=0.8, top_k=1, seed=3),
    "gemma": Sampler(temperature=1.0, top_k=64, top_p=0.95, seed=4),
    "all": Sampler(temperature=0.7, top_k=128, top_p=0.9, min_p=0.02, seed=5),
    "min-p": Sampler(temperature=1.3, min_p=0.05, seed=6),
    "top-n-sigma": Sampler(temperature=1.2, top_n_sigma=1.5, top_p=0.9, seed=9),
    "top-p": Sampler(temperature=1.1, top_p=0.8, seed=8),
    "wide top-k": Sampler(temperature=1.1, top_k=1000, seed=8),
    "largest": Sampler(temperature=1e300, top_k=2**40, seed=9),
}


def logits(rows: int, columns: int, cap: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return raw logits on the GPU, and capped ones on the CPU."""
    torch.manual_seed(columns + rows)
    raw = torch.randn(rows, columns) * 6.0
    raw[:, :: max(1, columns // 50)] += 12.0
    return raw.to(DEVICE), cap * torch.tanh(raw / cap) if cap else raw


def agrees(sampler: Sampler, row: torch.Tensor, position: int, token: int) -> bool:
    """Return True if the CPU chooses `token`, or one that is equal up to rounding."""
    want = sampler.choose(row, position)
    if token == want:
        return True
    if sampler.temperature == 0:
        return False
    row = row.clone()
    row[list(sampler.suppress)] = -torch.inf
    noisy = sampler._filtered(row) / sampler.temperature + gumbel(sampler.seed, position, len(row))
    return float(noisy[want] - noisy[token]) < 1e-5


def check(sampler: Sampler, rows: int, columns: int, cap: float) -> None:
    raw, capped = logits(rows, columns, cap)
    suppress = (0, 3, columns - 1, int(capped[0].argmax()))
    choice = Choice(columns, DEVICE, suppress=suppress)
    choice.set(sampler)
    positions = torch.arange(1000, 1000 + rows, device=DEVICE)
    got = choice(raw, positions, cap=cap)
    assert not got.bad.any()
    sampler = replace(sampler, suppress=suppress)
    ids = got.ids.tolist()
    assert all(agrees(sampler, capped[t], 1001 + t, ids[t]) for t in range(rows))
    picked = capped[torch.arange(rows), got.ids.cpu()]
    assert float((got.values.cpu() - picked).abs().max()) < 1e-5


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("columns", [40, 1003, 32_768, 262_144])
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_the_token_is_the_samplers(name: str, columns: int, cap: float) -> None:
    check(SAMPLERS[name], 3, columns, cap)


@pytest.mark.parametrize("name", ["greedy", "temperature", "gemma", "top-p"])
def test_a_row_does_not_depend_on_the_batch(name: str) -> None:
    choice = Choice(262_144, DEVICE)
    choice.set(SAMPLERS[name])
    raw, _ = logits(16, 262_144)
    positions = torch.arange(5, 21, device=DEVICE)
    whole = choice(raw, positions, cap=30.0)
    for t in range(16):
        alone = choice(raw[t : t + 1], positions[t : t + 1], cap=30.0)
        assert torch.equal(alone.ids, whole.ids[t : t + 1])
        assert torch.equal(alone.values, whole.values[t : t + 1])


def test_thousands_of_draws_have_the_right_frequencies() -> None:
    z = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5]).to(DEVICE)
    choice = Choice(5, DEVICE)
    choice.set(Sampler(temperature=1.0, seed=99))
    n, most = (1_500, 0.044) if EMULATED else (20_000, 0.012)
    ids = choice(z.expand(n, 5).contiguous(), torch.arange(n, device=DEVICE)).ids
    share = torch.bincount(ids, minlength=5).float() / n
    assert float((share - z.softmax(0)).abs().max()) < most


@pytest.mark.parametrize("name", ["greedy", "temperature", "gemma"])
def test_ties_go_to_the_lowest_token(name: str) -> None:
    raw = torch.zeros(2, 50_000).to(DEVICE)
    raw[0, [41_234, 17, 30_000]] = 5.0
    raw[1] = 400.0  # capped, all are equal
    raw[1, 20_000:] = 500.0
    choice = Choice(50_000, DEVICE)
    choice.set(replace(SAMPLERS[name], temperature=SAMPLERS[name].temperature * 1e-6))
    positions = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    got = choice(raw, positions, cap=30.0).ids.tolist()
    if name == "greedy":
        assert got == [17, 0]
    else:
        (sampler,) = choice.samplers
        want = 30.0 * torch.tanh(raw.cpu() / 30.0)
        assert all(agrees(sampler, want[t], 1, got[t]) for t in range(2))


@pytest.mark.parametrize("name", SAMPLERS)
def test_non_finite_values_are_reported(name: str) -> None:
    raw, _ = logits(4, 5000)
    raw[0, 4321] = torch.nan
    raw[1] = -torch.inf
    raw[2, 77] = torch.inf
    choice = Choice(5000, DEVICE)
    choice.set(SAMPLERS[name])
    got = choice(raw, torch.arange(4, device=DEVICE))
    assert got.bad.tolist() == [1, 1, 1, 0]
    for t in range(3):
        with pytest.raises(NotFinite):
            SAMPLERS[name].choose(raw[t].cpu(), t + 1)


@pytest.mark.parametrize("name", [n for n, s in SAMPLERS.items() if mode_of(s, 5000) != "sorted"])
def test_rows_whose_tokens_are_all_suppressed_are_told_apart(name: str) -> None:
    raw = torch.full((3, 5000), -torch.inf, device=DEVICE)
    raw[:, [7, 4998]] = 1.0
    raw[1, 4000], raw[2, 4000] = torch.nan, 0.5
    choice = Choice(5000, DEVICE, suppress=(7, 4998))
    choice.set(SAMPLERS[name])
    got = choice(raw, torch.arange(3, device=DEVICE))
    assert got.bad.tolist() == [RowFault.SUPPRESSED, RowFault.NOT_FINITE, RowFault.NONE]
    assert int(got.ids[2]) == 4000


@needs_gpu
def test_a_graph_serves_other_seeds() -> None:
    raw, capped = logits(2, 9000)
    choice, positions = Choice(9000, DEVICE), torch.tensor([4, 9], device=DEVICE)
    choice.set(Sampler(temperature=1.0, top_k=64, seed=1))
    choice(raw, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = choice(raw, positions)
    for seed, top_k in ((1, 64), (2, 64), (3, 7), (4, 128)):
        sampler = Sampler(temperature=1.5, top_k=top_k, seed=seed)
        choice.set(sampler)
        positions += 1
        graph.replay()
        first = int(positions[0]) + 1, int(positions[1]) + 1
        ids = out.ids.tolist()
        assert all(agrees(sampler, capped[t], first[t], ids[t]) for t in range(2))


MIXES = [
    ("greedy", "temperature"),
    ("gemma", "greedy", "hot"),
    ("temperature", "top-k-1", "all"),
    ("greedy", "greedy", "gemma", "hot", "temperature"),
]


@pytest.mark.parametrize("names", MIXES, ids="+".join)
@pytest.mark.parametrize("each", [1, 3])
def test_sequences_choose_by_their_own_samplers(names: tuple[str, ...], each: int) -> None:
    """Bit-identical to each sequence by itself, also with a `bad` tensor longer than the rows."""
    columns, pitch, n = 9000, 5, len(names)
    raw, _ = logits(n * each, columns)
    raw[each * n - 1, 17] = torch.nan
    choice = Choice(columns, DEVICE, room=n + 2)
    choice.set(*(SAMPLERS[name] for name in names))
    assert choice.modes == tuple(sorted({mode_of(SAMPLERS[name], columns) for name in names}))
    positions = torch.arange(100, 100 + n * pitch, device=DEVICE)
    bad = torch.full((n * pitch,), 7, dtype=torch.int32, device=DEVICE)
    new = torch.zeros(n * each, dtype=torch.int64, device=DEVICE)
    into = Chosen(new, torch.zeros_like(new, dtype=torch.float32), bad)
    got = choice(raw, positions, cap=30.0, into=into, sequences=n, pitch=pitch)
    for s, name in enumerate(names):
        alone, rows = Choice(columns, DEVICE), slice(s * each, (s + 1) * each)
        alone.set(SAMPLERS[name])
        want = alone(raw[rows].contiguous(), positions[s * pitch :][:each], cap=30.0)
        assert torch.equal(got.ids[rows], want.ids), name
        assert torch.equal(got.values[rows].nan_to_num(), want.values.nan_to_num()), name
        assert torch.equal(bad[s * pitch :][:each], want.bad), name
    left = bad.view(n, pitch)[:, each:]
    assert bool((left == 7).all()) and int(bad[(n - 1) * pitch + each - 1]) == 1


def test_padding_rows_use_an_existing_mode() -> None:
    choice = Choice(500, DEVICE, room=4)
    choice.set(SAMPLERS["temperature"], SAMPLERS["gemma"], SAMPLERS["gemma"])
    raw, _ = logits(4, 500)
    new = torch.full((4,), -1, dtype=torch.int64, device=DEVICE)
    into = Chosen(new, torch.zeros(4, device=DEVICE), torch.zeros_like(new, dtype=torch.int32))
    assert choice.modes == ("sampled", "top")
    choice(raw, torch.arange(4, device=DEVICE), into=into, sequences=4)
    assert bool((new >= 0).all())


def test_an_interrupted_upload_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during `set`, then the same request again: its seed and temperature are used."""
    raw, positions = logits(1, 1003)[0], torch.tensor([1000], device=DEVICE)
    sampler, choice, fresh = SAMPLERS["hot"], Choice(1003, DEVICE), Choice(1003, DEVICE)
    choice.set(SAMPLERS["temperature"])
    with monkeypatch.context() as patch:

        def interrupt(_: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

        patch.setattr(torch.Tensor, "pin_memory", interrupt)
        with pytest.raises(KeyboardInterrupt):
            choice.set(sampler)
    choice.set(sampler)
    fresh.set(sampler)
    assert torch.equal(choice._sampling, fresh._sampling)
    assert torch.equal(choice(raw, positions).ids, fresh(raw, positions).ids)


def test_sorted_filters_are_not_batched_with_others() -> None:
    choice = Choice(500, DEVICE, room=2)
    raw, capped = logits(4, 500)
    wide = replace(SAMPLERS["top-p"], seed=11, top_p=0.5)
    choice.set(SAMPLERS["top-p"], wide)
    ids = choice(raw, torch.arange(4, device=DEVICE), sequences=2).ids.tolist()
    assert all(
        agrees((SAMPLERS["top-p"], wide)[t // 2], capped[t], 1 + t, ids[t]) for t in range(4)
    )
    choice.set(SAMPLERS["top-p"], SAMPLERS["greedy"])
    with pytest.raises(AssertionError):
        choice(raw, torch.arange(4, device=DEVICE), sequences=2)
