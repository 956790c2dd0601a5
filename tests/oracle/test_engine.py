"""From checkpoint folders through the converter to text: a draft never changes it.

The oracle is plain decoding by the same engine. Random drafts are hardly ever right, so `help_out`
replaces the start of their proposals by the true text, a different number of tokens each time.
Every acceptance count then occurs, including its effect on the draft's own caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec import convert
from g4spec.core import MAX_STEP_ROWS, Batch, Draft, Pick, Sequence
from g4spec.ops.kv import LayerKV
from g4spec.ops.sampling import Sampler
from g4spec.runtime import pending_rows
from g4spec.runtime.engine import Engine
from g4spec.runtime.pending_rows import PendingRows
from g4spec.runtime.request import Options, Request
from tests.oracle import build
from tests.support import tiny
from tests.support.auto_drafts import proposals, set_costs
from tests.support.selection import sample

pytestmark = pytest.mark.oracle

WINDOW, VOCAB, NEW, CTX = 16, 512, 40, 256
SECOND = 2 * WINDOW  # tokens of a second text, which wrap the ring
KINDS = ["zlab", "speculators", "assistant", "centroids", "ngram"]
SAMPLERS = [
    Sampler(),
    Sampler(temperature=1.0, seed=3),
    Sampler(temperature=0.8, top_k=12, seed=4),
    Sampler(temperature=1.2, top_p=0.7, seed=5),
    Sampler(temperature=1.5, min_p=0.1, top_k=40, top_p=0.9, seed=2**64 - 1),
]
PROMPT = build.prompt(3 * WINDOW + 3, VOCAB, 7)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`<name>.gguf` of a target and of every kind of draft; the target is in Q8_0."""
    at = tmp_path_factory.mktemp("family")
    target = build.with_large_layers(
        tiny.target(at / "target", layers=6, period=3, window=WINDOW, vocab=VOCAB, dtype="F32"), 3.0
    )
    tiny.zlab_dflash(at / "zlab", target, layers=3, block=16, window=WINDOW)
    tiny.speculators_dflash(at / "speculators", target, layers=3, block=8, window=WINDOW)
    tiny.assistant(at / "assistant", target)
    tiny.assistant(at / "centroids", target, centroids=16)
    convert.convert(target, at / "target.gguf")
    for kind in KINDS[:-1]:
        convert.convert(at / kind, at / f"{kind}.gguf", target=target, type="f32")
    return at


def load(family: Path, kind: str | None, **settings: Any) -> Engine:
    draft = family / f"{kind}.gguf" if kind not in (None, "ngram") else kind
    return Engine.load(family / "target.gguf", draft, **({"n_ctx": CTX, "chunk": 64} | settings))


_PLAIN: dict[tuple[Path, Sampler], Request] = {}


def undrafted(family: Path, sampler: Sampler = SAMPLERS[0]) -> Request:
    """Return the finished request for `NEW` tokens without a draft, computed once."""
    if (family, sampler) not in _PLAIN:
        _PLAIN[family, sampler] = generate(load(family, None), sampler=sampler)
    return _PLAIN[family, sampler]


def generate(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> Request:
    options = {"n_predict": NEW, "draft_max": 15, "ignore_eos": True} | options
    run = engine.generate(prompt, Options(**options))
    for _ in run:
        pass
    return run


def help_out(engine: Engine, truth: list[int], right: Callable[[int], int]) -> None:
    """Replace the first `right(i)` tokens of the draft's i-th proposal by those of `truth`."""
    draft: Any = engine.draft
    propose, turn = type(draft).propose, iter(range(10**6))

    def better(batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        own = propose(draft, batch, count, pick)[0].clamp(min=0).tolist()
        after = int(batch.positions[0]) + 1
        true = truth[after : after + min(count, right(next(turn)))]
        return batch.ids.new_tensor([[*true, *own[len(true) :]]])

    draft.propose = better


@pytest.mark.parametrize("kind", sample(KINDS, 2))
@pytest.mark.parametrize("sampler", sample(SAMPLERS, 2), ids=str)
def test_every_setting(family: Path, kind: str, sampler: Sampler) -> None:
    """Each kind and window with each sampler: drafts of 15 tokens, of which 0 to 15 are right.
    Greedily also drafts of 1 and 6 tokens, and ones that are always wrong."""
    plain = undrafted(family, sampler)
    assert len(set(plain.ids)) > 5 and plain.stats.stop_reason == "length"
    some, none = (lambda i: i % 16), (lambda i: 0)
    settings = [(15, some)]
    if sampler == SAMPLERS[0]:
        settings = [(1, none), (1, some), (6, none), (6, some), (15, none), (15, some)]
    windows = [None, 10] if kind in ("zlab", "speculators") else [None]
    for window in windows:
        engine = load(family, kind, draft_window=window)
        for count, right in settings:
            help_out(engine, PROMPT + plain.ids, right)
            run = generate(engine, sampler=sampler, draft_max=count)
            assert run.ids == plain.ids and run.text == plain.text, (window, count)
            assert run.stats.stop_reason == "length" and run.stats.drafted
        assert run.stats.accepted > 5


@pytest.mark.parametrize("kind", sample(KINDS, 2))
def test_auto_and_no_draft(family: Path, kind: str) -> None:
    plain, engine = undrafted(family), load(family, kind)
    for count in (0, "auto", 0, "auto"):
        assert generate(engine, draft_max=count).ids == plain.ids
    assert generate(engine, n_predict=1).ids == plain.ids[:1]


@pytest.mark.parametrize("kind", sample(KINDS, 2))
def test_a_prompt_of_one_token(family: Path, kind: str) -> None:
    plain = generate(load(family, None), [2], n_predict=3 * WINDOW)
    engine = load(family, kind)
    help_out(engine, [2, *plain.ids], lambda i: i % 5)
    assert generate(engine, [2], n_predict=3 * WINDOW).ids == plain.ids


@pytest.mark.parametrize("kind", sample(KINDS, 2))
def test_the_end_of_the_context(family: Path, kind: str) -> None:
    """For every distance between a cycle and the end: the same text and stop reason."""
    long = undrafted(family).ids
    for room in (0, 1, 2, 5, 9, 15, 16, 17):
        n_ctx = len(PROMPT) + room
        if kind == KINDS[0]:
            plain = generate(load(family, None, n_ctx=n_ctx), n_predict=999)
            assert plain.stats.stop_reason == "context" and plain.ids == long[: room + 1]
        for right in (0, 4, 15):
            engine = load(family, kind, n_ctx=n_ctx)
            help_out(engine, PROMPT + long, lambda i, n=right: n)
            run = generate(engine, n_predict=999)
            assert (run.ids, run.stats.stop_reason) == (long[: room + 1], "context"), (room, right)


@pytest.mark.parametrize("kind", sample(["zlab", "assistant"], 1))
def test_stop_tokens_that_were_drafted_and_accepted(family: Path, kind: str) -> None:
    long = undrafted(family).ids
    for at in (0, 1, 7):
        stop = frozenset({long[at]})
        first = long.index(long[at])
        for right in (0, 3, 15):
            engine = load(family, kind)
            engine.tokenizer.stop_ids = stop
            help_out(engine, PROMPT + long, lambda i, n=right: n)
            run = generate(engine, ignore_eos=False)
            assert run.ids == long[:first] and run.stats.stop_reason == f"stop token {long[at]}"
            more = first + 4
            assert generate(engine, n_predict=more).ids == long[:more], "ignore_eos"


@pytest.mark.parametrize("kind", sample(["zlab", "assistant"], 1))
def test_stop_texts_across_drafted_tokens(family: Path, kind: str) -> None:
    whole = undrafted(family)
    text = whole.text
    for at in range(4, len(text) - 6, 11):
        stop = (text[at : at + 4], "never seen")
        plain = generate(load(family, None), stop=stop)
        assert (
            plain.text == text[: text.index(stop[0])] and plain.stats.stop_reason == "stop string"
        )
        engine = load(family, kind)
        help_out(engine, PROMPT + whole.ids, lambda i: i % 16)
        run = generate(engine, stop=stop)
        assert (run.ids, run.text) == (plain.ids, plain.text)
        assert run.stats.stop_reason == "stop string"


def caches(engine: Engine) -> list[LayerKV]:
    assert engine.draft is not None
    return [*engine.target.caches, *engine.draft.caches]


@pytest.mark.parametrize("kind", sample(KINDS, 1))
def test_an_earlier_sequence_has_no_effect(family: Path, kind: str) -> None:
    """Texts and proposals of a second prompt equal those of a new engine, also if all rows of the
    first were replaced by NaN or large numbers."""
    second = build.prompt(WINDOW // 2, VOCAB, 8)
    options = Options(SECOND, draft_max=6, ignore_eos=True)
    want = list(load(family, kind).generate(second, options))
    used = load(family, kind)
    generate(used, draft_max=6)
    for poison in (None, math.nan, 1e4):
        for kv in caches(used) if poison is not None else ():
            kv._rows.fill_(poison)
        got = list(used.generate(second, options))
        assert [c.tokens for c in got] == [c.tokens for c in want], poison
        assert [c.drafted for c in got] == [c.drafted for c in want], poison


def plan_lengths(engine: Engine, count: Callable[[int], int]) -> None:
    """Make every cycle draft `count(most)` tokens."""
    engine.lengths.plan = lambda texts, most, _: [count(m) for m in most]  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["zlab", "speculators", "assistant"])
def test_late_catch_up_does_not_change_proposals(family: Path, kind: str) -> None:
    """Cycles without a draft in between (as in `auto`) do not change later proposals."""
    every, some = load(family, kind), load(family, kind)
    want = proposals(
        len(PROMPT), every.generate(PROMPT, Options(NEW, draft_max=6, ignore_eos=True))
    )
    turns = iter(range(10**6))
    plan_lengths(some, lambda most: 0 if next(turns) % 9 else min(6, most))
    run = some.generate(PROMPT, Options(NEW, draft_max=6, ignore_eos=True))
    drafted = proposals(len(PROMPT), run)
    compared = [at for at in drafted if at in want]
    assert all(drafted[at] == want[at][: len(drafted[at])] for at in compared)
    assert run.ids == undrafted(family).ids and len(compared) >= 3


@pytest.mark.parametrize(("most", "given_up"), [(20, True), (NEW, False)])
def test_a_draft_that_is_never_used_is_dropped(
    family: Path, most: int, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that it has not read yet take memory."""
    monkeypatch.setattr(pending_rows, "MAX_LAG", most)
    engine = load(family, "zlab")
    plan_lengths(engine, lambda most: 0)
    run = engine.generate(PROMPT, Options(NEW, draft_max=6, ignore_eos=True))
    cycles = iter(run)
    next(cycles)
    sequence = engine.scheduler.running[0].seq
    waiting = [len(sequence.pending) for _ in cycles]
    assert run.ids == undrafted(family).ids
    assert max(waiting) == (most if given_up else NEW - 1)
    assert any("no proposal was worth its time" in note for note in run.notes) == given_up


@pytest.mark.parametrize("pays", [True, False])
def test_a_draft_that_will_pay_keeps_up(
    family: Path, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts do not pay for two texts, but, if `pays`, for the one that is left: it has lagged
    behind by more rows than are kept."""
    monkeypatch.setattr(pending_rows, "MAX_LAG", 8)
    always = load(family, "zlab").generate(PROMPT, Options(NEW, draft_max=6, ignore_eos=True))
    engine = load(family, "zlab", parallel=2)
    alone = 1.1 if pays else 9.0
    set_costs(engine, {(1, 0): 1.0, (1, 6): alone, (2, 0): 1.0, (2, 6): 9.0})
    long, short = (engine.submit(PROMPT, Options(n, ignore_eos=True)) for n in (NEW, NEW // 2))
    assert not proposals(len(PROMPT), short)
    drafted, wanted = (proposals(len(PROMPT), text) for text in (long, always))
    assert long.ids == always.ids and short.ids == long.ids[: NEW // 2]
    assert all(ids[:6] == wanted[at][: len(ids)] for at, ids in drafted.items())
    assert bool(drafted) == pays
    assert any("no proposal was worth its time" in note for note in long.notes) != pays


def test_drafts_that_are_not_used_take_bounded_memory(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more texts they may lag behind by fewer rows. The plan counts the memory."""
    engine = load(family, "zlab", parallel=2)
    assert engine.draft is not None
    row = 4 * engine.config.n_embd * (1 + len(engine.draft.taps))
    monkeypatch.setattr(pending_rows, "MAX_BYTES", 2 * 20 * row)
    monkeypatch.setattr(pending_rows, "MAX_ROWS_AT_ONCE", 0)
    planned = pending_rows.max_bytes(engine.config.n_embd, len(engine.draft.taps), 2)
    assert planned == 2 * (20 + MAX_STEP_ROWS) * row
    plan_lengths(engine, lambda most: 0)
    asked = Options(NEW, draft_max=6, ignore_eos=True)
    requests = [engine.submit(PROMPT, asked) for _ in range(2)]
    waiting = set[int]()
    while engine.step():
        waiting.add(sum(len(task.seq.pending) for task in engine.scheduler.running))
    assert max(waiting) in (39, 40)
    assert all(r.ids == undrafted(family).ids and r.notes for r in requests)


def test_late_catch_up_across_the_end_of_the_buffer(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_rows, "MAX_BYTES", 0)
    test_late_catch_up_does_not_change_proposals(family, "zlab")


@pytest.mark.parametrize("kind", sample(["zlab", "assistant"], 1))
def test_a_draft_that_missed_tokens_differs(
    family: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the test above fails if the draft does not get the rows of plain cycles."""
    flush = PendingRows.flush

    def careless(self: PendingRows, draft: Draft, sequences: list[Sequence]) -> None:
        for s in sequences:
            if len(s.pending) > 7:  # more than those of a drafted cycle
                s.pending.clear()
        flush(self, draft, sequences)

    monkeypatch.setattr(PendingRows, "flush", careless)
    with pytest.raises(AssertionError):
        test_late_catch_up_does_not_change_proposals(family, kind)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_broken_draft_is_reported_once(family: Path, kind: str) -> None:
    plain = undrafted(family)
    engine = load(family, kind)
    draft: Any = engine.draft
    name = "output_norm.weight"
    draft.w[name] = torch.full_like(draft.w[name], math.nan)
    run = generate(engine)
    assert run.ids == plain.ids and run.stats.drafted == 0
    assert len([n for n in run.notes if "cannot be used" in n]) == 1
