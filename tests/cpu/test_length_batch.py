"""`auto` for several texts at once: it costs each text and the engine at most 2 %, and its draft
budget is close to the best one.

Cycle costs are simulated. The overhead of each text is tracked here, apart from the policy's own
accounts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g4spec import core
from g4spec.core import MAX_DRAFT, Cycle, Work
from g4spec.runtime import draft_length
from g4spec.runtime.cycle_costs import CycleCosts
from g4spec.runtime.cycle_timing import CycleMeter, padded_costs
from g4spec.runtime.draft_history import PolicyState
from g4spec.runtime.draft_length import CREDIT, PROBE, DraftLengthPolicy
from g4spec.runtime.request import Options
from tests.support import memory_drafts, memory_engine
from tests.support.memory_engine import DRAFTS
from tests.support.selection import sample

Table = dict[tuple[int, int], float]
Held = Callable[[int], int]
"""Returns how many of the drafted tokens of a cycle are accepted."""


def table(
    one: float = 1.15, longest: float = 1.6, growth: float = 0.05, step: float = 1.0
) -> Table:
    """Return cycle costs of up to 8 requests.

    Args:
        one: cost of 1 drafted token each, relative to a plain step.
        longest: cost of 15 drafted tokens each, relative to a plain step.
        growth: cost of each further request.
    """
    return {
        (n, count): step * (1 + growth * (n - 1)) * factor
        for n in (1, 2, 4, 8)
        for count, factor in ((0, 1.0), (1, one), (MAX_DRAFT, longest))
    }


TABLES = {
    "cheap": table(1.08, 1.2),
    "usual": table(),
    "dear": table(1.3, 2.4, 0.4),
    "very dear": table(1.6, 6.0, 0.9),
}


def chance(accept: float, seed: int) -> Held:
    """Accept each drafted token with the same probability, up to the first rejection."""
    rng = random.Random(seed)
    return lambda count: next((i for i in range(count) if rng.random() >= accept), count)


@dataclass
class OverheadTracker:
    """Seconds beyond 1.02 times the time without `auto`. `allowed`: limit on them, which is what
    was saved before."""

    beyond: float = 0.0
    lowest: float = 0.0
    allowed: float = 0.0

    def add(self, seconds: float) -> None:
        self.beyond += seconds
        self.lowest = min(self.lowest, self.beyond)

    def check(self, surprise: float, base: float) -> None:
        """Check the bound since the beginning and over every sequence of cycles."""
        assert self.beyond <= self.allowed + surprise + 1e-9
        assert self.beyond - self.lowest <= CREDIT * base + surprise + 1e-9


@dataclass(eq=False)
class SimulatedText:
    """A running text; `left`: tokens until its end."""

    state: PolicyState
    held: Held
    left: int
    drafted: int = 0
    bill: OverheadTracker | None = None


@dataclass
class Simulation:
    """Runs cycles as an engine does, one ahead where `plan_ahead` allows it, and checks the bound
    after each. Texts may join and leave between cycles."""

    table: Table
    padded: bool = False
    ahead: bool = False
    slower: Callable[[], float] = lambda: 1.0  # measured over predicted time of drafted cycles
    most: int = MAX_DRAFT
    live: list[SimulatedText] = field(default_factory=list)
    bill: OverheadTracker = field(default_factory=OverheadTracker)
    seconds: float = 0.0
    tokens: int = 0
    surprise: float = 0.0

    def __post_init__(self) -> None:
        self.lengths = DraftLengthPolicy(self.padded)
        self.lengths.set_costs(self.table)
        self.costs = CycleCosts(self.table, self.padded)
        self._planned: tuple[list[SimulatedText], list[int]] | None = None
        self._longest_base = 0.0

    def join(self, held: Held, asked: int | None = None, left: int = 10**9) -> SimulatedText:
        text = SimulatedText(PolicyState("auto" if asked is None else asked), held, left)
        self.live.append(text)
        return text

    def leave(self, text: SimulatedText) -> None:
        self.live.remove(text)

    def run(self, cycles: int) -> None:
        for _ in range(cycles):
            self.cycle()

    def cycle(self) -> None:
        texts, counts = self._planned or self._plan()
        states = [t.state for t in texts]
        base = self.costs([0 if s.auto else n for s, n in zip(states, counts, strict=True)])
        predicted = self._predicted(counts)
        seconds = predicted * (self.slower() if any(counts) else 1.0)
        self.surprise = max(self.surprise, seconds - predicted)
        self._longest_base = max(self._longest_base, base)
        for text in (t for t in texts if t.bill is None):
            saved = min(CREDIT * self._longest_base, -self.bill.beyond)
            text.bill = OverheadTracker(allowed=max(0.0, saved))
        self._planned = None
        if self.ahead and texts == self.live:
            room = [self._room(t) - 1 - n for t, n in zip(texts, counts, strict=True)]
            if all(r >= n for r, n in zip(room, counts, strict=True)):
                again = self.lengths.plan_ahead(states, counts, room)
                self._planned = (texts, counts) if again else None
        now = [i for i, t in enumerate(texts) if t in self.live]
        if not now:
            return
        accepted = [min(counts[i], texts[i].held(counts[i])) for i in now]
        self.lengths.observe([states[i] for i in now], [counts[i] for i in now], accepted, seconds)
        self._charge([texts[i] for i in now], [counts[i] for i in now], accepted, seconds, base)
        if not self.live:
            self._planned = None

    def _plan(self) -> tuple[list[SimulatedText], list[int]]:
        texts = list(self.live)
        most = [self._room(t) for t in texts]
        counts = self.lengths.plan([t.state for t in texts], most)
        assert all(0 <= n <= m for n, m in zip(counts, most, strict=True))
        return texts, counts

    def _room(self, text: SimulatedText) -> int:
        return max(0, min(self.most, text.left + 3))  # texts end inside proposals too

    def _predicted(self, counts: Sequence[int]) -> float:
        assert self.lengths.costs is not None
        return self.lengths.costs(counts)

    def _charge(
        self,
        texts: list[SimulatedText],
        counts: list[int],
        accepted: list[int],
        seconds: float,
        base: float,
    ) -> None:
        self.seconds += seconds
        steps = 0
        for text, count, held in zip(texts, counts, accepted, strict=True):
            needed = min(held + 1, text.left)
            self.lengths.discard(text.state, held + 1 - needed)
            text.left, text.drafted = text.left - needed, text.drafted + count
            self.tokens += needed
            worth = needed if text.state.auto else 1
            steps += worth
            assert text.bill is not None
            text.bill.add(seconds - 1.02 * worth * base)
            text.bill.check(self.surprise, self._longest_base)
            if not text.left:
                self.leave(text)
        self.bill.add(seconds - 1.02 * steps / len(texts) * base)
        self.bill.check(self.surprise, self._longest_base)


BACKENDS = pytest.mark.parametrize("padded", [False, True])
RUNS = pytest.mark.parametrize("ahead", [False, True])


@BACKENDS
@RUNS
@pytest.mark.parametrize("costs", sample(TABLES, 2))
def test_a_text_without_acceptance_loses_at_most_the_margin(
    costs: str, padded: bool, ahead: bool
) -> None:
    """The other texts gain from their drafts; this one has to wait for them."""
    for neighbours in (1, 5):
        run = Simulation(TABLES[costs], padded, ahead)
        bad = run.join(lambda count: 0)
        for seed in range(neighbours):
            run.join(chance(0.95, seed))
        run.run(300)
        assert bad.bill is not None and bad.bill.allowed == 0
        assert all(t.drafted for t in run.live[1:])


@BACKENDS
@RUNS
@pytest.mark.parametrize("good", [3, 30])
def test_no_text_loses_more_when_drafts_fail_one_after_another(
    good: int, padded: bool, ahead: bool
) -> None:
    """Everything is accepted until the policy trusts the draft, then nothing, and so on."""
    for costs in TABLES.values():
        run = Simulation(costs, padded, ahead)
        for i in range(4):
            cycle = itertools.count(7 * i)
            run.join(lambda count, cycle=cycle: count * (next(cycle) // good % 2 == 0))
        run.run(300)


@BACKENDS
def test_savings_are_spent_only_once(padded: bool) -> None:
    """Groups of texts bring savings, lose them and leave. One text stays, gains meanwhile and fails
    in the end, when its savings have been spent by the others."""
    run = Simulation(table(1.2, 2.0, 0.0), padded)
    good = True
    staying = run.join(lambda count: min(count, 1) if good else 0)
    run.run(100)
    for _ in range(20):
        wave = [run.join(lambda count: 0) for _ in range(6)]
        run.run(10)
        for text in wave:
            run.leave(text)
    good, before = False, staying.drafted
    run.run(100)
    assert staying.drafted > before


@BACKENDS
def test_tokens_after_the_end_of_a_text_are_not_a_gain(padded: bool) -> None:
    """All tokens are accepted, and texts end inside proposals."""
    for costs in (TABLES["usual"], TABLES["dear"]):
        rng = random.Random(1)
        run = Simulation(costs, padded)
        for _ in range(300):
            while len(run.live) < 3:
                run.join(lambda count: count, left=rng.randint(1, 4))
            run.cycle()


@BACKENDS
def test_costs_follow_what_cycles_take(padded: bool) -> None:
    """A GPU that becomes slower after it was measured, as when it gets warm."""
    lengths = DraftLengthPolicy(padded)
    lengths.set_costs(TABLES["usual"])
    texts = [PolicyState(0), PolicyState(0)]
    assert lengths.costs is not None
    before = lengths.costs([0, 0])
    for _ in range(50):
        lengths.plan(texts, [0, 0])
        lengths.observe(texts, [0, 0], [0, 0], 1.5 * before)
    assert lengths.costs([0, 0]) == pytest.approx(1.5 * before, rel=0.05)


@BACKENDS
def test_a_plan_that_is_never_affordable_is_not_saved_for(padded: bool) -> None:
    """The other text gains nothing; 15 tokens would be the best length."""
    lengths = DraftLengthPolicy(padded)
    lengths.set_costs(table(2.5, 4.0, 0.0))
    lengths.credit.balance = CREDIT * 1.0
    good, bad = PolicyState("auto"), PolicyState(0)
    lengths.plan([good, bad], [0, 0])
    for _ in range(50):
        good.acceptance.observe(MAX_DRAFT, MAX_DRAFT)
    count, _ = lengths.plan([good, bad], [MAX_DRAFT, MAX_DRAFT])
    assert lengths.costs is not None
    assert count and lengths.costs([count + 1, 0]) - 1.02 > 0.5 * CREDIT


def test_drafts_of_many_texts_that_cost_three_steps_are_used() -> None:
    """Times of 16 texts of a 31B on an H200, at about 700 tokens; 5 drafted tokens are accepted."""
    costs = {0: 7.0, 1: 14.3, 2: 22.8, 3: 22.8, 4: 34.0, 7: 34.0, 8: 55.0, 15: 55.0}
    noise = random.Random(1)
    run = Simulation(
        {(16, count): seconds for count, seconds in costs.items()},
        padded=True,
        slower=lambda: noise.uniform(0.95, 1.05),
    )
    for _ in range(50):
        run.lengths.acceptance.observe(15, 5)
    for _ in range(16):
        run.join(lambda count: min(count, 5))
    run.run(400)
    before = run.seconds, run.tokens
    run.run(100)
    assert (run.tokens - before[1]) / (run.seconds - before[0]) > 1.2 * 16 / 7.0


@BACKENDS
@RUNS
@pytest.mark.parametrize("asked", [0, 1, 8])
def test_texts_with_a_fixed_length_lose_at_most_the_margin(
    asked: int, padded: bool, ahead: bool
) -> None:
    """They also get their length at any cost: `auto` does not pay for it."""
    run = Simulation(table(1.2, 2.0), padded, ahead, most=10)
    fixed = run.join(chance(0.3, 0), asked)
    auto = run.join(chance(0.9, 1))
    cycles = 300
    run.run(cycles)
    assert fixed.drafted == asked * cycles and auto.drafted


@settings(max_examples=80, deadline=None)
@given(
    growth=st.floats(0.0, 1.0),
    one=st.floats(0.9, 3.0),
    longest=st.floats(1.0, 6.0),
    padded=st.booleans(),
    ahead=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_no_text_and_no_engine_loses_more_in_random_runs(
    growth: float, one: float, longest: float, padded: bool, ahead: bool, seed: int
) -> None:
    rng = random.Random(seed)
    run = Simulation(table(one, longest, growth, rng.uniform(0.001, 0.1)), padded, ahead)

    def text() -> None:
        fixed = rng.choice([None, None, None, None, 0, 3])
        moods = [rng.random() for _ in range(3)]

        def held(count: int) -> int:
            if rng.random() < 0.05:
                moods.append(moods.pop(0))
            return chance(0.0 if moods[0] < 0.4 else moods[0], rng.randrange(2**32))(count)

        run.join(held, fixed, rng.choice([3, 10, 40, 10**9]))

    for _ in range(150):
        if not run.live or (len(run.live) < 8 and rng.random() < 0.08):
            text()
        if len(run.live) > 1 and rng.random() < 0.03:
            run.leave(rng.choice(run.live))
        run.cycle()


@BACKENDS
def test_the_loss_of_a_slow_cycle_is_recovered(padded: bool) -> None:
    """Texts lose at most the excess of the slowest cycle over its prediction."""
    for seed in range(5):
        rng = random.Random(seed)
        run = Simulation(table(1.1, 1.6), padded, slower=lambda rng=rng: rng.uniform(1.0, 1.4))
        for i in range(4):
            run.join(chance(0.3 * i, i))
        run.run(400)
        assert run.surprise > 0 and all(t.drafted for t in run.live)


def test_the_overhead_trackers_detect_a_risky_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_length, "MARGIN", 0.03)
    run = Simulation(TABLES["usual"])
    run.join(lambda count: 0)
    run.join(chance(0.9, 0))
    with pytest.raises(AssertionError):
        run.run(300)


def vectors(texts: int, most: int) -> list[list[int]]:
    return [list(v) for v in itertools.product(range(most + 1), repeat=texts)]


@BACKENDS
def test_the_plan_is_optimal_under_the_estimates(padded: bool) -> None:
    """For random costs and acceptance, with enough savings that every plan is affordable."""
    rng, most, shares = random.Random(1), 4, []
    for _ in range(40):
        lengths = DraftLengthPolicy(padded)
        lengths.set_costs(
            table(rng.uniform(1.0, 1.4), rng.uniform(1.4, 5.0), rng.uniform(0.0, 1.0))
        )
        lengths.credit.balance = 100.0
        texts = [PolicyState("auto") for _ in range(4)]
        lengths.plan(texts, [0] * 4)
        for text in texts:
            accept = chance(rng.random(), rng.randrange(1000))
            for _ in range(60):
                text.acceptance.observe(most, accept(most))
        counts = lengths.plan(texts, [most] * 4)
        costs = lengths.costs
        assert costs is not None
        tokens = [t.acceptance.expected(most) for t in texts]
        rates = {
            tuple(v): sum(t[n] for t, n in zip(tokens, v, strict=True)) / costs(v)
            for v in vectors(4, most)
        }
        shares.append(rates[tuple(counts)] / max(rates.values()))
    assert min(shares) > (0.999 if padded else 0.97), min(shares)
    assert sum(shares) / len(shares) > 0.995


@BACKENDS
@pytest.mark.parametrize(
    "accepts",
    [
        (0.95, 0.8, 0.6),
        (0.9, 0.9, 0.9, 0.9),
        (0.95, 0.7, 0.7, 0.5),
        (0.6, 0.5),
        (0.97, 0.55),
        (0.95, 0.9, 0.5),
    ],
)
def test_comes_close_to_the_best_budget(accepts: tuple[float, ...], padded: bool) -> None:
    """The best budget in which no text loses is found by search with known acceptance."""
    most = 6
    run = Simulation(table(1.06, 3.0, 0.1), padded, most=most)
    for i, accept in enumerate(accepts):
        run.join(chance(accept, i))
    run.run(100)
    run.seconds, run.tokens = 0.0, 0
    run.run(800)
    tokens = [[sum(a**i for i in range(n + 1)) for n in range(most + 1)] for a in accepts]
    base, best = run.costs([0] * len(accepts)), 0.0
    for v in vectors(len(accepts), most):
        expected, seconds = [t[n] for t, n in zip(tokens, v, strict=True)], run.costs(v)
        if min(expected) * 1.02 * base >= seconds:
            best = max(best, sum(expected) / seconds)
    assert run.tokens / run.seconds > 0.95 * best


def test_texts_that_draft_well_get_more_of_the_budget() -> None:
    run = Simulation(table(1.06, 3.0, 0.1))
    good, fair = run.join(chance(0.9, 0)), run.join(chance(0.6, 1))
    run.run(300)
    assert good.drafted > 1.5 * fair.drafted > 0


def test_a_text_starts_with_the_latest_estimates() -> None:
    """Estimates made while it was waiting count, too."""
    run = Simulation(table())
    waiting = PolicyState("auto")
    text = run.join(chance(0.9, 0))
    run.run(100)
    run.leave(text)
    assert run.lengths.plan([waiting], [MAX_DRAFT])[0] > 1
    run = Simulation(table())
    assert run.lengths.plan([PolicyState("auto")], [MAX_DRAFT]) == [0]


@BACKENDS
def test_a_text_in_a_batch_returns_to_a_draft_that_became_good(padded: bool) -> None:
    run = Simulation(table(1.06, 1.5), padded)
    good, held = False, chance(0.9, 1)
    text = run.join(lambda count: held(count) if good else 0)
    run.join(chance(0.9, 0))
    run.run(400)
    before, good = text.drafted, True
    run.run(10 * PROBE)
    assert text.drafted - before > 3 * 10 * PROBE


def test_without_room_nothing_is_drafted_and_the_next_step_is_certain() -> None:
    """A text that cannot draft does not prevent starting cycles ahead, however long it runs."""
    lengths = DraftLengthPolicy()
    texts = [PolicyState("auto"), PolicyState(4)]
    assert lengths.wants_costs
    assert lengths.plan(texts, [5, 5]) == [0, 4]  # the cost of a draft is not known yet
    lengths.observe(texts, [0, 4], [0, 2], 1.0)
    lengths.set_costs(table())
    for _ in range(2 * PROBE):
        assert lengths.plan(texts, [0, 0]) == [0, 0]
        assert lengths.plan_ahead(texts, [0, 0], [0, 0])
        lengths.observe(texts, [0, 0], [0, 0], 1.05)
        lengths.observe(texts, [0, 0], [0, 0], 1.05)


def test_the_time_of_a_cycle_counts_texts_that_have_ended() -> None:
    lengths = DraftLengthPolicy()
    lengths.set_costs(table(growth=1.0))
    texts = [PolicyState("auto"), PolicyState(2)]
    assert lengths.plan(texts, [0, 2]) == [0, 2]
    assert lengths.costs is not None
    before = lengths.costs([0, 2])
    for _ in range(20):
        lengths.observe(texts[:1], [0], [0], before)
    assert lengths.costs([0, 2]) == pytest.approx(before)
    assert lengths.costs([0]) == pytest.approx(1.0)


def test_costs_depend_on_the_contexts_of_a_batch() -> None:
    """A long text that joins adds the same seconds to plain and drafted cycles at once, so that
    drafting pays with it though it does not without it."""
    lengths = DraftLengthPolicy()
    lengths.set_costs(table(2.2, 2.4), per_byte=1e-9)
    assert lengths.costs is not None
    text = PolicyState("auto")
    for context, pays in ((0.0, False), (1e9, True)):
        drafted = 0
        for _ in range(200):
            counts = lengths.plan([text], [5], context)
            lengths.observe([text], counts, [min(counts[0], 1)], lengths.costs(counts))
            drafted += counts[0] > 0
        assert (drafted > 100) is pays, (context, drafted)
    costs = CycleCosts({(1, 0): 1.0, (1, 1): 1.5}, per_byte=1e-9)
    costs.context = 3e9
    assert costs([0]) == pytest.approx(4.0) and costs([1]) == pytest.approx(4.5)
    costs.update([0], 8.0, weight=1.0)
    costs.context = 0.0
    assert costs([0]) == pytest.approx(2.0) and costs([1]) == pytest.approx(1.5)


def test_cycles_that_are_planned_ahead_have_their_own_contexts() -> None:
    """The time that a growing context takes is not taken for a slower machine."""
    lengths = DraftLengthPolicy()
    lengths.set_costs(table(), per_byte=1e-9)
    text, plain = PolicyState(0), table()[1, 0]
    lengths.plan([text], [0], context=0.0)
    for i in range(200):
        assert lengths.plan_ahead([text], [0], [0], context=1e7 * (i + 1))
        lengths.observe([text], [0], [0], plain + 1e-9 * 1e7 * i)
    lengths.plan([text], [0], context=0.0)
    assert lengths.costs is not None and lengths.costs([0]) == pytest.approx(plain)


def test_an_engine_measures_and_counts_contexts() -> None:
    engine = memory_engine.engine(DRAFTS["dflash"], n_ctx=1400, parallel=2, pool=2800)
    cold = engine.scheduler.cycles
    table, seconds = CycleMeter(engine.target, engine.draft, engine.pool, cold.runners).costs()
    assert {texts for texts, _ in table} == {1, 2} and 0 <= seconds < 1e-3
    assert len(engine.pool.free_slots) == 2 and engine.pool.n_free == engine.pool.n_pages
    options = Options(n_predict=4, ignore_eos=True, draft_max=0)
    shares = []
    for prompt in ([2, 9], [2] * 1300):
        cold.length.set_costs(table, per_byte=1e-9)
        cycles = list(engine.generate(prompt, options))
        shares.append(cycles[1].decision.plain_seconds)
    more = engine.target.context_bytes(1301) - engine.target.context_bytes(3)
    assert shares[1] - shares[0] == pytest.approx(1e-9 * more, rel=0.1)


@pytest.mark.parametrize("kind", ["ngram", "dspark-unsure", "eagle3"])
def test_measured_steps_have_all_rows_of_their_length(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the draft proposes fewer tokens after the measured prompt: the n-gram lookup finds
    two, and a draft that is never confident none."""
    unsure = partial(memory_drafts.dspark_draft, head="gated", p_min=0.999)
    engine = memory_engine.engine(unsure if kind == "dspark-unsure" else DRAFTS[kind], parallel=2)
    (runner,), rows = engine.scheduler.cycles.runners, set[tuple[int, int]]()
    start = runner.start

    def watched(work: Sequence[Work]) -> None:
        start(work)
        rows.update((w.count, len(c.drafted)) for w, c in zip(work, runner._done, strict=True))

    monkeypatch.setattr(runner, "start", watched)
    CycleMeter(engine.target, engine.draft, engine.pool, [runner]).costs()
    assert len(rows) == 3 and all(count == drafted for count, drafted in rows), rows


def test_a_cycle_that_ran_before_it_was_waited_for_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that is late sees the end of a cycle at once, and its time only in the result."""
    engine = memory_engine.engine(DRAFTS["dflash"], parallel=2)
    (runner,) = engine.scheduler.cycles.runners
    result = runner.result

    def late() -> list[Cycle]:
        cycles = result()
        for cycle in cycles:
            cycle.draft_seconds, cycle.step_seconds = 2000.0, 3000.0
        return cycles

    monkeypatch.setattr(runner, "result", late)
    costs, _ = CycleMeter(engine.target, engine.draft, engine.pool, [runner]).costs()
    assert set(costs.values()) == {5000.0}


def test_costs_are_measured_while_the_prefix_cache_holds_most_pages() -> None:
    """Requests with a fixed length come first: their prompts stay in the cache, and the pool has
    no room for another long context."""
    engine = memory_engine.engine(DRAFTS["dflash"], n_ctx=2048, pool=2048, prefix_bytes=1 << 28)
    list(engine.generate([2] * 1600, Options(n_predict=2, draft_max=0)))
    assert engine.pool.n_free < engine.pool.n_pages // 2 and engine.lengths.costs is None
    list(engine.generate([2, 9], Options(n_predict=2, draft_max="auto")))
    assert engine.lengths.costs is not None


def test_costs_by_texts_and_rows() -> None:
    measured = {
        (1, 0): 1.0,
        (1, 1): 1.5,
        (1, 5): 2.5,
        (2, 0): 1.2,
        (2, 1): 2.0,
        (2, 5): 4.0,
        (4, 0): 1.6,
        (4, 1): 3.0,
        (4, 5): 7.0,
    }
    dense, padded = CycleCosts(measured), CycleCosts(measured, padded=True)
    for costs in (dense, padded):
        for (texts, count), seconds in measured.items():
            assert costs([count] * texts) == pytest.approx(seconds)
        assert costs([3]) == pytest.approx(2.0)
        assert costs([0] * 6) == pytest.approx(2.0)  # extrapolated
    assert dense([0] * 3) == pytest.approx(1.4) and dense([5] * 3) == pytest.approx(5.5)
    assert padded([0] * 3) == padded([0] * 4) and padded([5] * 3) == padded([5] * 4)
    assert padded([1, 0, 5, 0]) == padded([5] * 4)
    assert dense([2, 4, 1, 5]) == pytest.approx(dense([3] * 4))
    assert dense([0, 5, 0, 0]) == pytest.approx(1.6 + max((7.0 - 1.6) / 4, 2.5 - 1.0))
    dense.update([5, 0], 3 * dense([5, 0]), weight=1.0)
    assert dense([1] * 4) == pytest.approx(9.0) and dense([0] * 4) == pytest.approx(1.6)


def test_costs_of_padded_steps_follow_their_rows() -> None:
    step = {1: 7.0, 2: 7.0, 4: 7.1, 8: 7.3, 16: 8.0, 32: 11.0, 64: 13.0, 128: 25.0, 256: 48.0}
    proposal = {1: 1.0, 2: 1.5, 4: 2.0, 8: 3.0, 16: 4.5, 32: 7.5}
    found = {
        (texts, count): (proposal[texts] if count else 0.0, step[texts * (1 + count)])
        for texts in proposal
        for count in ({0, 1, 15} if texts == 1 else {0, min(15, 128 // texts - 1)})
        if not (texts == 16 and count)  # between those for 8 and 32
    }
    step[4], step[8] = step[2] + (step[16] - step[2]) / 7, step[2] + 3 * (step[16] - step[2]) / 7
    step |= {n: step[128] + (n / 64 - 2) * (step[128] - step[64]) for n in (256, 512)}
    costs = CycleCosts(padded_costs(found, 15), padded=True)
    for texts in (2, 4, 8, 16, 32):
        for count in range(1, 16):
            rows = texts * next(n for n in (2, 4, 8, 16) if n > count)
            assert costs([count] * texts) == pytest.approx(proposal[texts] + step[rows])
    assert costs([3] * 13) == costs([3] * 16) and costs([0] * 5) == costs([0] * 8)
    chain = {(2, 0): (0.0, 7.0), (2, 1): (1.0, 7.0), (2, 6): (6.0, 8.0), (1, 0): (0.0, 7.0)}
    found = padded_costs(chain, 6)
    assert [found[2, n] for n in (1, 2, 3, 4, 6)] == pytest.approx([8, 28 / 3, 31 / 3, 12, 14])


def reasons(run: Simulation, cycles: int) -> list[list[tuple[str, int]]]:
    """Return why each text drafted its number of tokens: a list of (reason, length) per cycle."""
    out = []
    for number in range(cycles):
        run.cycle()
        run._planned = run._planned or run._plan()
        texts, counts = run._planned
        most = [MAX_DRAFT] * len(texts)
        shares = run.lengths.decisions(number, [t.state for t in texts], counts, most)
        assert [s.length for s in shares] == counts
        assert {(s.step, s.texts, s.rows) for s in shares} == {
            (number, len(texts), len(texts) + sum(counts))
        }
        costs = run.lengths.costs
        assert costs is not None
        assert {(s.seconds, s.plain_seconds) for s in shares} == {
            (costs(counts), costs([0] * len(counts)))
        }
        out.append([(s.why, s.length) for s in shares])
    return out


def test_each_length_has_its_reason() -> None:
    lengths = DraftLengthPolicy()
    texts = [PolicyState("auto"), PolicyState(4), PolicyState(0)]
    for most, wanted in ((5, ["unmeasured", "asked", "off"]), (0, ["room", "room", "off"])):
        counts = lengths.plan(texts, [most] * 3)
        shares = lengths.decisions(1, texts, counts, [most] * 3)
        assert [s.why for s in shares] == wanted
        assert [s.expected is None for s in shares] == [most == 0, True, True]
        assert {s.plain_seconds for s in shares} == {None}
    good = Simulation(table())
    good.join(chance(0.9, 0))
    given_reasons = [why for (why,) in reasons(good, 60)]
    assert given_reasons[0][0] == "saving" and given_reasons[-1][0] == "pays"
    bad = Simulation(table(1.2, 2.0))
    bad.join(lambda count: 0)
    given_reasons = [why for (why,) in reasons(bad, 6 * PROBE)]
    assert {why for why, count in given_reasons[-3 * PROBE :]} == {"plain", "probe"}
    assert all((why == "probe") == bool(count) for why, count in given_reasons[-3 * PROBE :])
    lengths.set_costs(table(1.06, 3.0, 1.0))
    lengths.credit.balance = CREDIT * 1.0
    both = [PolicyState("auto"), PolicyState("auto")]
    lengths.plan(both, [0, 0])
    for _ in range(50):
        both[0].acceptance.observe(MAX_DRAFT, MAX_DRAFT)
        both[1].acceptance.observe(MAX_DRAFT, 0)
    counts = lengths.plan(both, [MAX_DRAFT] * 2)
    given_reasons = lengths.decisions(1, both, counts, [MAX_DRAFT] * 2)
    assert [(s.why, s.length > 0) for s in given_reasons] == [("pays", True), ("others", False)]


def test_time_between_cycles_is_paid_from_the_credit_of_all() -> None:
    lengths = DraftLengthPolicy()
    first, second = PolicyState("auto"), PolicyState("auto")
    lengths.credit.balance, first.credit.balance, second.credit.balance = 3.0, 2.0, 1.0
    assert not lengths.spend([first, second], 1.5)
    assert lengths.spend([first, second], 1.0) and lengths.spend([first], 1.0)
    left = [c.balance for c in (lengths.credit, first.credit, second.credit)]
    assert left == [1.0, 0.0, 0.0]


def test_a_draft_may_pay_only_when_a_request_runs_alone() -> None:
    """Its own context counts, not that of the batch, which is left as it is."""
    lengths = DraftLengthPolicy()
    lengths.set_costs({(1, 0): 1.0, (1, 6): 3.0, (8, 0): 1.0, (8, 6): 30.0}, per_byte=1.0)
    state = PolicyState("auto")
    lengths.plan([state] * 2, [0, 0], 100.0)
    assert lengths.pays_alone(state, 6, context=20.0)
    assert not lengths.pays_alone(state, 6, context=0.0)
    assert not lengths.pays_alone(state, 0, context=20.0)
    assert not lengths.pays_alone(PolicyState(3), 6, context=20.0)
    assert lengths.costs is not None and lengths.costs.context == 100.0
    assert not DraftLengthPolicy().pays_alone(state, 6, context=20.0)


@pytest.mark.parametrize(("credit", "caught"), [(40.0, 4), (20.0, 2), (8.0, 1), (7.0, 0)])
def test_as_many_drafts_keep_up_as_are_affordable(
    credit: float, caught: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four lag by 8 rows of a second each; those in front come first."""
    cycles = memory_engine.engine(DRAFTS["dflash"], parallel=4).scheduler.cycles
    sequences = [core.Sequence(slot, [2], 0, pending=list(range(8))) for slot in range(4)]
    state, given = PolicyState("auto"), list[core.Sequence]()
    cycles.length.credit.balance = state.credit.balance = credit
    cycles._row_seconds.extend([9.0, 1.0])
    monkeypatch.setattr(
        cycles.target.pending, "catch_up", lambda draft, some: given.extend(some) or 5.0
    )
    assert cycles._catch_up(sequences, [state]) == (5.0 if caught else 0.0)
    assert given == sequences[:caught] and state.credit.balance == credit - 8 * caught
