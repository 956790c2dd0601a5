"""Recorded cycles of real models equal those of the eager runner, for every kind of draft."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec import convert
from g4spec.core import MAX_STEP_ROWS, PROMPT_BLOCK, Batch, Cycle, Pick, Sequence, Work
from g4spec.ops.sampling import Sampler
from g4spec.runtime.chooser import RequestChooser
from g4spec.runtime.cuda.step import graph_runner, graphs, screen
from g4spec.runtime.cuda.step.graph_runner import GraphRunner
from g4spec.runtime.cuda.step.recorded import RUNS_BEFORE_RECORDING, Recorded
from g4spec.runtime.eager_runner import EagerRunner
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Request
from tests.emulator import capture_guard
from tests.gpu import family
from tests.gpu.device import DEVICE, EMULATE, EMULATED, GPU
from tests.oracle import build
from tests.support import tiny
from tests.support.kinds import RUNNER, RUNNER_WINDOW

pytestmark = pytest.mark.gpu

long = pytest.mark.skipif(
    EMULATED and "all" not in EMULATE,
    reason="takes long on a machine without a GPU (G4SPEC_EMULATE=all)",
)

VOCAB, CTX = 512, 384
SHAPE: dict[str, Any] = {
    "hidden": 128,
    "inter": 128,
    "heads": 2,
    "kv": 1,
    "global_kv": 1,
    "head_dim": 64,
    "global_head_dim": 128,
    "window": RUNNER_WINDOW,
    "vocab": VOCAB,
    "layers": 2,
    "period": 2,
}
GREEDY, HOT = Sampler(), Sampler(temperature=1.0, seed=3)
NARROW = Sampler(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, seed=4)
PROMPT = build.prompt(118, VOCAB, 7)
SLOTS = 3
Did = list[tuple[list[int], list[float], list[int], int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.pairs(tmp_path_factory.mktemp("cycles"), SHAPE, RUNNER, "q8_0")


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if EMULATED:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 32, 1 << 32))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Request:
    """Return a text without a draft, as long as the turns of a test can become."""
    with pytest.MonkeyPatch.context() as patch:
        if EMULATED:
            patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 32, 1 << 32))
        return cycles(load(folder), options(0, 24, HOT), prompt=[*PROMPT, 7])[0]


def load(folder: Path, draft: str = "zlab", **settings: Any) -> Engine:
    path = folder / f"{draft}.gguf" if draft in RUNNER else draft
    given: dict[str, Any] = {
        "n_ctx": CTX,
        "device": GPU,
        "parallel": SLOTS,
        "chunk": PROMPT_BLOCK,
    } | settings
    return Engine.load(folder / "target.gguf", path, **given)


def summary(cycle: Cycle) -> tuple[list[int], list[float], list[int], int]:
    return cycle.tokens, cycle.logits, cycle.drafted, cycle.accepted


def cycles(
    engine: Engine, options: Options, *, eager: bool = False, prompt: list[int] = PROMPT
) -> tuple[Request, Did]:
    """Return a finished request, and the drafted and accepted tokens of its cycles."""
    runners = engine.scheduler.cycles.runners
    engine.scheduler.cycles.runners = [
        r for r in runners if not (eager and isinstance(r, GraphRunner))
    ]
    request = engine.submit(prompt, options)
    did = [summary(cycle) for cycle in request]
    engine.scheduler.cycles.runners = runners
    return request, did[1:]


def options(count: Any, n: int = 24, sampler: Sampler = GREEDY, **more: Any) -> Options:
    return Options(n, sampler, count, **{"ignore_eos": True, **more})


def help_out(engine: Engine, truth: list[int], every: int = 7) -> None:
    """Replace the start of each proposal by `truth`: position * `every` % 16 tokens of it."""
    draft: Any = engine.draft
    propose = draft.propose
    text = torch.tensor(truth + [0] * 64, device=DEVICE)
    index = torch.arange(16, device=DEVICE)

    def helped(batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        own = propose(batch, count, pick)
        at = batch.positions[:: batch.rows_per_sequence][:, None]
        places = (at + 1 + index[:count]).clamp(max=len(text) - 1)
        return torch.where(index[:count] < at * every % 16, text[places], own)

    draft.propose = helped


class RunningTexts:
    """Several texts after prefill, with their samplers."""

    def __init__(self, engine: Engine, samplers: list[Sampler]) -> None:
        self.engine, self.sequences, self.choosers = engine, list[Sequence](), list[Any]()
        target, draft = engine.target, engine.draft
        for i, sampler in enumerate(samplers):
            prompt = PROMPT[: len(PROMPT) - 50 * i]
            s = Sequence(SLOTS - 1 - i, [*prompt, 7 + i], len(prompt), len(prompt), drafting=True)
            engine.pool.grow(s, CTX)
            rows = engine.backend.read(target, s.slot, prompt, 0)
            assert draft is not None
            draft.begin(s.slot)
            engine.backend.commit(draft, rows)
            self.sequences.append(s)
            chooser = RequestChooser(Options(sampler=sampler), prompt, VOCAB, engine.backend)
            self.choosers.append(chooser)

    def run(self, runner: Any, turns: list[list[int]]) -> list[Did]:
        """Run cycles of each text, started ahead where the runner allows it."""
        out: list[Did] = [[] for _ in self.sequences]
        started = 0
        for i, counts in enumerate(turns):
            while started < min(i + runner.depth, len(turns)) and turns[started] == counts:
                work = zip(self.sequences, turns[started], self.choosers, strict=True)
                runner.start([Work(*of) for of in work])
                started += 1
            for s, did, cycle in zip(self.sequences, out, runner.result(), strict=True):
                s.ids += cycle.tokens
                s.n_read += len(cycle.tokens)
                did.append(summary(cycle))
        return out

    def kept(self) -> list[float]:
        """Return the draft's state of each text."""
        draft, out = self.engine.draft, list[float]()
        assert draft is not None
        self.engine.target.pending.flush(draft, self.sequences)
        for s in self.sequences:
            last = s.position - 2  # the newest row that a chain has read
            for kv in draft.caches:
                rows = kv.read(s.slot, last + 1 - (kv.window or last + 1), last)
                out += [x for part in rows for x in part.flatten().tolist()]
            out += [x for state in draft.state for x in state[s.slot].flatten().tolist()]
        return out


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", RUNNER)
def test_every_kind_equals_the_eager_runner(
    folder: Path, plain: Request, name: str, n: int
) -> None:
    """Cycles, and the draft's state, when proposals and plain steps alternate."""
    turns = [[3, 1, 0], [3, 1, 0], [0] * 3, [0] * 3, [5, 0, 2], [2] * 3]
    found, begin = [], [*PROMPT, 7]
    for recorded in (False, True):
        engine = load(folder, name, pool=SLOTS * CTX)
        help_out(engine, begin + plain.ids, 3)
        party = RunningTexts(engine, [HOT, NARROW, GREEDY][:n])
        runner = next(
            r for r in engine.scheduler.cycles.runners if isinstance(r, GraphRunner) == recorded
        )
        most = engine.draft.max_tokens if engine.draft else 0
        did = party.run(runner, [[min(c, most) for c in counts[:n]] for counts in turns])
        found.append((did, party.kept()))
    assert found[0] == found[1]
    tokens = [token for c in found[0][0][0] for token in c[0]]
    assert tokens == plain.ids[: len(tokens)] and len(set(tokens)) > 3
    assert 0 < sum(c[3] for c in found[0][0][0]) < sum(counts[0] for counts in turns)


def test_rows_of_many_steps_at_a_time_have_the_bits_of_few(folder: Path) -> None:
    """A draft that rested is updated with up to `commit_rows` rows of a sequence at a time."""
    found = []
    for rows in (MAX_STEP_ROWS, None):
        engine = load(folder, pool=SLOTS * CTX)
        draft: Any = engine.draft
        assert draft.commit_rows > 2 * MAX_STEP_ROWS
        draft.commit_rows = rows or draft.commit_rows
        party = RunningTexts(engine, [GREEDY, HOT])
        did = party.run(engine.scheduler.cycles.runners[0], [[0, 0]] * 37 + [[4, 4]])
        found.append((did, party.kept()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "sampler,counts",
    [
        (GREEDY, tuple(range(1, 16))),
        (HOT, (4, 15)),
        (NARROW, (7,)),
    ],
    ids=["greedy", "hot", "narrow"],
)
def test_every_length_equals_the_eager_runner(
    folder: Path, sampler: Sampler, counts: tuple[int, ...]
) -> None:
    """Texts, logits, proposals and acceptance, across the ends of all rings and of a page."""
    engine = load(folder)
    plain, _ = cycles(engine, options(0, 16, sampler))
    assert len(set(plain.ids)) > 3 and len(PROMPT) < 128 < len(PROMPT) + len(plain.ids)
    help_out(engine, PROMPT + plain.ids)
    for count in counts[:: 7 if EMULATED else 1]:
        request, did = cycles(engine, options(count, 16, sampler))
        assert request.ids == plain.ids, count
    assert did == cycles(engine, options(count, 16, sampler), eager=True)[1]
    assert request.stats.accepted > 5


@long
def test_a_large_table_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals from the upper bits of a table equal those from the whole table, except for some
    tokens of a random model, whose logits are close; with noise the whole table is read."""
    on = tiny.target(tmp_path / "target", **SHAPE | {"hidden": 256})
    convert.convert(build.with_large_layers(on, 5.0), tmp_path / "target.gguf", type="q6_k")
    RUNNER["zlab"](tmp_path / "zlab", on)
    draft = build.with_large_layers(tmp_path / "zlab", 40.0, "o_proj|down_proj")
    convert.convert(draft, tmp_path / "zlab.gguf", target=on, type="q8_0")
    done, best = list[int](), screen.best

    def noted(*args: Any) -> Any:
        done.append(1)
        return best(*args)

    monkeypatch.setattr(screen, "MIN_COLUMNS", VOCAB)
    monkeypatch.setattr(screen, "best", noted)
    engine = load(tmp_path)
    for sampler in (HOT, GREEDY):
        assert not done
        did, by_eager = (
            cycles(engine, options(15, 6, sampler), eager=eager, prompt=PROMPT[:24])[1]
            for eager in (False, True)
        )
        assert [c[:2] for c in did] == [c[:2] for c in by_eager]
        drafted = [[token for c in found for token in c[2]] for found in (did, by_eager)]
        others = sum(a != b for a, b in zip(*drafted, strict=True))
        assert len(set(drafted[0])) > 1 and others <= (0.05 * len(drafted[0]) if done else 0)
    assert done


@long
def test_a_late_stop_leaves_nothing_behind(folder: Path) -> None:
    engine = load(folder)
    plain, _ = cycles(engine, options(0))
    help_out(engine, PROMPT + plain.ids)
    for at in (6, 13):
        engine.tokenizer.stop_ids = frozenset({plain.ids[at]})
        first = plain.ids.index(plain.ids[at])
        request, did = cycles(engine, options(5, ignore_eos=False))
        assert request.ids == plain.ids[:first]
        assert request.stats.stop_reason.startswith("stop token")
        assert did == cycles(engine, options(5, ignore_eos=False), eager=True)[1]
        engine.tokenizer.stop_ids = frozenset()
        request, _ = cycles(engine, options(5), prompt=PROMPT[:9])
        assert request.ids == cycles(load(folder), options(0), prompt=PROMPT[:9])[0].ids


@long
def test_the_end_of_the_context(folder: Path) -> None:
    plain, _ = cycles(load(folder), options(0))
    for room in (1, 6, 17):
        engine = load(folder, n_ctx=len(PROMPT) + room)
        help_out(engine, PROMPT + plain.ids)
        for count in (2, 15):
            request, _ = cycles(engine, options(count, 999))
            assert request.ids == plain.ids[: room + 1]
            assert request.stats.stop_reason == "context"


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_useless_draft_is_dropped(folder: Path, logprobs: int | None) -> None:
    engine = load(folder)
    plain, _ = cycles(engine, options(0, 12))
    draft: Any = engine.draft
    draft.w["output_norm.weight"].fill_(torch.nan)
    request, _ = cycles(engine, options(4, 12, logprobs=logprobs))
    assert request.ids == plain.ids and "cannot be used" in request.notes[0]


@long
def test_drafts_that_cannot_be_recorded_run_eagerly(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[int]()
    start = graph_runner.GraphRunner.start

    def noted(self: Any, work: Any) -> None:
        started.append(max(w.count for w in work))
        start(self, work)

    monkeypatch.setattr(GraphRunner, "start", noted)
    engine = load(folder)
    cycles(engine, options(0, 2))  # before the first request batches of all sizes run once
    started.clear()
    for asked in (options(3, 4, Sampler(temperature=1.0, top_p=0.9)), options(3, 4, logprobs=1)):
        cycles(engine, asked)
        assert not started
    cycles(load(folder, "ngram"), options(3, 4))
    assert not any(started)  # its plain steps are recorded
    cycles(engine, options(3, 4))
    assert any(started)


@pytest.mark.skipif(EMULATED, reason="needs a CUDA device")
def test_a_recording_frees_memory_that_torch_keeps() -> None:
    total, size = torch.cuda.mem_get_info()[1], 256 << 20
    device = torch.device(DEVICE)

    def run() -> tuple[torch.Tensor, ...]:
        return (torch.ones(size, dtype=torch.uint8, device=DEVICE)[-1:],)

    pool = graphs.Pool(device)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.5 * size) / total)
    try:
        run()
        recorded = graphs.record(run, pool)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(recorded, graphs.Capture)
    recorded.replay()
    assert recorded.outputs[0].item() == 1


@pytest.mark.parametrize("without_memory", ["proposal", "step"])
def test_cycles_without_memory_for_graphs_have_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, without_memory: str
) -> None:
    """Either of the two parts of a cycle."""
    found = []
    for short in (False, True):
        engine = load(folder)
        if short:
            monkeypatch.setattr(graphs, "Capture", _without_memory(without_memory, graphs.Capture))
        requests = [engine.submit(PROMPT[: 20 * i + 9], options(4, 8 + i, HOT)) for i in range(3)]
        while engine.step():
            pass
        found.append([[summary(c) for c in r] for r in requests])
    assert found[0] == found[1]


def _without_memory(part: str, capture: Any) -> Any:
    """Return a `graphs.Capture` that has no memory for one part of a cycle."""

    def made(run: Any, pool: Any, overlap: bool = True) -> Any:
        if part in repr(inspect.getclosurevars(run).nonlocals.get("shape")):
            raise torch.OutOfMemoryError
        return capture(run, pool, overlap)

    return made


@pytest.mark.parametrize(
    "choice",
    [
        {"logprobs": 2, "sampler": HOT},
        {"mask": lambda ids: torch.arange(VOCAB) % 3 != len(ids) % 3, "sampler": NARROW},
        {"mask": lambda ids: torch.arange(VOCAB) % 2 == 0},
        {"logprobs": 1, "sampler": Sampler(repetition_penalty=1.3)},
    ],
    ids=["logprobs", "mask", "greedy-mask", "penalties"],
)
@pytest.mark.parametrize("count", [0, 4])
def test_recorded_parts_of_host_choices_have_the_bits_of_others(
    folder: Path, count: int, choice: dict[str, Any]
) -> None:
    """Three sequences, which are padded to four, of different lengths. Penalties count for drafted
    tokens as well: these are chosen on the host."""
    found = []
    for recorded in (False, True):
        engine = load(folder)
        graph, host = engine.scheduler.cycles.runners
        if not recorded:
            host = EagerRunner(engine.target, engine.draft)
        engine.scheduler.cycles.runners = [host]
        requests = [
            engine.submit(PROMPT[: 20 * i + 9], options(count, 8 + i, **choice))
            for i in range(SLOTS)
        ]
        while engine.step():
            pass
        found.append([[(*summary(c), c.logprobs) for c in r] for r in requests])
        proposals = any(key.part == "proposal" for key in graph._graphs)
        assert proposals == (recorded and count > 0 and choice.get("sampler", HOT).plain)
    assert found[0] == found[1] and all(found[0])
    with_logprobs = "logprobs" in choice
    assert all(bool(cycle[-1]) == with_logprobs for did in found[0] for cycle in did)


@pytest.mark.skipif(EMULATED, reason="needs a CUDA device")
def test_a_graph_without_memory_for_it_is_run_op_by_op() -> None:
    """Also if it is the first of its pool. Other shapes are recorded."""
    total = torch.cuda.mem_get_info()[1]

    def run(batch: Batch) -> tuple[torch.Tensor, ...]:
        doubled = batch.ids[:, None] * 2
        if len(batch) == 2 and torch.cuda.is_current_stream_capturing():
            torch.empty(2 * total, dtype=torch.uint8, device=DEVICE)
        return (doubled,)

    device = torch.device(DEVICE)
    recorded = Recorded(run, 4, device, graphs.Pool(device))
    for tokens in ([4, 5], [6], [7, 8, 9], [1, 2]):
        for i in range(RUNS_BEFORE_RECORDING + 3):
            tokens[0] = i
            _, (found,) = recorded([(0, 5, tokens)])
            assert found.flatten().tolist() == [2 * x for x in tokens]
    unrecorded = {n for (n,), g in recorded._graphs.items() if isinstance(g, graphs.OpByOp)}
    assert unrecorded == {2}
    assert len(recorded._graphs) == 3


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: int(x[1]),
        lambda x: bool(x[0] > 1),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1.0]),
        lambda x: x.index_put_((x > 1,), x[:1]),
    ],
)
def test_a_recording_that_looks_at_values_fails(read: Any) -> None:
    x = torch.arange(4, device=DEVICE)
    with pytest.raises(capture_guard.NotCapturable), capture_guard.capturing():
        read(x)
    with capture_guard.capturing():
        torch.where(x > 1, x[x], x * 2).masked_fill(x > 2, 0)
