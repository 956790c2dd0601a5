"""`auto` in a batch: one budget, and no text loses more than 2 % to what its neighbours draft."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g4spec.runtime.length import MARGIN, Costs, Lengths, TextState

PADDED = {(1, 0): 5.3, (1, 1): 6.0, (1, 15): 6.9, (8, 0): 5.9, (8, 1): 7.4, (8, 15): 19.0,
          (32, 0): 7.5, (32, 1): 11.0, (32, 15): 60.0}  # fmt: skip
DENSE = {(1, 0): 15.0, (1, 1): 22.0, (1, 15): 24.0, (4, 0): 19.0, (4, 1): 30.0, (4, 15): 75.0}


class Played:
    """A live text and what it has paid: seconds, and those that plain decoding would have taken."""

    def __init__(self, state: TextState, accept: float) -> None:
        self.state, self.accept = state, accept
        self.began = state.account.balance
        self.seconds = self.plain = 0.0


def play(lengths: Lengths, measured: dict[tuple[int, int], float], rng: random.Random,
         cycles: int, most_texts: int, ahead: bool) -> tuple[float, float]:  # fmt: skip
    """Random texts come and go; the bounds hold after every cycle. Seconds with and without."""
    costs = Costs(measured, lengths.padded)
    live: list[Played] = []
    seconds = plain = 0.0
    planned: list[int] | None = None
    for _ in range(cycles):
        if planned is None:
            while len(live) < most_texts and rng.random() < 0.5:
                live.append(Played(lengths.text("auto"), rng.choice([0.0, 0.1, 0.5, 0.8, 0.95])))
            if len(live) > 1 and rng.random() < 0.1:
                live.pop(rng.randrange(len(live)))
            if not live:
                continue
            planned = lengths.plan([t.state for t in live], [15] * len(live))
        counts, states = planned, [t.state for t in live]
        again = ahead and lengths.again(states, counts, [15] * len(live))
        held = [next((i for i in range(n) if rng.random() >= t.accept), n)
                for t, n in zip(live, counts, strict=True)]  # fmt: skip
        took, step = costs(counts), costs.plain(len(live))
        lengths.observe(states, counts, held, took)
        planned = counts if again else None
        seconds += took
        plain += step * sum(n + 1 for n in held) / len(held)
        for text, n in zip(live, held, strict=True):
            text.seconds += took
            text.plain += step * (n + 1)
            over = text.seconds - (1 + MARGIN) * text.plain
            assert over <= text.began + 1e-6, (over, text.began, counts, held)
        assert seconds <= (1 + MARGIN) * plain + 1e-6, (counts, held)
    return seconds, plain


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), padded=st.booleans(), ahead=st.booleans(),
       texts=st.integers(1, 12))  # fmt: skip
def test_no_text_and_no_batch_loses_more_than_the_margin(
    seed: int, padded: bool, ahead: bool, texts: int
) -> None:
    measured = PADDED if padded else DENSE
    lengths = Lengths(padded)
    lengths.measured(measured)
    play(lengths, measured, random.Random(seed), 250, texts, ahead)


def trained(lengths: Lengths, accept: float, seed: int) -> TextState:
    """A text whose acceptance is known and whose account is full."""
    text, rng = lengths.text("auto"), random.Random(seed)
    for _ in range(200):
        text.acceptance.observe(15, next((i for i in range(15) if rng.random() >= accept), 15))
    text.account.add(1e9, 1.0)
    text.account.balance = 1e9
    return text


@pytest.mark.parametrize("measured,padded", [(PADDED, True), (DENSE, False)])
def test_the_budget_is_close_to_the_best_there_is(
    measured: dict[tuple[int, int], float], padded: bool
) -> None:
    """Against every plan for three texts whose drafts are of different worth."""
    lengths = Lengths(padded)
    lengths.measured(measured)
    lengths.account.balance = 1e9
    texts = [trained(lengths, accept, i) for i, accept in enumerate((0.95, 0.7, 0.1))]
    assert lengths.costs is not None

    def rate(counts: tuple[int, ...] | list[int]) -> float:
        assert lengths.costs is not None
        pairs = zip(texts, counts, strict=True)
        expected = len(texts) + sum(sum(t.acceptance.survival(n)) for t, n in pairs)
        return expected / lengths.costs(counts)

    best = max(rate(plan) for plan in itertools.product(range(16), repeat=3))
    counts = lengths.plan(texts, [15] * 3)
    assert rate(counts) > 0.97 * best
    assert counts[0] >= counts[1] >= counts[2]


def test_fixed_lengths_are_planned_around() -> None:
    lengths = Lengths(padded=True)
    lengths.measured(PADDED)
    fixed, auto = lengths.text(7), lengths.text("auto")
    assert lengths.plan([fixed, auto], [15, 15])[0] == 7
    assert lengths.plan([fixed, auto], [3, 15])[0] == 3
    unknown = Lengths()
    assert unknown.plan([unknown.text("auto"), unknown.text(2)], [15, 15]) == [0, 2]


def test_a_batch_that_is_not_measured_costs_in_proportion() -> None:
    costs = Costs({(1, 0): 1.0, (1, 15): 3.0, (4, 0): 2.0, (4, 15): 8.0}, padded=True)
    assert costs.plain(1) == 1.0 and costs.plain(2) == pytest.approx(4 / 3)
    assert costs.plain(4) == 2.0 and costs.plain(8) == 4.0
    assert costs([15, 0, 0, 0]) == 8.0
    dense = Costs({(1, 0): 1.0, (1, 15): 3.0, (4, 0): 2.0, (4, 15): 8.0})
    assert dense([15, 0, 0, 0]) == 4.0  # a step of four, and what one proposal adds
