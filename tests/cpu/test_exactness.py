"""Losslessness by construction: bits do not depend on what is computed beside a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from g4spec.runtime.speculate import Backlog, Cycle, Speculation

from g4spec.core import Draft
from g4spec.models import ngram
from g4spec.ops.kv import LayerKV
from g4spec.ops.reference import BLOCK, TILE, Ops
from g4spec.ops.sampling import Sampler
from g4spec.runtime.length import Fixed, Length
from g4spec.runtime.target import Target
from tests import memory_drafts as md
from tests import memory_models as mm

PROMPT = [2, *((i * 37) % 150 + 5 for i in range(3 * mm.WINDOW + 1))]


@pytest.mark.parametrize("k,n", [(48, 96), (96, 48), (250, 77), (256, 1024), (1024, 256)])
def test_linear_row_is_the_same_at_every_count_and_place(k: int, n: int) -> None:
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
    for op in (ops.gelu_tanh, ops.silu, lambda t: ops.softcap(t, 30.0),
               lambda t: ops.rms_norm(t, None, 1e-6)):  # fmt: skip
        want = op(x)
        for row in range(TILE):
            assert torch.equal(op(x[row : row + 1])[0], want[row])
            assert torch.equal(op(x[row:])[0], want[row])


@pytest.mark.parametrize("window", [None, 24])
def test_attention_row_is_the_same_at_every_count_place_and_length(window: int | None) -> None:
    ops, g = Ops(), torch.Generator().manual_seed(0)
    total = 3 * BLOCK + 7
    kv = LayerKV(2, 16, 512, window, total)
    rows = torch.randn(2, total, 2, 16, generator=g)
    kv.append(torch.arange(total), *rows)
    q = torch.randn(total, 4, 16, generator=g)
    last = torch.arange(total)
    first = last * 0 if window is None else (last - window + 1).clamp(min=0)
    want = ops.attend(q, kv, first, last, 1.0)
    for begin in (0, 1, 15, 40, 63, 64, 65, total - TILE):
        for count in (1, 2, 3, 7, TILE):
            at = slice(begin, begin + count)
            got = ops.attend(q[at], kv, first[at], last[at], 1.0)
            assert torch.equal(got, want[at]), (begin, count)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_chunks_do_not_change_a_bit(chunk: int) -> None:
    whole, parts = mm.target(chunk=512), mm.target(chunk=chunk)
    whole.taps = parts.taps = (0, 3, 6)
    a = list(whole.prefill(PROMPT))
    b = list(parts.prefill(PROMPT))
    assert torch.equal(a[0].hidden, torch.cat([r.hidden for r in b]))
    assert torch.equal(a[0].taps, torch.cat([r.taps for r in b]))


@pytest.mark.parametrize("rows", range(1, TILE + 1))
def test_step_logits_equal_plain_decoding_at_every_row(rows: int) -> None:
    plain, wide = mm.target(), mm.target()
    for t in (plain, wide):
        list(t.prefill(PROMPT))
    ids = [(7 * i) % 150 + 5 for i in range(rows)]
    one = [plain.step([t], len(PROMPT) + i).logits[0] for i, t in enumerate(ids)]
    assert torch.equal(wide.step(ids, len(PROMPT)).logits, torch.stack(one))


class Wrong:
    """A draft that is wrong on purpose, or random, or a copy of the target."""

    taps: tuple[int, ...] = ()
    max_tokens = 15

    def __init__(self, name: str, pick: Callable[[int], int]) -> None:
        self.name, self.pick = name, pick

    def reset(self) -> None: ...

    def commit(self, step: Committed) -> None: ...

    def propose(self, anchor: int, position: int, count: int, chooser: Chooser) -> list[int]:
        return [self.pick(position + 1 + i) for i in range(count)]


def cycles(
    target: Target, draft: Draft | None, sampler: Sampler, length: Length, n: int = 60
) -> Iterator[Cycle]:
    backlog = Backlog(draft)
    target.taps = draft.taps if draft else ()
    if draft:
        draft.reset()
    for read in target.prefill(PROMPT):
        if draft:
            draft.commit(read)
    logits = target.logits(read.hidden[-1:])[0]
    yield from Speculation(target, backlog, sampler, length, logits, len(PROMPT), n)


def decode(
    target: Target, draft: Draft | None, sampler: Sampler, count: int, n: int = 60
) -> list[int]:
    return [t for cycle in cycles(target, draft, sampler, Fixed(count), n) for t in cycle.tokens]


@functools.cache
def undrafted(sampler: Sampler) -> list[int]:
    return decode(mm.target(), None, sampler, 0)


SAMPLERS = [
    Sampler(),
    Sampler(temperature=1.0, seed=3),
    Sampler(temperature=0.7, top_k=20, top_p=0.9, seed=4),
    Sampler(temperature=1.5, min_p=0.05, seed=5),
]
DRAFTS: dict[str, Callable[[Target], Draft]] = {
    "dflash": mm.dflash_draft,
    "dflash-window": lambda t: mm.dflash_draft(t, window=10),
    "dflash-reduced": lambda t: mm.dflash_draft(
        t, own_embed=True, own_head=True, n_draft=64, embed_scale=1.0, window_from_anchor=True
    ),
    "assistant": mm.assistant_draft,
    "assistant-centroids": lambda t: mm.assistant_draft(t, n_centroids=16),
    "ngram": lambda t: ngram.Drafter(),
    "dspark": md.dspark_draft,
    "dspark-rnn-reduced": lambda t: md.dspark_draft(
        t, head="rnn", own_embed=True, own_head=True, n_draft=64, from_anchor=False
    ),
    "dspark-cut": lambda t: md.dspark_draft(t, head="gated", cut=0.5),
    "dspark-gemma": lambda t: md.dspark_draft(t, gemma=True),
    "dflash2": md.dflash2_draft,
    "dflash2-from-anchor": lambda t: md.dflash2_draft(t, from_anchor=True, kernel=3, top_k=4),
    "eagle3": md.eagle3_draft,
    "eagle3-window": lambda t: md.eagle3_draft(t, window=10, norm_output=True, fc_norm=True),
    "eagle3-two-layers": lambda t: md.eagle3_draft(t, n_layer=2, qk_norm=True, n_draft=None),
    "p-eagle": lambda t: md.eagle3_draft(t, depths=5, sliding=12, norm_before_fc=True),
}


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_text_with_a_draft_equals_text_without(name: str, sampler: Sampler) -> None:
    for count in (1, 2, 5, 15):
        target = mm.target()
        assert decode(target, DRAFTS[name](target), sampler, count) == undrafted(sampler), count


class Seldom(Fixed):
    """Drafts after every 20 plain steps, as `auto` does with a draft that did not help."""

    def __init__(self) -> None:
        super().__init__(5)
        self._steps = 0

    def next(self, most: int) -> int:
        self._steps += 1
        return 0 if self._steps % 21 else super().next(most)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_brought_up_to_date_late_proposes_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def proposals() -> list[list[int]]:
        target = mm.target()
        draft = DRAFTS[name](target)
        return [c.drafted for c in cycles(target, draft, Sampler(), Seldom(), 80) if c.drafted]

    late, add = proposals(), Backlog.add

    def at_once(self: Backlog, step: Committed) -> None:
        add(self, step)
        self.flush()

    monkeypatch.setattr(Backlog, "add", at_once)
    assert late == proposals()
    assert late or name in ("ngram", "dspark-cut")


def test_adversarial_drafts_change_nothing() -> None:
    want = undrafted(Sampler())
    at = dict(enumerate([*PROMPT, *want]))
    copy = Wrong("copy", lambda p: at.get(p, 0))
    never = Wrong("never", lambda p: (at.get(p, 0) + 1) % mm.V)
    noise = Wrong("random", lambda p: (p * 7919) % mm.V)
    for draft in (copy, never, noise):
        for count in (1, 4, 15):
            assert decode(mm.target(), draft, Sampler(), count) == want, draft.name


def test_cache_after_rollback_equals_cache_never_drafted() -> None:
    want = undrafted(Sampler())
    at = dict(enumerate([*PROMPT, *want]))
    half = Wrong("half", lambda p: at.get(p, 0) if p % 5 else (at.get(p, 0) + 1) % mm.V)
    plain, drafted = mm.target(), mm.target()
    decode(plain, None, Sampler(), 0)
    decode(drafted, half, Sampler(), 7)
    end = len(PROMPT) + len(want) - 2
    for a, b in zip(plain.caches, drafted.caches, strict=True):
        first = 0 if a.window is None else end - a.window + 1
        for x, y in zip(a.read(first, end), b.read(first, end), strict=True):
            assert torch.equal(x, y) and torch.isfinite(x).all()
