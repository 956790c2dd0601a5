"""`auto` never costs more than 2 % against plain decoding (one step in texts under 50 tokens), and
gains where there is a gain.

Costs are simulated, or recorded from runs, so that the proof does not depend on a clock.
"""

from __future__ import annotations

import random

import pytest

from g4spec.runtime.length import CREDIT, MARGIN, Auto, Costs, Fixed

RECORDED = {  # seconds by drafted tokens, as in facts measured on real machines
    "31B on an H200, llama.cpp": ({0: 0.0125, 1: 0.0150, 15: 0.0297}, 15),
    "26B-A4B on an H200, llama.cpp": ({0: 0.0045, 1: 0.0060, 15: 0.0163}, 15),
    "two cores, fixed 16-row steps": ({0: 0.0105, 1: 0.0140, 15: 0.0146}, 15),
    "chain draft on two cores": ({0: 0.0105, 1: 0.0120, 15: 0.0330}, 15),
}


def simulate(
    auto: Auto,
    costs: Costs,
    accept: list[float],
    most: int,
    n: int,
    seed: int,
    credit: float = 0,
) -> tuple[float, int]:
    """Seconds and tokens of a run of at least `n` tokens; checks the bound after every cycle."""
    rng = random.Random(seed)
    spent, tokens, plain = 0.0, 0, costs[0]
    while tokens < n:
        count = auto.next(most)
        held = 0
        while held < count and rng.random() < accept[held]:
            held += 1
        spent += costs[count]
        tokens += held + 1
        auto.observe(count, held, costs[count])
        allowed = tokens + max(1, MARGIN * tokens) + credit
        assert spent <= allowed * plain * (1 + 1e-9), (tokens, count)
    return spent, tokens


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("accept", [0.0, 0.1, 0.3, 0.5, 0.8, 0.95])
def test_never_costs_more_than_the_margin(name: str, accept: float) -> None:
    table, most = RECORDED[name]
    for seed in range(5):
        simulate(Auto(table), Costs(table), [accept] * 15, most, 600, seed)


def test_never_costs_more_when_the_draft_turns_bad() -> None:
    table, most = RECORDED["31B on an H200, llama.cpp"]
    auto, costs = Auto(table), Costs(table)
    spent, tokens = 0.0, 0
    for phase in (0.9, 0.0, 0.9, 0.0):
        credit = CREDIT + MARGIN * tokens
        s, t = simulate(auto, costs, [phase] * 15, most, 300, 1, credit)
        spent, tokens = spent + s, tokens + t
        assert spent <= (1 + MARGIN) * tokens * costs[0]


@pytest.mark.parametrize("seed", range(40))
def test_never_costs_more_with_random_costs_and_acceptance(seed: int) -> None:
    rng = random.Random(seed)
    plain = rng.uniform(0.002, 0.1)
    one = plain * rng.uniform(1.0, 3.0)
    table = {0: plain, 1: one, 15: one * rng.uniform(1.0, 6.0)}
    accept = [rng.random() for _ in range(15)]
    simulate(Auto(table), Costs(table), accept, 15, 500, seed)


@pytest.mark.parametrize("accept,least", [(0.8, 1.8), (0.6, 1.3)])
def test_gains_with_a_good_draft(accept: float, least: float) -> None:
    table, most = RECORDED["31B on an H200, llama.cpp"]
    spent, tokens = simulate(Auto(table), Costs(table), [accept] * 15, most, 2000, 0)
    assert tokens * table[0] / spent > least


def test_comes_close_to_the_best_fixed_length() -> None:
    table, most = RECORDED["chain draft on two cores"]
    costs, accept = Costs(table), [0.85, 0.8, 0.7, 0.6, *[0.4] * 11]
    best = max(rate(costs, accept, k) for k in range(most + 1))
    spent, tokens = simulate(Auto(table), costs, accept, most, 4000, 3)
    assert tokens / spent > 0.93 * best


def test_a_short_text_has_a_draft_too() -> None:
    for table, most in RECORDED.values():
        runs = [simulate(Auto(table), Costs(table), [0.8] * 15, most, 48, s) for s in range(50)]
        spent, tokens = (sum(column) for column in zip(*runs, strict=True))
        assert tokens * table[0] / spent > 1.25


def rate(costs: Costs, accept: list[float], count: int) -> float:
    expected, reach = 1.0, 1.0
    for a in accept[:count]:
        reach *= a
        expected += reach
    return expected / costs[count]


def test_returns_to_a_draft_that_became_good() -> None:
    table, most = RECORDED["31B on an H200, llama.cpp"]
    auto, costs = Auto(table), Costs(table)
    simulate(auto, costs, [0.0] * 15, most, 500, 0)
    spent, tokens = simulate(auto, costs, [0.9] * 15, most, 3000, 0, CREDIT + 10)
    assert tokens * table[0] / spent > 1.5


def test_respects_the_room_that_is_left() -> None:
    assert Fixed(8).next(3) == 3
    auto = Auto({0: 1.0, 1: 1.0, 15: 1.0})
    assert all(auto.next(most) <= most for most in range(16))
