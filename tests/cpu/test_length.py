"""`auto` never costs more than 2 % over plain decoding, and gains where drafting is faster.

Here texts run one at a time; `test_length_batch.py` runs several at once.

Cycle costs are simulated, or recorded from runs, so that results do not depend on a clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g4spec.runtime.draft_length import CREDIT
from tests.support.acceptance import MACHINES, OverheadTracker, best_fixed, recordings, replay
from tests.support.one_text import Auto, CycleCosts, Fixed
from tests.support.selection import sample

Adversary = Callable[[int, OverheadTracker], int]
"""Returns the accepted tokens of a cycle, from the number drafted and the history."""


def play(
    auto: Auto, costs: CycleCosts, adversary: Adversary, most: int, n: int, ahead: bool = False
) -> OverheadTracker:
    """Decode at least `n` tokens and check the bound after every cycle and over every sequence of
    cycles.

    `ahead`: ask for the next length before the result of a cycle is known, as a GPU runner does.
    """
    bill, certain = OverheadTracker(costs[0]), None
    while bill.tokens < n:
        count = auto.next(most)
        assert certain in (None, count)
        certain = count if ahead and auto.plan_ahead(count, most) else None
        held = min(count, adversary(count, bill))
        auto.observe(count, held, costs[count])
        bill.add(held + 1, costs[count])
        assert bill.over <= 1e-9, (bill.tokens, count, held)
        assert bill.stretch <= CREDIT * costs[0] + 1e-9, (bill.tokens, count, held)
    return bill


def chance(accept: list[float], seed: int) -> Adversary:
    rng = random.Random(seed)

    def held(count: int, bill: OverheadTracker) -> int:
        return next((i for i in range(count) if rng.random() >= accept[i]), count)

    return held


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("accept", sample([0.0, 0.1, 0.3, 0.5, 0.8, 0.95], 3))
@pytest.mark.parametrize("ahead", [False, True])
def test_never_costs_more_than_the_margin(name: str, accept: float, ahead: bool) -> None:
    for seed in range(3):
        costs = CycleCosts(MACHINES[name])
        play(Auto(MACHINES[name]), costs, chance([accept] * 15, seed), 15, 600, ahead)


def test_the_next_length_is_certain_before_a_cycle_has_ended() -> None:
    auto = Auto({0: 1.0, 1: 1.3, 15: 1.5})
    while auto.plan_ahead(auto.next(15), 15):  # plain steps, until a draft can be paid for
        auto.observe(0, 0, 1.0)
    auto.observe(0, 0, 1.0)
    count = auto.next(15)
    assert count and not auto.plan_ahead(count, 15)  # the savings cover one draft, not two
    for _ in range(20):
        auto.observe(count, count, 1.5)
        count = auto.next(15)
    assert count and auto.plan_ahead(count, 15)
    auto.observe(count, 0, 1.5)
    assert auto.next(15) == count
    assert Fixed(5).plan_ahead(5, 9) and Fixed(5).plan_ahead(4, 4) and not Fixed(5).plan_ahead(3, 9)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("good", sample([0, 1, 7, 30, 300], 2))
@pytest.mark.parametrize("ahead", [False, True])
def test_never_costs_more_when_the_draft_turns_bad(name: str, good: int, ahead: bool) -> None:
    """Everything is accepted until the policy trusts the draft, then nothing for good, or both
    alternate."""
    costs = CycleCosts(MACHINES[name])
    for again in (10**9, good + 150):
        bill = play(
            Auto(MACHINES[name]),
            costs,
            lambda count, bill, again=again: 15 * (bill.tokens % again < good),
            15,
            1200,
            ahead,
        )
        assert bill.seconds <= 1.02 * bill.tokens * costs[0] * (1 + 1e-12)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    plain=st.floats(0.002, 0.1),
    one=st.floats(0.9, 3.0),
    longest=st.floats(1.0, 6.0),
    answers=st.lists(st.integers(0, 15), min_size=1, max_size=300),
    ahead=st.booleans(),
)
def test_never_costs_more_whatever_is_accepted(
    plain: float, one: float, longest: float, answers: list[int], ahead: bool
) -> None:
    table = {0: plain, 1: one * plain, 15: one * longest * plain}
    turns = iter(answers)
    play(Auto(table), CycleCosts(table), lambda count, bill: next(turns, 0), 15, 400, ahead)


@pytest.mark.parametrize("name", recordings())
@pytest.mark.parametrize("ahead", [False, True])
def test_never_costs_more_in_recorded_texts(name: str, ahead: bool) -> None:
    recording = recordings()[name]
    for table in (recording.seconds, *MACHINES.values()):
        auto, costs, bill = Auto(table), CycleCosts(table), OverheadTracker(table[0])
        for text in [t for texts in recording.texts.values() for t in texts]:
            replay(auto, costs, text, recording.longest, bill, ahead)
            assert bill.over <= 1e-9
            assert bill.stretch <= CREDIT * costs[0] + 1e-9


@pytest.mark.parametrize("ahead", [False, True])
def test_never_costs_more_when_texts_end_inside_a_proposal(ahead: bool) -> None:
    """Tokens after a stop token are not a gain: plain decoding would not have generated them."""
    table = MACHINES["31B on an H200, llama.cpp"]
    auto, costs, bill, rng = (
        Auto(table),
        CycleCosts(table),
        OverheadTracker(table[0]),
        random.Random(5),
    )
    for _ in range(600):
        count = auto.next(15)
        needed = 1 if count and rng.random() < 0.5 else count + 1
        if ahead:
            auto.plan_ahead(count, 15)
        auto.observe(count, count, costs[count])
        auto.discard(count + 1 - needed)
        bill.add(needed, costs[count])
        assert bill.over <= 1e-9


@pytest.mark.parametrize(
    "table", [{0: 1.0, 1: 1.5, 15: 6.0}, {0: 1.0, 1: 1.2, 15: 3.0}, {0: 1.0, 1: 1.3, 15: 2.2}]
)
def test_never_costs_more_over_short_texts(table: dict[int, float]) -> None:
    """Each text begins with the token of the prompt, which is no cycle, and ends inside a
    proposal."""
    costs = CycleCosts(table)
    for seed in range(5):
        auto, bill, rng = Auto(table), OverheadTracker(costs[0]), random.Random(seed)
        for _ in range(300):
            auto.begin()
            auto.discard(0)
            for left in reversed(range(rng.randint(1, 6))):
                count = auto.next(15)
                auto.observe(count, count, costs[count])
                needed = count + 1 if left else 1
                auto.discard(count + 1 - needed)
                bill.add(needed, costs[count])
                assert bill.over <= 1e-9


def test_never_costs_more_when_nothing_is_proposed() -> None:
    """Drafts may propose fewer tokens than requested, or none, and still take the full time."""
    table = MACHINES["two cores, fixed 16-row steps"]
    auto, costs, bill = Auto(table), CycleCosts(table), OverheadTracker(table[0])
    drafted = 0
    for _ in range(600):
        length = auto.next(15)
        drafted += length > 0
        auto.observe(0, 0, costs[length])
        bill.add(1, costs[length])
        assert bill.over <= 1e-9
    assert drafted
    assert auto.step == costs[0]


def test_variation_of_plain_steps_is_not_a_loss() -> None:
    """The cost of plain decoding is the measured time of its steps, however busy the machine is."""
    table = MACHINES["chain draft on two cores"]
    auto, rng, steps = Auto(table), random.Random(1), 0
    while auto.next(15) == 0:
        auto.observe(0, 0, table[0] * rng.uniform(1.0, 3.0))
        steps += 1
    assert 0 < steps < 10


def test_first_draft_comes_as_early_as_the_bound_allows() -> None:
    for table in MACHINES.values():
        auto, tokens = Auto(table), 0
        while auto.next(15) == 0:
            auto.observe(0, 0, table[0])
            tokens += 1
        extra = table[1] / table[0] - 1
        assert (extra - 0.02) / 0.02 <= tokens + 1e-9 < extra / 0.02


@pytest.mark.parametrize("accept,least", [(0.8, 1.8), (0.6, 1.3)])
def test_gains_with_a_good_draft(accept: float, least: float) -> None:
    table = MACHINES["31B on an H200, llama.cpp"]
    bill = play(Auto(table), CycleCosts(table), chance([accept] * 15, 0), 15, 2000)
    assert bill.tokens * table[0] / bill.seconds > least


def test_comes_close_to_the_best_fixed_length() -> None:
    table = MACHINES["chain draft on two cores"]
    costs, accept = CycleCosts(table), [0.85, 0.8, 0.7, 0.6, *[0.4] * 11]
    best = max(rate(costs, accept, k) for k in range(16))
    bill = play(Auto(table), costs, chance(accept, 3), 15, 4000)
    assert bill.tokens / bill.seconds > 0.95 * best


def rate(costs: CycleCosts, accept: list[float], count: int) -> float:
    expected, reach = 1.0, 1.0
    for a in accept[:count]:
        reach *= a
        expected += reach
    return expected / costs[count]


@pytest.mark.parametrize(
    "name", sample(["dflash", "dflash-speculators", "assistant", "dflash-other"], 2)
)
@pytest.mark.parametrize("ahead", [False, True])
def test_comes_close_to_the_best_fixed_length_in_recorded_texts(name: str, ahead: bool) -> None:
    """One engine runs all texts in two rounds; each category has another best length."""
    recording = recordings()[name]
    for table in (recording.seconds, *MACHINES.values()):
        auto, costs, shares = Auto(table), CycleCosts(table), []
        fixed = [best_fixed(costs, t, recording.longest) for t in recording.texts.values()]
        for _ in range(2):
            for texts, best in zip(recording.texts.values(), fixed, strict=True):
                bill = OverheadTracker(table[0])
                for text in texts:
                    replay(auto, costs, text, recording.longest, bill, ahead)
                shares.append(bill.tokens / bill.seconds / best)
        assert sum(shares) / len(shares) > (0.91 if ahead else 0.92)


def test_a_later_text_has_a_draft_from_its_first_token() -> None:
    for table in MACHINES.values():
        auto, costs = Auto(table), CycleCosts(table)
        play(auto, costs, chance([0.8] * 15, 1), 15, 60)
        assert auto.next(15) > 0


def test_returns_to_a_draft_that_became_good() -> None:
    table = MACHINES["31B on an H200, llama.cpp"]
    auto, costs = Auto(table), CycleCosts(table)
    play(auto, costs, lambda count, bill: 0, 15, 500)
    bill = play(auto, costs, chance([0.9] * 15, 0), 15, 3000)
    assert bill.tokens * table[0] / bill.seconds > 1.5


def test_respects_the_maximum_draft_length() -> None:
    assert Fixed(8).next(3) == 3
    auto = Auto({0: 1.0, 1: 1.0, 15: 1.0})
    assert all(auto.next(most) <= most for most in range(16))


def test_costs_follow_the_context() -> None:
    """Steps become slower in a long text, and faster again in the next one."""
    costs = CycleCosts({0: 1.0, 1: 2.0, 15: 9.0})
    assert costs[8] == 5.5
    for _ in range(40):
        costs.update(4, 1.5 * 3.5)
    assert costs[15] == pytest.approx(13.5, rel=0.01)
    assert costs[0] == 1.0  # the draft itself may have become slower
    for _ in range(40):
        costs.update(0, 1.5)
    assert costs[0] == pytest.approx(1.5, rel=0.01)
    for _ in range(40):
        costs.update(4, 3.5)
    assert costs[0] == pytest.approx(1.0, rel=0.01)
    for _ in range(40):
        costs.update(0, 0.5)
    assert costs[15] == pytest.approx(4.5, rel=0.02)


def test_times_of_zero_are_those_of_a_coarse_clock() -> None:
    """Each cycle that takes no time makes all cheaper, down to the shortest that counts."""
    auto = Auto({0: 0.0, 1: 0.0, 15: 0.0})
    for _ in range(4000):
        count = auto.next(15)
        auto.observe(count, count, 0.0)
    assert auto.step > 0


def test_a_busy_machine_does_not_end_drafting() -> None:
    table = MACHINES["31B on an H200, llama.cpp"]
    rng, spent, tokens = random.Random(2), 0.0, 0
    auto, draft = Auto(table), chance([0.8] * 15, 3)
    while tokens < 3000:
        count = auto.next(15)
        held = draft(count, OverheadTracker(table[0]))
        auto.observe(count, held, CycleCosts(table)[count] * (6 if rng.random() < 0.02 else 1))
        spent, tokens = spent + CycleCosts(table)[count], tokens + held + 1
    assert tokens * table[0] / spent > 1.7
