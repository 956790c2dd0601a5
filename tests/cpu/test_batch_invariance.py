"""Batch invariance: text, logits, log-probabilities and proposals of a request are bit-exact
whether other requests arrive, end, are cancelled or preempted, or hit the prefix cache."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from g4spec.core import MAX_STEP_ROWS, PAGE, PROMPT_BLOCK, Cycle, Draft, StepRows, Work
from g4spec.runtime.backend import TorchBackend
from g4spec.runtime.eager_runner import EagerRunner
from g4spec.runtime.request import Options
from g4spec.runtime.target import Target
from tests.support import batch_invariance, memory_engine
from tests.support.batch_invariance import ReferenceRuns, RequestSpec
from tests.support.memory_engine import DRAFTS
from tests.support.selection import sample


@pytest.fixture(scope="module")
def plain() -> ReferenceRuns:
    return ReferenceRuns()


@pytest.mark.parametrize("kind", sample(batch_invariance.KINDS, 5))
def test_batched_outputs_equal_single_runs(plain: ReferenceRuns, kind: str | None) -> None:
    number = batch_invariance.KINDS.index(kind) // 4  # most kinds are marked as slow
    parallel = batch_invariance.PARALLEL[number % 4]
    verdict = batch_invariance.compare_with_reference(
        kind, parallel, f"suite {kind}", 4, 24, plain=plain
    )
    assert not verdict.wrong
    assert verdict.tokens and (verdict.most_live > 1 or parallel == 1)


@pytest.mark.parametrize("kind", sample(["eagle3", None, "dflash"], 1))
def test_a_pool_that_is_too_small(plain: ReferenceRuns, kind: str | None) -> None:
    """Preempted requests are recomputed and continue with the same output."""
    rng = random.Random(1)
    todo = specs(
        [[2, *batch_invariance.tokens(rng, 97 + i)] for i in range(4)], n_predict=33, logprobs=2
    )
    engine = memory_engine.engine(DRAFTS[kind] if kind else None, n_ctx=512, parallel=8)
    assert engine.pool.n_pages == 5, "three texts fit with a page each, and not with two"
    run = batch_invariance.run_batched(engine, todo)
    assert run.preempted
    same = ReferenceRuns(kind)
    for spec, (got,) in zip(todo, run.answers, strict=True):
        assert not batch_invariance.output_difference(got, plain(spec))
        assert not batch_invariance.proposal_difference(got, same(spec))


class StartsAhead(EagerRunner):
    """Starts a cycle before the result of the previous one is fetched, as on a GPU."""

    depth = 2

    def __init__(self, target: Target, draft: Draft | None) -> None:
        super().__init__(target, draft)
        self.under_way: list[Sequence[Work]] = []

    def start(self, work: Sequence[Work]) -> None:
        self.under_way.append(work)

    def result(self) -> list[Cycle]:
        super().start(self.under_way.pop(0))
        return super().result()

    def drop(self) -> None:
        self.under_way.clear()


@pytest.mark.parametrize("kind", sample([None, "dflash"], 1))
def test_cycles_started_ahead_have_their_pages(plain: ReferenceRuns, kind: str | None) -> None:
    """Every cycle is started while the previous one is running."""
    rng = random.Random(6)
    todo = specs(
        [[2, *batch_invariance.tokens(rng, 100 + i)] for i in range(2)], n_predict=60, draft_max=2
    )
    engine = memory_engine.engine(DRAFTS[kind] if kind else None, n_ctx=512, parallel=2, pool=2000)
    engine.scheduler.cycles.runners = [StartsAhead(engine.target, engine.draft)]
    run = batch_invariance.run_batched(engine, todo)
    for spec, (got,) in zip(todo, run.answers, strict=True):
        assert not batch_invariance.output_difference(got, plain(spec))


@pytest.mark.parametrize(
    ("n_predict", "reason", "cycles"), [(30, "length", 29), (600, "context", 12)]
)
def test_no_cycle_is_started_after_the_end_of_a_text(
    n_predict: int, reason: str, cycles: int
) -> None:
    engine = memory_engine.engine(None, n_ctx=512)
    runner = StartsAhead(engine.target, None)
    engine.scheduler.cycles.runners = [runner]
    start, started = runner.start, []

    def noted(work: Sequence[Work]) -> None:
        started.append(len(runner.under_way))
        start(work)

    runner.start = noted  # type: ignore[method-assign]
    prompt = [2, *batch_invariance.tokens(random.Random(6), 499 if reason == "context" else 9)]
    request = engine.generate(prompt, Options(n_predict, ignore_eos=True))
    list(request)
    assert request.stats.stop_reason == reason and request.stats.cycles == cycles
    assert started == [0, *[1] * (cycles - 1)]


def test_a_cycle_that_was_started_ahead_is_dropped_with_its_requests(plain: ReferenceRuns) -> None:
    engine = memory_engine.engine(None, n_ctx=512, parallel=2)
    runner = StartsAhead(engine.target, None)
    engine.scheduler.cycles.runners = [runner]
    first, second = specs([[2, 9, 5], [2, 30, 7, 11]], n_predict=30)
    request = engine.submit(first.prompt, first.options)
    while len(request.ids) < 5:
        engine.step()
    assert len(runner.under_way) == 1
    request.cancel()
    follower = engine.submit(second.prompt, second.options)
    while engine.step():
        assert runner.under_way or follower.done
    assert batch_invariance.Output.of(follower).ids == plain(second).ids
    assert engine.pool.n_free == engine.pool.n_pages and not runner.under_way


@pytest.mark.parametrize("ahead", [False, True])
def test_the_time_of_a_cycle_is_its_own(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """It includes neither the cycle before it nor the prompts that are computed meanwhile."""
    engine = memory_engine.engine(None, n_ctx=512, parallel=2)
    kind = StartsAhead if ahead else EagerRunner
    runner = kind(engine.target, None)
    engine.scheduler.cycles.runners = [runner]
    fetch, read, seconds = runner.result, engine.backend.read, 0.05

    def result() -> list[Cycle]:
        time.sleep(seconds)
        return fetch()

    def slow_read(*args: Any) -> StepRows:
        time.sleep(4 * seconds)
        return read(*args)

    monkeypatch.setattr(runner, "result", result)
    first = engine.submit([2, 9], Options(16, ignore_eos=True))
    began = time.perf_counter()
    engine.step()
    monkeypatch.setattr(engine.backend, "read", slow_read)
    while engine.step():
        if len(first.ids) == 8:
            second = engine.submit([2, 7], Options(2, ignore_eos=True))
    passed = time.perf_counter() - began
    times = [cycle.step_seconds for cycle in list(first.drain())[2:]]
    assert second.stats.prefill_seconds > 4 * seconds and len(times) == 14
    assert sum(times) <= passed - second.stats.prefill_seconds
    assert sum(t > seconds for t in times) >= 12, "beside a prompt it is the runner's own"


def test_the_time_of_a_step_is_without_its_proposal() -> None:
    engine = memory_engine.engine(DRAFTS["dflash"], n_ctx=512)
    request = engine.submit([2, 9, 5], Options(60, ignore_eos=True, draft_max=5))
    began = time.perf_counter()
    while engine.step():
        pass
    passed = time.perf_counter() - began
    cycles = list(request.drain())
    drafted = sum(cycle.draft_seconds for cycle in cycles)
    assert 0 < drafted < passed
    assert sum(cycle.step_seconds for cycle in cycles) <= passed - drafted


def test_the_callers_time_is_no_cycles() -> None:
    """A cycle that was started ahead runs while the caller does something else."""
    engine = memory_engine.engine(None, n_ctx=512)
    engine.scheduler.cycles.runners = [StartsAhead(engine.target, None)]
    request, inside, more = engine.submit([2, 9], Options(8, ignore_eos=True)), 0.0, True
    while more:
        time.sleep(0.25)
        began = time.perf_counter()
        more = engine.step()
        inside += time.perf_counter() - began
    times = [cycle.step_seconds for cycle in list(request.drain())[1:]]
    assert len(times) == 7 and sum(times) <= inside


def test_the_policy_knows_contexts_of_cycles_started_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = memory_engine.engine(None, n_ctx=512)
    engine.scheduler.cycles.runners = [StartsAhead(engine.target, None)]
    found, plan_ahead = [], engine.lengths.plan_ahead

    def noted(states: Any, counts: Any, most: Any, context: float = 0.0) -> bool:
        found.append(context)
        return plan_ahead(states, counts, most, context)

    monkeypatch.setattr(engine.lengths, "plan_ahead", noted)
    list(engine.generate([2, 9], Options(30, ignore_eos=True)))
    assert found == [engine.target.context_bytes(3 + i) for i in range(len(found))]
    assert len(found) > 20


@pytest.mark.parametrize("suppress", [(), (3, 5)])
def test_batches_of_all_sizes_run_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, suppress: tuple[int, ...]
) -> None:
    """A padded backend records a graph for each, for which other requests would wait."""
    monkeypatch.setattr(TorchBackend, "padded", True)
    engine = memory_engine.engine(None, n_ctx=512, parallel=6, pool=2048)
    engine.tokenizer.suppress_ids = suppress
    started, start = [], engine.scheduler.cycles.runners[0].start

    def record(work: Sequence[Work]) -> None:
        started.append((len(work), work[0].chooser.sampler.suppress))
        start(work)

    monkeypatch.setattr(engine.scheduler.cycles.runners[0], "start", record)
    for _ in range(2):
        list(engine.generate([2, 9], Options(3, ignore_eos=True)))
    batches = {*(1 << i for i in range(3)), min(6, engine.pool.n_pages)}
    assert started == [(n, suppress) for n in (*sorted(batches), 1, 1, 1, 1)]
    assert len(engine.pool.free_slots) == 6 and engine.pool.n_free == engine.pool.n_pages
    assert gc.get_freeze_count(), "a full collection would be a pause of all requests"
    engine.close()
    assert not gc.get_freeze_count()


@pytest.mark.parametrize("kind", sample(["dflash", None, "eagle3"], 1))
def test_a_cycle_runs_in_the_middle_of_a_block(plain: ReferenceRuns, kind: str | None) -> None:
    rng = random.Random(8)
    long, short = ([2, *batch_invariance.tokens(rng, n)] for n in (2 * PROMPT_BLOCK, 20))
    todo = specs([short, long], n_predict=40, draft_max=2)
    engine = memory_engine.engine(DRAFTS[kind] if kind else None, n_ctx=1200, parallel=2, pool=2400)
    first = engine.submit(short, todo[0].options)
    while len(first.ids) < 4:
        engine.step()
    second, cycles = engine.submit(long, todo[1].options), []
    while not second.ids:
        before = first.stats.cycles
        engine.step()
        cycles.append(first.stats.cycles - before)
    assert cycles[:2] == [2, 2]
    for spec, request in zip(todo, (first, second), strict=True):
        assert batch_invariance.Output.of(request).ids == plain(spec).ids


@pytest.mark.parametrize(
    "kind", sample(["dflash", "dflash-window", "dspark", "dflash2", "eagle3"], 1)
)
def test_how_a_draft_catches_up_does_not_change_proposals(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rng, outputs, most = random.Random(9), [], []
    prompts = [[2, *batch_invariance.tokens(rng, 30 + i)] for i in range(3)]
    for rows in (MAX_STEP_ROWS, None):
        engine = memory_engine.engine(DRAFTS[kind], n_ctx=512, parallel=3, pool=1800, chunk=16)
        assert engine.draft is not None
        if rows:
            monkeypatch.setattr(engine.draft, "commit_rows", rows)
        commit, sizes = engine.draft.commit, list[int]()

        def note(
            rows: StepRows, accepted: Any, commit: Any = commit, sizes: list[int] = sizes
        ) -> None:
            sizes += rows.batch.sizes
            commit(rows, accepted)

        def rest(states: Any, room: list[int], lost: float) -> list[int]:
            step = engine.scheduler.cycles.n_steps  # noqa: B023
            return [min(n, 4 * (step % 60 == 59)) for n in room]

        monkeypatch.setattr(engine.lengths, "_choose", rest)
        requests = [engine.submit(p, Options(130, ignore_eos=True)) for p in prompts]
        while not all(len(r.ids) > 1 for r in requests):
            engine.step()
        monkeypatch.setattr(engine.draft, "commit", note)
        outputs.append([batch_invariance.Output.of(r).proposals for r in requests])
        most.append(max(sizes))
    assert outputs[0] == outputs[1] and any(any(p) for p in outputs[0])
    limit = {"eagle3": MAX_STEP_ROWS, "dflash-window": 10 + 2 * MAX_STEP_ROWS}  # a ring's rows
    assert most[0] == MAX_STEP_ROWS and most[1] == limit.get(kind, 56), most


def test_no_cycle_in_a_block_preempts_its_request() -> None:
    """The newest request would lose its pages while they are written."""
    engine = memory_engine.engine(None, n_ctx=1200, parallel=2, pool=1200)
    first = engine.submit([2, 9], Options(200, ignore_eos=True))
    while len(first.ids) < PAGE - 2 * MAX_STEP_ROWS - 4:
        engine.step()
    second = engine.submit([2] * PROMPT_BLOCK, Options(4, ignore_eos=True))
    engine.scheduler._admit()
    taken = [engine.pool._free.pop() for _ in range(engine.pool.n_free)]
    before, task = first.stats.cycles, engine.scheduler.running[-1]
    while engine.scheduler.cycles.pages_missing(engine.scheduler.running[:1]) == 0:
        engine.scheduler._cycle(after_prefill=False)
        before = first.stats.cycles
    assert engine.scheduler._prefill() and task.seq.n_read == PROMPT_BLOCK
    assert first.stats.cycles == before
    engine.pool._free += taken
    while engine.step():
        pass
    assert len(first.ids) == 200 and len(second.ids) == 4 and not second.stats.preempted


def specs(prompts: list[list[int]], **options: object) -> list[RequestSpec]:
    """Return requests that are all submitted at once."""
    merged = Options(**{"ignore_eos": True, "draft_max": 5, **options})  # type: ignore[arg-type]
    return [RequestSpec(prompt, merged, 0, None) for prompt in prompts]


@pytest.mark.parametrize("kind", sample(["dflash", "eagle3", "eagle3-two-layers", "p-eagle"], 2))
def test_shared_pages_do_not_change_proposals(kind: str) -> None:
    """A draft must not write into pages that another request shares."""
    rng = random.Random(3)
    shared = [2, *batch_invariance.tokens(rng, 511)]
    engine = memory_engine.engine(
        DRAFTS[kind], n_ctx=768, parallel=2, pool=2000, prefix_bytes=batch_invariance.PREFIX_BYTES
    )
    list(engine.generate([*shared, 5], Options(1)))
    todo, alone = (
        specs([[*shared, 33, 44], [*shared, 77, 12, 9]], n_predict=20),
        ReferenceRuns(kind),
    )
    run = batch_invariance.run_batched(engine, todo)
    assert [r.stats.cached_tokens for r in run.requests] == [512, 512]
    for spec, (got,) in zip(todo, run.answers, strict=True):
        want = alone(spec)
        assert not batch_invariance.output_difference(got, want)
        assert not batch_invariance.proposal_difference(got, want)


def test_a_repeated_prompt_of_whole_blocks_leaves_a_token_to_compute(plain: ReferenceRuns) -> None:
    prompt = [2, *batch_invariance.tokens(random.Random(4), PROMPT_BLOCK - 1)]
    engine = memory_engine.engine(
        None, n_ctx=768, parallel=2, pool=2000, prefix_bytes=batch_invariance.PREFIX_BYTES
    )
    (spec,) = specs([prompt], n_predict=5)
    for _ in range(2):
        run = batch_invariance.run_batched(engine, [spec])
        assert run.requests[0].stats.cached_tokens == 0
        assert not batch_invariance.output_difference(run.answers[0][0], plain(spec))


@pytest.mark.parametrize("n_ctx", [20, 128])
@pytest.mark.parametrize("kind", sample(DRAFTS, 3))
def test_proposals_at_the_end_of_the_context(kind: str, n_ctx: int) -> None:
    """Rows of a draft block after the end of the context do not change the proposal."""
    rng = random.Random(5)
    todo = specs(
        [[2, *batch_invariance.tokens(rng, n_ctx - 11 + i)] for i in range(2)], n_predict=99
    )
    run = batch_invariance.run_batched(
        memory_engine.engine(DRAFTS[kind], n_ctx=n_ctx, parallel=2, pool=1000), todo
    )
    roomy = ReferenceRuns(kind)
    assert run.most_live == 2
    for spec, (got,) in zip(todo, run.answers, strict=True):
        assert got.reason == "context" and len(got.ids) == n_ctx - len(spec.prompt) + 1
        want = roomy(replace(spec, options=replace(spec.options, n_predict=len(got.ids) + 6)))
        assert (got.ids, got.logits) == (want.ids[: len(got.ids)], want.logits[: len(got.ids)])
        place = len(spec.prompt)  # of the anchor
        for drafted, more, size in zip(
            got.proposals[1:], want.proposals[1:], got.sizes[1:], strict=False
        ):
            assert drafted == more[: n_ctx - 1 - place], place
            place += size
        assert place == n_ctx


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
@pytest.mark.parametrize("count", [1, 2])
def test_predicting_rows_of_several_texts_are_packed(kind: str, count: int) -> None:
    """Kernels read rows without gaps, which flattening one row of each block would leave."""
    draft: Any = memory_engine.engine(DRAFTS[kind], parallel=2).draft
    block = torch.arange(3 * 8 * 4.0).view(3, 8, 4)
    rows = draft.draft_rows(block, count).flatten(0, 1)
    assert rows.is_contiguous() and rows.shape == (3 * count, 4)
    assert rows[0, 0] in block[0, :2, 0] and rows[-1, 0] - rows[0, 0] == 64 + 4 * (count - 1)
