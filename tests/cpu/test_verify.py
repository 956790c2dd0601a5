"""`verify` passes for any correct draft and fails for every planted bug."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from g4spec.core import Batch
from g4spec.errors import UsageError
from g4spec.measure import verify
from g4spec.runtime import chooser
from tests.support import bench_engine, memory_engine, memory_models


def todo(count: int = 16) -> list[verify.Case]:
    return verify.cases(bench_engine.prompts(), count, 15)


def test_ngram_lookup_does_not_change_the_text() -> None:
    verdict = verify.verify(bench_engine.engine(), todo(), 16)
    assert verdict.ok and verdict.cases == 16 and verdict.tokens == 16 * 16
    assert verdict.accepted > 0
    assert verdict.same_logits == verdict.tokens


def test_more_tokens_than_the_context_are_refused() -> None:
    engine = bench_engine.engine(n_ctx=64)
    with pytest.raises(UsageError, match=r"`n_predict`.*less than the context, 64"):
        verify.verify(engine, todo(1), 64)


def test_no_tokens_are_nothing_to_verify() -> None:
    with pytest.raises(UsageError, match=r"`n_predict`: expected >= 1"):
        verify.verify(bench_engine.engine(), todo(1), 0)


def test_a_model_draft_does_not_change_the_text() -> None:
    engine = memory_engine.engine(memory_models.dflash_draft)
    verdict = verify.verify(engine, todo(8), 24)
    assert verdict.ok and verdict.drafted > 0


def test_a_draft_that_is_always_wrong_does_not_change_the_text() -> None:
    verdict = verify.verify(bench_engine.engine(bench_engine.ConstantDraft()), todo(8), 24)
    assert verdict.ok and verdict.accepted < verdict.drafted / 10


def test_a_draft_without_proposals_is_not_a_pass() -> None:
    silent = bench_engine.ConstantDraft()
    silent.propose = lambda batch, count, pick: (  # type: ignore[method-assign]
        batch.ids.new_full((len(batch.sizes), count), -1)
    )
    verdict = verify.verify(bench_engine.engine(silent), todo(4), 8)
    assert verdict.mismatch is None and not verdict.ok


def accept_first_unverified(
    logits: torch.Tensor, drafted: Sequence[int], position: int, *of: Any, chooser: Any
) -> list[int]:
    """Plant a bug: the first drafted token is accepted without verification."""
    if not drafted:
        return [chooser.choose(logits[0], position)]
    return [drafted[0], chooser.choose(logits[1], position + 1)]


def ignore_row_positions(
    logits: torch.Tensor, drafted: Sequence[int], position: int, *of: Any, chooser: Any
) -> list[int]:
    """Plant a bug: all rows of a step use the noise of the first row."""
    chosen: list[int] = []
    for row, proposed in zip(logits, [*drafted, None], strict=True):
        chosen.append(chooser.choose(row, position))
        if chosen[-1] != proposed:
            break
    return chosen


def test_an_unverified_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "choose_rows", accept_first_unverified)
    verdict = verify.verify(bench_engine.engine(bench_engine.ConstantDraft()), todo(), 24)
    found = verdict.mismatch
    assert found is not None and not verdict.ok
    assert found.speculative.id != found.plain.id
    assert found.plain.logit is not None and found.speculative.logit is not None
    for part in (f"token {found.index}", str(found.plain.id), str(found.speculative.id), "logit"):
        assert part in str(found)
    assert found.json()["case"]["prompt"] == found.case.prompt.name


def test_wrong_noise_is_found_above_temperature_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "choose_rows", ignore_row_positions)
    verdict = verify.verify(bench_engine.engine(), todo(32), 40)
    assert verdict.mismatch is not None and verdict.mismatch.case.sampler.temperature > 0


def test_a_cache_that_is_not_rolled_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench_engine.engine(bench_engine.ConstantDraft())
    honest, late = engine.target.step, list[int]()

    def run(batch: Batch) -> Any:
        # The step reads a rejected token in the place of a committed one.
        ids = batch.ids.tolist()
        out = honest(batch.with_ids(batch.ids.new_tensor([*late, *ids][: len(ids)])))
        late[:] = ids[1:2]
        return out

    monkeypatch.setattr(engine.target, "step", run)
    assert verify.verify(engine, todo(), 24).mismatch is not None


def test_a_shorter_text_is_a_difference() -> None:
    engine = bench_engine.engine()
    case = todo(1)[0]
    found = verify._mismatch(engine, case, ([5, 6], [1.0, 2.0]), ([5], [1.0]))
    assert found.index == 1 and found.plain.id == 6 and found.speculative.id is None


def test_cases_cover_everything_evenly() -> None:
    prompts = bench_engine.prompts(4)
    cases = verify.cases(prompts, 80, 7)
    assert cases == verify.cases(prompts, 80, 7)
    assert cases[:40] != verify.cases(prompts, 80, 7, seed=1)[:40]
    lengths = Counter(c.length for c in cases)
    assert set(lengths) == {1, 2, 3, 4, 5, 7, "auto"}
    names = Counter(c.prompt.name for c in cases)
    assert max(names.values()) - min(names.values()) <= 1
    assert len({c.sampler.seed for c in cases}) == 80
    assert {c.sampler.temperature for c in cases} == {0.0, 0.7, 0.8, 1.0, 1.5}
    assert len({(c.prompt.name, c.length) for c in cases}) > 35


def test_wrong_use() -> None:
    with pytest.raises(UsageError, match="`count`"):
        todo(0)
    engine = bench_engine.engine()
    engine.draft = None
    with pytest.raises(UsageError, match="`draft`"):
        verify.verify(engine, todo(1))


# ---- several cases at once


@pytest.mark.parametrize("parallel", [3, 5])
def test_cases_in_a_batch_do_not_change_texts(parallel: int) -> None:
    engine = memory_engine.engine(memory_models.dflash_draft, parallel=parallel, pool=2000)
    live = []
    step = engine.scheduler.step

    def watched() -> bool:
        live.append(len(engine.scheduler.running))
        return step()

    engine.scheduler.step = watched  # type: ignore[method-assign]
    verdict = verify.verify(engine, todo(8), 12, parallel=parallel)
    assert verdict.ok and verdict.cases == 8 and verdict.tokens == 8 * 12
    assert verdict.same_logits == verdict.tokens
    assert max(live) == parallel and verdict.json()["parallel"] == parallel
    for case in (1, 2):
        assert live.count(case), "plain ones ran alone, the last group is smaller"


@pytest.mark.parametrize("draft", [True, False])
def test_a_text_that_depends_on_its_batch_is_found(draft: bool) -> None:
    """Single texts are right; only several at once show the fault, also without a draft."""
    make = memory_models.dflash_draft if draft else None
    engine = memory_engine.engine(make, parallel=3, pool=2000)
    cases = verify.cases(bench_engine.prompts(), 6, 15 if draft else 0)
    assert verify.verify(engine, cases, 12, parallel=3).ok
    honest = engine.target.step

    def run(batch: Batch) -> Any:
        rows, logits = honest(batch)
        if len(batch.sizes) > 1:  # the last text reads the logits of the one before it
            n = batch.sizes[-1]
            logits[-n:] = logits[-n - 1 : -n]
        return rows, logits

    engine.target.step = run  # type: ignore[method-assign]
    if draft:
        assert verify.verify(engine, cases, 12).ok
    verdict = verify.verify(engine, cases, 12, parallel=3)
    assert not verdict.ok and verdict.mismatch is not None
    assert ("with other texts" in str(verdict.mismatch)) == (not draft)
