"""Losslessness by construction: the bits of a row do not depend on the other rows of its batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from g4spec.core import Batch, CacheShape, Cycle, Pick, Work
from g4spec.errors import InputError
from g4spec.ops.kv import LayerKV, Space
from g4spec.ops.reference import TILE, Ops
from g4spec.ops.sampling import Sampler
from g4spec.ops.spans import BLOCK, Span
from g4spec.runtime.eager_runner import EagerRunner
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Request
from tests.support import memory_engine
from tests.support import memory_models as mm
from tests.support.batch_invariance import leaked_resources
from tests.support.bench_engine import ConstantDraft
from tests.support.memory_engine import DRAFTS
from tests.support.one_sequence import SequenceTarget
from tests.support.selection import sample

PROMPT = [2, *((i * 37) % 150 + 5 for i in range(3 * mm.WINDOW + 1))]


@pytest.mark.parametrize("k,n", [(48, 96), (96, 48), (250, 77), (256, 1024), (1024, 256)])
def test_linear_row_is_independent_of_row_count_and_place(k: int, n: int) -> None:
    ops, g = Ops(), torch.Generator().manual_seed(k)
    w, rows = torch.randn(n, k, generator=g), torch.randn(TILE, k, generator=g)
    want = ops.linear(rows, w)
    for count in range(1, TILE + 1):
        assert torch.equal(ops.linear(rows[:count], w), want[:count])
    for shift in range(TILE):
        order = (torch.arange(TILE) + shift) % TILE
        assert torch.equal(ops.linear(rows[order], w), want[order])
    assert torch.equal(ops.linear(rows.repeat(3, 1)[: 2 * TILE + 5], w)[TILE : 2 * TILE], want)


@pytest.mark.parametrize("width", [16, 48, 64, 77, 1024])
def test_activations_and_norms_do_not_depend_on_place(width: int) -> None:
    ops, g = Ops(), torch.Generator().manual_seed(width)
    x = 3 * torch.randn(TILE, width, generator=g)
    for op in (
        ops.gelu_tanh,
        ops.silu,
        lambda t: ops.softcap(t, 30.0),
        lambda t: ops.rms_norm(t, None, 1e-6),
    ):
        want = op(x)
        for row in range(TILE):
            assert torch.equal(op(x[row : row + 1])[0], want[row])
            assert torch.equal(op(x[row:])[0], want[row])


def test_norms_and_gelu_have_the_bits_of_their_formulas() -> None:
    x = 3 * torch.randn(TILE, 77, generator=torch.Generator().manual_seed(1))
    norm = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(Ops().rms_norm(x, None, 1e-6), norm)
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
    assert torch.equal(Ops().gelu_tanh(x), 0.5 * x * (1.0 + torch.tanh(inner)))


@pytest.mark.parametrize("window", [None, 24])
def test_attention_row_is_independent_of_row_count_place_and_length(window: int | None) -> None:
    ops, g = Ops(), torch.Generator().manual_seed(0)
    total = 3 * BLOCK + 7
    space = Space(2, 512, 8)
    space.assign(1, [3, 1, 7, 2])
    kv = LayerKV(CacheShape(2, 16, window), space, total)
    slots, positions = torch.ones(total, dtype=torch.int64), torch.arange(total)
    kv.append(slots, positions, *torch.randn(2, total, 2, 16, generator=g))
    q = torch.randn(total, 4, 16, generator=g)
    first = positions * 0 if window is None else (positions - window + 1).clamp(min=0)

    def attend(at: slice) -> torch.Tensor:
        part = Batch(positions[at], positions[at], slots[at], (len(positions[at]),))
        return ops.attend(q[at], kv, Span(part, first[at], positions[at]), 1.0)

    want = attend(slice(0, total))
    for begin in (0, 1, 15, 40, 63, 64, 65, total - TILE):
        for count in (1, 2, 3, 7, TILE):
            at = slice(begin, begin + count)
            assert torch.equal(attend(at), want[at]), (begin, count)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_chunks_do_not_change_a_bit(chunk: int) -> None:
    whole, parts = SequenceTarget(mm.target(chunk=512)), SequenceTarget(mm.target(chunk=chunk))
    whole.target.taps = parts.target.taps = (0, 3, 6)
    a = list(whole.prefill(PROMPT))
    b = list(parts.prefill(PROMPT))
    assert torch.equal(a[0].hidden, torch.cat([r.hidden for r in b]))
    assert torch.equal(a[0].taps, torch.cat([r.taps for r in b]))


@pytest.mark.parametrize("rows", range(1, TILE + 1))
def test_step_logits_equal_plain_decoding_at_every_row(rows: int) -> None:
    plain, wide = SequenceTarget(mm.target()), SequenceTarget(mm.target())
    for t in (plain, wide):
        list(t.prefill(PROMPT))
    ids = [(7 * i) % 150 + 5 for i in range(rows)]
    one = [plain.step([t], len(PROMPT) + i).logits[0] for i, t in enumerate(ids)]
    assert torch.equal(wide.step(ids, len(PROMPT)).logits, torch.stack(one))


class GuessingDraft(ConstantDraft):
    """A draft that proposes `guess(position)`: wrong on purpose, random, or the target's own
    text."""

    def __init__(self, name: str, guess: Callable[[int], int]) -> None:
        self.name, self.guess = name, guess

    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        after = [[p + 1 + i for i in range(count)] for p in batch.positions.tolist()]
        return batch.ids.new_tensor([[self.guess(p) for p in row] for row in after])


def generate(
    engine: Engine, sampler: Sampler, count: int, n: int = 60, prompt: Seq[int] = PROMPT
) -> Request:
    """Generate `n` tokens with `count` drafted in every cycle."""
    return engine.submit(prompt, Options(n, sampler, count, ignore_eos=True))


def decode(engine: Engine, sampler: Sampler, count: int, n: int = 60) -> list[tuple[int, float]]:
    """Return the tokens of a text and their logits."""
    cycles = list(generate(engine, sampler, count, n))
    text = [pair for c in cycles for pair in zip(c.tokens, c.logits, strict=True)]
    assert len(text) == n
    return text


@functools.cache
def undrafted(sampler: Sampler, n: int) -> list[tuple[int, float]]:
    return decode(memory_engine.engine(), sampler, 0, n)


SAMPLERS = [
    Sampler(),
    Sampler(temperature=1.0, seed=3),
    Sampler(temperature=0.7, top_k=20, top_p=0.9, seed=4),
    Sampler(temperature=1.5, min_p=0.05, seed=5),
]


@pytest.mark.parametrize("sampler", sample(SAMPLERS, 2), ids=str)
@pytest.mark.parametrize("name", sample(DRAFTS, 3))
def test_text_with_a_draft_equals_text_without(name: str, sampler: Sampler) -> None:
    """Each kind with each sampler, and with each number of drafted tokens."""
    # With 60 tokens, a text reaches the second page of the pool; all overwrite each ring once.
    short, greedy = (
        mm.WINDOW + 8,
        ((1, mm.WINDOW + 8), (2, mm.WINDOW + 8), (5, mm.WINDOW + 8), (15, 60)),
    )
    hot = {
        sampler: ((count, short),) for sampler, count in zip(SAMPLERS[1:], (2, 15, 5), strict=True)
    }
    for count, n in hot.get(sampler, greedy):
        engine = memory_engine.engine(DRAFTS[name])
        assert decode(engine, sampler, count, n) == undrafted(sampler, n), count


class DraftsRarely:
    """Drafts once after every 20 plain steps, as `auto` does with a draft that did not help."""

    wants_costs = False

    _steps = 0

    def plan(self, texts: Seq[Any], most: Seq[int], *args: object) -> list[int]:
        self._steps += 1
        return [0 if self._steps % 21 else min(5, m) for m in most]

    def plan_ahead(self, *args: object) -> bool:
        return False

    def observe(self, *args: object) -> None: ...

    def discard(self, *args: object) -> None: ...

    def decisions(self, step: int, states: Seq[Any], *args: object) -> list[None]:
        return [None] * len(states)


@pytest.mark.parametrize("name", sample(DRAFTS, 2))
def test_late_catch_up_does_not_change_proposals(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def proposals() -> list[list[int]]:
        engine = memory_engine.engine(DRAFTS[name])
        engine.scheduler.cycles.length = DraftsRarely()  # type: ignore[assignment]
        return [c.drafted for c in generate(engine, Sampler(), 5, 80) if c.drafted]

    late, start, flushed = proposals(), EagerRunner.start, []

    def at_once(self: EagerRunner, work: Seq[Work]) -> None:
        assert self._draft is not None
        flushed.append(len(work[0].sequence.pending))
        self._target.pending.flush(self._draft, [w.sequence for w in work])
        start(self, work)

    monkeypatch.setattr(EagerRunner, "start", at_once)
    assert late == proposals()
    assert flushed and max(flushed) <= 6, "committed before every step"
    assert late or name in ("ngram", "dspark-cut")


def test_a_draft_whose_candidates_are_all_banned_ends_its_proposal_only() -> None:
    banned = tuple((token, -math.inf) for token in range(10, 140))
    options = Options(n_predict=40, sampler=Sampler(0.8, logit_bias=banned), ignore_eos=True)
    plain = memory_engine.engine().generate(PROMPT, options)
    list(plain)
    with memory_engine.engine(DRAFTS["dflash2-from-anchor"]) as engine:
        request = engine.submit(PROMPT, replace(options, draft_max=4))
        lengths = {len(cycle.drafted) for cycle in list(request)[1:-4]}
    assert request.ids == plain.ids and not request.notes
    assert 0 in lengths and max(lengths) > 1 and request.stats.accepted


def test_adversarial_drafts_change_nothing() -> None:
    want = undrafted(Sampler(), 60)
    at = dict(enumerate([*PROMPT, *(token for token, _ in want)]))
    copy = GuessingDraft("copy", lambda p: at.get(p, 0))
    never = GuessingDraft("never", lambda p: (at.get(p, 0) + 1) % mm.V)
    noise = GuessingDraft("random", lambda p: (p * 7919) % mm.V)
    for draft in (copy, never, noise):
        for count in (1, 4, 15):
            engine = memory_engine.engine(lambda target, d=draft: d)  # type: ignore[misc]
            assert decode(engine, Sampler(), count) == want, draft.name


class FailingDraft(ConstantDraft):
    """A draft whose logits in slot 1 are not finite."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        self.asked += batch.slots.tolist()
        logits = torch.zeros(len(batch), count, mm.V)
        logits[batch.slots == 1] = math.nan
        return pick(logits.flatten(0, 1), 0).view(-1, count)


def test_a_request_goes_on_without_a_draft_that_fails() -> None:
    """Others keep theirs."""
    draft = FailingDraft()
    with memory_engine.engine(lambda target: draft, parallel=2) as engine:
        well, ill = (generate(engine, Sampler(), 4) for _ in range(2))
        failed = [cycle.draft_failed for cycle in ill if cycle.draft_failed]
        list(well)
        assert not any(leaked_resources(engine).values())
    assert well.ids == ill.ids == [token for token, _ in undrafted(Sampler(), 60)]
    assert draft.asked.count(1) == 1 and draft.asked.count(0) > 10
    assert well.stats.drafted > 10 and not ill.stats.drafted
    assert failed == ill.notes and "going on without it: " in ill.notes[0] and not well.notes


@pytest.mark.parametrize("stops", [True, False])
def test_a_mask_that_fails_after_accepted_tokens_does_not_take_them(stops: bool) -> None:
    """It may allow nothing after the end of a text, where rows of drafted tokens still follow."""
    sampler = SAMPLERS[1]
    want = undrafted(sampler, 60)
    at = dict(enumerate([*PROMPT, *(token for token, _ in want)]))
    copy = GuessingDraft("copy", lambda p: at.get(p, 0))

    def first_ten(output: Seq[int]) -> torch.Tensor:
        return torch.full((mm.V,), len(output) < 10)

    def run(engine: Engine, count: int) -> tuple[str, list[int], str]:
        end = engine.tokenizer.decode([token for token, _ in want[:10]])[-3:]
        options = Options(60, sampler, count, ignore_eos=True, mask=first_ten)
        request = engine.submit(PROMPT, replace(options, stop=(end,) if stops else ()))
        with nullcontext() if stops else pytest.raises(InputError, match="mask first_ten after 10"):
            list(request)
        return request.text, request.ids, request.stats.stop_reason

    plain = run(memory_engine.engine(), 0)
    assert len(plain[1]) == 10 and plain[2] == ("stop string" if stops else "error")
    for count in (1, 4, 15):
        assert run(memory_engine.engine(lambda target: copy), count) == plain, count


def test_cache_after_rollback_equals_cache_never_drafted() -> None:
    want = [token for token, _ in undrafted(Sampler(), 60)]
    at = dict(enumerate([*PROMPT, *want]))
    half = GuessingDraft("half", lambda p: at.get(p, 0) if p % 5 else (at.get(p, 0) + 1) % mm.V)
    plain, drafted = memory_engine.engine(), memory_engine.engine(lambda target: half)

    def walk(engine: Engine, count: int) -> tuple[Iterator[Cycle], int]:
        """Run 50 tokens of a text without ending it, and return how many of its tokens were
        read."""
        request = generate(engine, Sampler(), count)
        cycles = iter(request)
        while len(request.ids) < 50:
            next(cycles)
        assert not request.done
        return cycles, len(PROMPT) + len(request.ids) - 1

    (one, read), (two, other) = walk(plain, 0), walk(drafted, 7)
    end = min(read, other) - 1
    for a, b in zip(plain.target.caches, drafted.target.caches, strict=True):
        first = 0 if a.window is None else end - a.window + 1
        for x, y in zip(a.read(0, first, end), b.read(0, first, end), strict=True):
            assert torch.equal(x, y) and torch.isfinite(x).all()
    rest = [[t for cycle in cycles for t in cycle.tokens] for cycles in (one, two)]
    assert rest[0][-8:] == rest[1][-8:] == want[-8:]
