"""Answers in company equal the same alone: text, logits, log-probabilities and proposals, bit for
bit, whatever arrives, ends, is cancelled, preempted or begins with a prefix hit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from g4spec.core import Cycle, Draft, Work
from g4spec.runtime.eager_runner import EagerRunner
from g4spec.runtime.request import Options
from g4spec.runtime.target import Target
from tests.support import batch_invariance, memory_engine
from tests.support.batch_invariance import Alone, Ask
from tests.support.memory_engine import DRAFTS


@pytest.fixture(scope="module")
def plain() -> Alone:
    return Alone()


@pytest.mark.parametrize("number,kind", enumerate(batch_invariance.KINDS), ids=str)
def test_answers_in_company_equal_those_alone(plain: Alone, number: int, kind: str | None) -> None:
    parallel = batch_invariance.PARALLEL[number % 4]
    verdict = batch_invariance.judge(kind, parallel, f"suite {kind}", 4, 24, plain=plain)
    assert not verdict.wrong
    assert verdict.tokens and (verdict.most_live > 1 or parallel == 1)


@pytest.mark.parametrize("kind", [None, "dflash", "eagle3"])
def test_a_pool_that_is_too_small(plain: Alone, kind: str | None) -> None:
    """Texts are preempted, read again and go on as if nothing had happened."""
    rng = random.Random(1)
    todo = asks(
        [[2, *batch_invariance.tokens(rng, 97 + i)] for i in range(4)], n_predict=33, logprobs=2
    )
    engine = memory_engine.engine(DRAFTS[kind] if kind else None, n_ctx=512, parallel=8)
    assert engine.pool.n_pages == 5, "three texts fit with a page each, and not with two"
    crowd = batch_invariance.together(engine, todo)
    assert crowd.preempted
    same = Alone(kind)
    for ask, (got,) in zip(todo, crowd.answers, strict=True):
        assert not batch_invariance.difference(got, plain(ask))
        assert not batch_invariance.proposals_differ(got, same(ask))


class Ahead(EagerRunner):
    """Cycles that are started before the one before them is asked for, as on a GPU."""

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


@pytest.mark.parametrize("kind", [None, "dflash"])
def test_cycles_started_ahead_have_their_pages(plain: Alone, kind: str | None) -> None:
    """Long texts whose cycles are all alike: each is started while the one before is under way."""
    rng = random.Random(6)
    todo = asks(
        [[2, *batch_invariance.tokens(rng, 100 + i)] for i in range(2)], n_predict=200, draft_max=2
    )
    engine = memory_engine.engine(DRAFTS[kind] if kind else None, n_ctx=512, parallel=2, pool=2000)
    engine.scheduler.runners = [Ahead(engine.target, engine.draft)]
    crowd = batch_invariance.together(engine, todo)
    for ask, (got,) in zip(todo, crowd.answers, strict=True):
        assert not batch_invariance.difference(got, plain(ask))


def asks(prompts: list[list[int]], **options: object) -> list[Ask]:
    """Requests that are made at once."""
    made = Options(**{"ignore_eos": True, "draft_max": 5, **options})  # type: ignore[arg-type]
    return [Ask(prompt, made, 0, None) for prompt in prompts]


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "eagle3-two-layers", "p-eagle"])
def test_texts_that_share_pages_draft_as_alone(kind: str) -> None:
    """What a draft writes for one text must not be seen by another that begins alike."""
    rng = random.Random(3)
    shared = [2, *batch_invariance.tokens(rng, 511)]
    engine = memory_engine.engine(
        DRAFTS[kind], n_ctx=768, parallel=2, pool=2000, prefix_bytes=batch_invariance.PREFIX_BYTES
    )
    list(engine.generate([*shared, 5], Options(1)))
    todo, alone = asks([[*shared, 33, 44], [*shared, 77, 12, 9]], n_predict=20), Alone(kind)
    crowd = batch_invariance.together(engine, todo)
    assert [r.stats.cached_tokens for r in crowd.requests] == [512, 512]
    for ask, (got,) in zip(todo, crowd.answers, strict=True):
        want = alone(ask)
        assert not batch_invariance.difference(got, want)
        assert not batch_invariance.proposals_differ(got, want)


@pytest.mark.parametrize("n_ctx", [20, 128])
@pytest.mark.parametrize("kind", DRAFTS)
def test_proposals_at_the_end_of_the_context(kind: str, n_ctx: int) -> None:
    """The rows of a draft's block stand behind the last position, where they are in nobody's way:
    the proposal is that with more room."""
    rng = random.Random(5)
    todo = asks(
        [[2, *batch_invariance.tokens(rng, n_ctx - 11 + i)] for i in range(2)], n_predict=99
    )
    crowd = batch_invariance.together(
        memory_engine.engine(DRAFTS[kind], n_ctx=n_ctx, parallel=2, pool=1000), todo
    )
    roomy = Alone(kind)
    assert crowd.most_live == 2
    for ask, (got,) in zip(todo, crowd.answers, strict=True):
        assert got.reason == "context" and len(got.ids) == n_ctx - len(ask.prompt) + 1
        want = roomy(replace(ask, options=replace(ask.options, n_predict=len(got.ids) + 6)))
        assert (got.ids, got.logits) == (want.ids[: len(got.ids)], want.logits[: len(got.ids)])
        place = len(ask.prompt)  # of the anchor
        for drafted, more, size in zip(
            got.proposals[1:], want.proposals[1:], got.sizes[1:], strict=False
        ):
            assert drafted == more[: n_ctx - 1 - place], place
            place += size
        assert place == n_ctx
