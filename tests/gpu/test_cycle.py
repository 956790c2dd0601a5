"""Asynchronous cycles of several sequences give the results of plain Python for each sequence."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4spec.core import Batch, Cycle, Sequence, StepRows, Work
from g4spec.ops.sampling import NotFinite, Sampler
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.graph_runner import GraphRunner
from g4spec.runtime.cycle_costs import bucket
from tests.gpu.cycle_fakes import KINDS, VOCAB, Block, Chain, FakeTarget
from tests.gpu.device import DEVICE, EMULATED
from tests.support.selection import sample

pytestmark = pytest.mark.gpu

SLOTS = 6
GREEDY, HOT = Sampler(suppress=(1, 2)), Sampler(temperature=0.9, seed=3, suppress=(1, 2))
NARROW = Sampler(temperature=0.7, top_k=20, top_p=0.95, min_p=0.01, seed=4, suppress=(1, 2))
MIXED = [GREEDY, HOT, NARROW, GREEDY, HOT]
TURNS = [
    [3, 0, 7, 1, 5],
    [3, 0, 7, 1, 5],
    [0] * 5,
    [0] * 5,
    [0] * 5,
    [2] * 5,
    [2] * 5,
    [0, 0, 0, 2, 0],
    [11, 4, 1, 0, 2],
    [0] * 5,
    [2, 7, 0, 3, 3],
    [2] * 5,
]
"""Numbers of drafted tokens of five sequences, cycle by cycle."""


def prompt(i: int) -> list[int]:
    return torch.randint(VOCAB, (3 + 5 * i,), generator=torch.Generator().manual_seed(i)).tolist()


class Text:
    """A sequence after prefill, and its sampler."""

    def __init__(self, slot: int, sampler: Sampler, number: int, drafting: bool = True) -> None:
        ids = prompt(number)
        self.sequence = Sequence(slot, [*ids, number], len(ids), len(ids), drafting=drafting)
        self.chooser: Any = SimpleNamespace(sampler=sampler, on_host=False)

    def begin(self, target: FakeTarget, draft: Any) -> None:
        """Let target and draft read the prompt."""
        s = self.sequence
        ids, device = torch.tensor(s.ids[:-1]), target.head.device
        batch = Batch(
            ids.to(device),
            torch.arange(len(ids), device=device),
            torch.full((len(ids),), s.slot, device=device),
            (len(ids),),
        )
        rows, _ = target.step(batch)
        if draft is not None:
            draft.begin(s.slot)
            draft.commit(rows, torch.tensor([len(ids) - 1], device=device))

    def work(self, count: int) -> Work:
        return Work(self.sequence, count, self.chooser)

    def take(self, cycle: Cycle) -> None:
        self.sequence.ids += cycle.tokens
        self.sequence.n_read += len(cycle.tokens)


def run_in_python(
    kind: str | None, slot: int, sampler: Sampler, number: int, counts: Seq[int]
) -> list[Cycle]:
    """Run cycles of one text in plain Python on the CPU; the draft commits the rows of each
    step."""
    target, text = FakeTarget(SLOTS, "cpu"), Text(slot, sampler, number)
    draft = KINDS[kind](SLOTS, "cpu") if kind else None
    text.begin(target, draft)
    out = []
    for count in counts:
        s, drafted = text.sequence, list[int]()
        at = s.position

        def pick(logits: torch.Tensor, i: int, at: int = at) -> torch.Tensor:
            return torch.tensor(
                [sampler.choose(row, at + 1 + i + j) for j, row in enumerate(logits)]
            )

        if count and draft:
            ids = torch.tensor([s.anchor] + [draft.mask] * (draft.rows - 1))
            batch = Batch(
                ids, torch.arange(at, at + draft.rows), torch.full_like(ids, slot), (draft.rows,)
            )
            most = draft.max_tokens if draft.one_pass else count
            drafted = draft.propose(batch, most, pick)[0, :count].tolist()
        ids = torch.tensor([s.anchor, *drafted])
        step = Batch(ids, torch.arange(at, at + len(ids)), torch.full_like(ids, slot), (len(ids),))
        rows, logits = target.step(step)
        tokens = list[int]()
        for i, row in enumerate(logits):
            tokens.append(sampler.choose(row, at + 1 + i))
            if i == len(drafted) or tokens[-1] != drafted[i]:
                break
        n = len(tokens)
        values = [float(logits[i, token]) for i, token in enumerate(tokens)]
        if draft:
            draft.commit(rows.rows(0, n, (n,)), torch.tensor([n - 1]))
        out.append(Cycle(tokens, values, drafted, n - 1))
        text.take(out[-1])
    return out


def run_cycles(
    runner: GraphRunner,
    texts: Seq[Text],
    turns: Seq[Seq[int]],
    ahead: bool = True,
) -> list[list[Cycle]]:
    """Run cycles of the texts. With `ahead`, a cycle with the same draft lengths is started before
    the previous one has been read."""
    out: list[list[Cycle]] = [[] for _ in texts]
    started = 0
    for i, counts in enumerate(turns):
        while started <= min(i + ahead, len(turns) - 1) and turns[started] == counts:
            work = [t.work(n) for t, n in zip(texts, turns[started], strict=True)]
            assert runner.can_run(work)
            runner.start(work)
            started += 1
        for text, did, cycle in zip(texts, out, runner.result(), strict=True):
            text.take(cycle)
            did.append(cycle)
    return out


def same(found: Cycle, wanted: Cycle) -> bool:
    close = torch.allclose(torch.tensor(found.logits), torch.tensor(wanted.logits), atol=1e-4)
    return close and (found.tokens, found.drafted, found.accepted, found.error) == (
        wanted.tokens,
        wanted.drafted,
        wanted.accepted,
        None,
    )


def make_runner(kind: str | None, **settings: Any) -> tuple[GraphRunner, FakeTarget, Any]:
    target: Any = FakeTarget(SLOTS, DEVICE)
    draft = KINDS[kind](SLOTS, DEVICE) if kind else None
    return GraphRunner(target, draft, **settings), target, draft


@pytest.mark.parametrize("kind", ["chain", "block"])
@pytest.mark.parametrize("n", [5, 1, 2])
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in turn"])
def test_batched_sequences_equal_single_ones(kind: str, n: int, ahead: bool) -> None:
    """Mixed samplers and draft lengths, plain steps between, cycles started ahead."""
    runner, target, draft = make_runner(kind)
    slots = [4, 0, 5, 2, 1][:n]
    texts = [Text(slot, MIXED[i], i) for i, slot in enumerate(slots)]
    for text in texts:
        text.begin(target, draft)
    turns = [[min(count, draft.max_tokens) for count in counts[:n]] for counts in TURNS]
    found = run_cycles(runner, texts, turns, ahead)
    accepted = 0
    for i, did in enumerate(found):
        wanted = run_in_python(kind, slots[i], MIXED[i], i, [counts[i] for counts in turns])
        assert all(map(same, did, wanted)), i
        assert not texts[i].sequence.pending
        accepted += sum(c.accepted for c in wanted)
    assert n * len(turns) // 3 < accepted < sum(map(sum, turns))


@pytest.mark.parametrize(("n", "most", "asked"), [(1, 2, 7), (3, 1, 1), (3, 2, 3), (3, 7, 7)])
def test_positions_of_a_batch_without_a_row_have_no_logits(n: int, most: int, asked: int) -> None:
    """A single sequence has one graph for all draft lengths: its logits cost the same."""
    runner, target, draft = make_runner("block")
    texts = [Text(i, MIXED[i], i) for i in range(n)]
    for text in texts:
        text.begin(target, draft)
    run_cycles(runner, texts, [[most] + [1] * (n - 1)] * 2)
    assert isinstance(draft, Block) and set(draft.asked) == {(bucket(n), asked)}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", [None, "chain"])
def test_plain_steps(kind: str | None, n: int) -> None:
    """Without a draft, and with a draft that only some sequences use, for which rows are kept."""
    runner, target, draft = make_runner(kind)
    texts = [Text(i, MIXED[i], i, drafting=kind is not None and i != 1) for i in range(n)]
    for text in texts:
        text.begin(target, draft)
    found = run_cycles(runner, texts, [[0] * n] * 6)
    for i, did in enumerate(found):
        assert all(map(same, did, run_in_python(None, i, MIXED[i], i, [0] * 6)))
        pending = texts[i].sequence.pending
        assert len(pending) == (6 if kind and i != 1 else 0)
        if not pending:
            continue
        given: list[StepRows] = []
        reader: Any = SimpleNamespace(commit_rows=6, commit=lambda *of, to=given: to.append(of[0]))
        target.pending.flush(reader, [texts[i].sequence])
        (rows,), at = given, len(prompt(i))
        b = rows.batch
        assert b.positions.tolist() == [at + k for k in range(6)]
        assert (b.slots.tolist(), b.sizes) == ([i] * 6, (6,))
        assert b.ids.tolist() == texts[i].sequence.ids[at : at + 6]
        assert rows.hidden[:, 0].tolist() == target.memory.codes(b).tolist()
        assert rows.taps.tolist() == (2.0 * rows.hidden).tolist()


def test_sequences_come_and_go() -> None:
    """Other sequences, another order and a stop in between: state is rewritten where needed, and
    results of a running cycle are overwritten."""
    runner, target, draft = make_runner("chain")
    texts = {i: Text(i, MIXED[i], i) for i in range(5)}
    found: dict[int, list[Cycle]] = {i: [] for i in texts}
    parties = [[0], [0, 1], [1, 0], [0, 1, 2], [2, 4, 0], [2, 4, 0], [3, 4], [4], [2, 3, 1, 0]]
    for number, party in enumerate(parties):
        for i in party:
            if not found[i]:
                texts[i].begin(target, draft)
        work = [texts[i].work(2 + i) for i in party]
        runner.start(work)
        cycles = runner.result()
        for i, cycle in zip(party, cycles, strict=True):
            texts[i].take(cycle)
            found[i].append(cycle)
        if number == 5:  # texts that end are not run again
            runner.start([texts[i].work(2 + i) for i in party])
            runner.drop()
            runner.drop()
            for i in party:
                del texts[i], found[i]
                texts[i], found[i] = Text(i, MIXED[i], i), []
    for i, did in found.items():
        wanted = run_in_python("chain", i, MIXED[i], i, [2 + i] * len(did))
        assert did and all(map(same, did, wanted)), i


def test_non_finite_logits_end_only_one_sequence() -> None:
    runner, target, draft = make_runner("chain")
    texts = [Text(i, MIXED[i], i) for i in range(3)]
    for text in texts:
        text.begin(target, draft)
    draft.poison[0] = target.poison[2] = torch.nan
    runner.start([t.work(3) for t in texts])
    ill, well, dead = runner.result()
    assert ill.draft_failed is not None and "not finite" in ill.draft_failed
    assert (
        ill.error is None and ill.tokens[:1] == run_in_python(None, 0, MIXED[0], 0, [0])[0].tokens
    )
    assert same(well, run_in_python("chain", 1, MIXED[1], 1, [3])[0]) and well.draft_failed is None
    assert isinstance(dead.error, NotFinite) and not dead.tokens and dead.draft_failed is None
    for text, cycle in zip(texts, (ill, well, dead), strict=True):
        text.take(cycle)
    runner.start([t.work(n) for t, n in zip(texts, (0, 2, 0), strict=True)])
    ill, well, dead = runner.result()  # a draft that was not requested has not failed
    assert ill.draft_failed is None and ill.error is None and dead.error is not None
    assert same(well, run_in_python("chain", 1, MIXED[1], 1, [3, 2])[1])


def test_accepted_tokens_before_non_finite_logits_are_kept() -> None:
    """Plain decoding would have chosen them, and the text may end there."""

    def cycle(broken: float) -> Cycle:
        """Accept 3 drafted tokens; logits from row 2 on are multiplied by `broken`."""
        runner, target, draft = make_runner("chain", forced=3)
        text, honest = Text(0, GREEDY, 0), target.step
        text.begin(target, draft)
        from_here = text.sequence.position + 2

        def step(batch: Batch, *, capped: bool = True) -> Any:
            rows, logits = honest(batch, capped=capped)
            factor = torch.where(batch.positions >= from_here, broken, 1.0)
            return rows, logits * factor[:, None]

        target.step = step  # type: ignore[method-assign]
        runner.start([text.work(7)])
        return runner.result()[0]

    whole, cut = cycle(1.0), cycle(torch.nan)
    assert whole.error is None and (len(whole.tokens), whole.accepted) == (4, 3)
    assert isinstance(cut.error, NotFinite)
    assert (cut.tokens, cut.logits, cut.accepted) == (whole.tokens[:2], whole.logits[:2], 1)


@pytest.mark.parametrize("kind", ["chain", "block"])
def test_only_requested_drafted_tokens_can_fail(kind: str) -> None:
    runner, target, draft = make_runner(kind)
    draft.poison[:], draft.healthy = torch.nan, 2
    texts = [Text(i, GREEDY, i) for i in range(3)]
    for text in texts:
        text.begin(target, draft)
    runner.start([t.work(n) for t, n in zip(texts, (2, 3, 0), strict=True)])
    assert [c.draft_failed is not None for c in runner.result()] == [False, True, False]


@pytest.mark.parametrize("kind", ["chain", "block"])
@pytest.mark.parametrize("sampler", sample([GREEDY, HOT, NARROW], 1))
def test_suppressed_candidates_end_a_proposal_only(kind: str, sampler: Sampler) -> None:
    """Do as on the CPU: some drafts score only a few tokens, and all may be suppressed."""
    runner, target, draft = make_runner(kind)
    honest, tokens = draft._logits, torch.arange(VOCAB, device=DEVICE)
    others = (tokens != 1) & (tokens != 2)

    def few(rows: Batch, seen: torch.Tensor, j: int) -> torch.Tensor:
        logits: torch.Tensor = honest(rows, seen, j)
        if j == 2:
            return logits.masked_fill(others, -torch.inf)
        return logits if j < 2 else logits * torch.nan  # nobody reads it

    draft._logits = few
    texts = [Text(i, sampler, i) for i in range(3)]
    for text in texts:
        text.begin(target, draft)
    work = [t.work(n) for t, n in zip(texts, (6, 2, 1), strict=True)]
    wanted = [run_in_python(kind, i, sampler, i, [n])[0] for i, n in enumerate((2, 2, 1))]
    runner.start(work)
    cycles = runner.result()
    assert all(map(same, cycles, wanted)) and not any(c.draft_failed for c in cycles)
    proposals = GraphRunner(target, draft).propose(work)
    assert proposals is not None and not any(p.failed for p in proposals)
    assert [len(p.tokens) for p in proposals] == [2, 2, 1]


def test_a_cycle_that_was_dropped_is_run_again() -> None:
    runner, target, _ = make_runner(None)
    text = Text(0, HOT, 0, drafting=False)
    text.begin(target, None)
    found: list[Cycle] = []
    for drop in (False, True, True, False):
        runner.start([text.work(0)])
        runner.start([text.work(0)])
        for _ in range(1 if drop else 2):
            (cycle,) = runner.result()
            text.take(cycle)
            found.append(cycle)
        runner.drop()
    assert all(map(same, found, run_in_python(None, 0, HOT, 0, [0] * len(found))))


def test_a_start_that_failed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle of other sequences fails to start; the earlier sequences continue."""
    runner, target, _ = make_runner(None)
    text, other = Text(0, GREEDY, 0, drafting=False), Text(1, GREEDY, 1, drafting=True)
    text.begin(target, None)
    (found,) = run_cycles(runner, [text], [[0]] * 2)

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for copies")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(target.pending, "put", full)
        runner.start([other.work(0)])
    found += run_cycles(runner, [text], [[0]] * 2)[0]
    assert all(map(same, found, run_in_python(None, 0, GREEDY, 0, [0] * 4)))


@pytest.mark.parametrize("n", [1, 2])
def test_acceptance_may_be_forced(n: int) -> None:
    runner, target, draft = make_runner("block", forced=2)
    texts = [Text(i, GREEDY, i) for i in range(n)]
    for text in texts:
        text.begin(target, draft)
    found = run_cycles(runner, texts, [[4] * n] * 3)
    assert [[c.accepted for c in did] for did in found] == [[2, 2, 2]] * n
    assert all(len(c.tokens) == 3 for did in found for c in did)


def test_unsupported_requests() -> None:
    runner, _, draft = make_runner("chain")
    text, wide = Text(0, GREEDY, 0), Text(1, Sampler(temperature=1.0, top_p=0.9), 1)
    assert runner.can_run([text.work(3)]) and not runner.can_run([wide.work(0)])
    assert not runner.can_run(
        [text.work(0), Text(1, Sampler(), 1).work(0)]
    )  # suppresses other tokens
    text.chooser.on_host = True
    assert not runner.can_run([text.work(0)])
    text.chooser.on_host = False
    draft.recordable = False
    assert runner.can_run([text.work(0)]) and not runner.can_run([text.work(1)])


def test_other_suppressed_tokens_need_a_new_recording() -> None:
    runner, target, draft = make_runner("chain")
    text = Text(0, GREEDY, 0)
    text.begin(target, draft)
    (first,) = run_cycles(runner, [text], [[0]] * 3)
    others = Sampler(suppress=tuple(t for c in first for t in c.tokens))
    again = Text(0, others, 0)
    (did,) = run_cycles(runner, [again], [[0]] * 3)
    assert all(map(same, did, run_in_python(None, 0, others, 0, [0] * 3)))
    assert did[0].tokens != first[0].tokens


class CountsWaits:
    """Counts synchronizations of the host, and graph recordings."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waits = self.captures = 0
        event: Any = torch.cuda.Event
        self._on(patch, event, "synchronize", "waits")
        self._on(patch, graphs.Capture, "__init__", "captures")

    def _on(self, patch: pytest.MonkeyPatch, of: Any, name: str, count: str) -> None:
        call: Callable[..., Any] = getattr(of, name)

        def counted(*args: Any, **more: Any) -> Any:
            setattr(self, count, getattr(self, count) + 1)
            return call(*args, **more)

        patch.setattr(of, name, counted)


def test_the_host_waits_once_a_cycle_and_records_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other samplers of the same modes, positions, slots, draft lengths and orders reuse the same
    graphs."""
    runner, target, draft = make_runner("chain")
    counted = CountsWaits(monkeypatch)
    texts = [Text(i, HOT, i) for i in range(3)]
    for text in texts:
        text.begin(target, draft)
    run_cycles(runner, texts, [[3, 2, 1]] * 3)
    assert (counted.waits, counted.captures) == (3, 2)
    others = [Text(5 - i, Sampler(temperature=0.5, seed=i, suppress=(1, 2)), i) for i in range(4)]
    for text in others:
        text.begin(target, draft)
    run_cycles(runner, others, [[1, 0, 3, 2]] * 2)
    assert (counted.waits, counted.captures) == (5, 2)


@pytest.mark.skipif(not EMULATED, reason="the emulator lists launches")
@pytest.mark.parametrize("n", [1, 2])
def test_kernels_of_a_cycle(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices, and one kernel at each end, for any number of sequences."""
    runner, target, draft = make_runner("chain")
    texts = [Text(i, GREEDY, i) for i in range(n)]
    for text in texts:
        text.begin(target, draft)
    run_cycles(runner, texts, [[2] * n, [0] * n])
    names, kernel = list[str](), launch.kernel

    def noted(file: str, name: str, device: int | None = None) -> Any:
        names.append(name)
        return kernel(file, name, device)

    monkeypatch.setattr(launch, "kernel", noted)
    choice = ["best<0>", "best_end<0>"]
    run_cycles(runner, texts, [[2] * n])
    assert names == ["place", *choice, *choice, *choice, "accept"]
    names.clear()
    run_cycles(runner, texts, [[0] * n])
    assert names == ["place", *choice, "accept"]


def test_a_runner_needs_a_spare_slot() -> None:
    target: Any = FakeTarget(SLOTS, DEVICE)
    with pytest.raises(AssertionError, match="spare slot"):
        GraphRunner(target, Chain(SLOTS - 1, DEVICE))
