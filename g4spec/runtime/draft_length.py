"""The policy of `--draft-max auto`: how many tokens each request of a batch drafts in the next
cycle.

The batch has one budget. The drafted tokens of all requests are ranked by their probability of
acceptance, and the number of tokens is chosen that maximizes the expected tokens per second,
using a table of measured cycle times. Requests with a fixed length (`--draft-max 4`) get it; those
with `auto` are planned around them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from g4spec.runtime.cycle_costs import CycleCosts
from g4spec.runtime.draft_decision import DraftDecision
from g4spec.runtime.draft_history import Acceptance, PolicyState, TimeCredit

MARGIN = 0.02
"""Maximum slowdown caused by `auto`, as a fraction of the time without it."""

CREDIT = 4
"""Maximum credit, in steps: the time that a part of a text can lose beyond `MARGIN` when a good
draft turns bad. With 4 steps `auto` is nearly as fast as without a limit, with 2 it is not
(`benchmarks/auto_lengths.py`)."""

RISK, FULL = 0.5, 0.9
"""Fraction of the credit that a cycle may risk, so that a second failure does not end drafting; and
fraction of the maximum credit from which it may risk all, as many drafts take several steps."""

SPIKE = 1.5
"""Limit of a cycle's time, as a multiple of its predicted time. Beyond that the machine was busy
with something else, which would have slowed down plain decoding too."""

PROBE = 192
"""Number of steps without a draft after which a draft that had no acceptance is tried again."""


class DraftLengthPolicy:
    """Plans the drafts of all requests of an engine.

    The plan is the one with the most expected tokens per second (`BatchPlanner.best`) among those
    whose complete loss is affordable. All requests wait for the drafts of each. So the extra time
    of a cycle, compared with a cycle in which no `auto` request drafts (its *base*), must be
    covered by the credit of the engine and by that of every request in the batch (by `RISK` of it,
    or a `FULL` one, for more than one token each). Credit starts at 0, earns `MARGIN` of all time
    without such drafts and all time that drafts save, and pays for what they lose; the credit of a
    request starts with the value of the engine's. So after every cycle decoding has taken at most 1
    + `MARGIN` times the time without `auto`: for the engine, and, beyond its initial credit, for
    every request, whatever the drafts do, as far as times are predictable. A cycle that took longer
    is paid back before the next draft. Credit never exceeds `CREDIT` steps, so any part of a text
    loses at most `MARGIN` and that credit.

    The bound has a price. If a draft of one token costs 1.2 steps, a new engine drafts for the
    first time after 9 tokens. A request whose draft is never accepted, or that drafts a fixed
    number, gains nothing from the drafts of others: while it runs they continue only at the rate
    that `MARGIN` of its time pays for. No rule with this bound can do better.

    Args:
        padded: see `CycleCosts`.

    Attributes:
        costs: None until measured; until then `auto` drafts nothing.
    """

    def __init__(self, padded: bool = False) -> None:
        self.padded = padded
        self.costs: CycleCosts | None = None
        self.acceptance = Acceptance()
        self.credit = TimeCredit()
        self.since_draft = 0
        self._plan: dict[PolicyState, int] = {}  # of the cycles that have not been observed yet
        self._contexts: deque[float] = deque()  # of each of them
        self._newest = 0.0, 1  # seconds of the base and number of requests of the last one observed
        self._reason = "unmeasured"  # of the newest plan

    @property
    def wants_costs(self) -> bool:
        """True if costs have to be measured before `auto` can draft."""
        return self.costs is None

    def set_costs(self, seconds: Mapping[tuple[int, int], float], per_byte: float = 0.0) -> None:
        """Set the measured cycle times: (requests, drafted tokens each) -> seconds, at short
        contexts; `per_byte`: seconds per byte of KV cache that a step reads."""
        self.costs = CycleCosts(seconds, self.padded, per_byte)

    def plan(
        self, states: Sequence[PolicyState], max_counts: Sequence[int], context: float = 0.0
    ) -> list[int]:
        """Choose the number of tokens to draft for each request, at most max_counts[i].
        Every earlier planned cycle must have been observed or discarded.

        Args:
            context: bytes of KV cache that all requests have together.
        """
        for state in states:
            self._start(state)
        self._contexts.clear()
        self._set_context(context)
        counts = self._choose(states, max_counts, 0.0)
        self._commit(states, counts, context)
        return counts

    def plan_ahead(
        self,
        states: Sequence[PolicyState],
        counts: Sequence[int],
        max_counts: Sequence[int],
        context: float = 0.0,
    ) -> bool:
        """Plan a second cycle while one with the same requests and counts is running.

        Return True if it is certain to have the same `counts`, whatever that cycle's result, given
        at least `max_counts` room; it is then planned, and `plan` is not called.

        This is certain if `counts` are the choice now even if the whole running cycle is wasted.
        Anything that would change the choice then takes effect one cycle later. `context`: see
        `plan`, at the start of the second cycle.
        """
        self._set_context(context)
        lost = 0.0
        if self.costs is not None:  # if nothing is accepted
            lost = self.costs(counts) - (1 + MARGIN) * self.costs(_without_auto(states, counts))
        if self._choose(states, max_counts, lost) != list(counts):
            return False
        self._commit(states, counts, context)
        return True

    def pays_alone(self, state: PolicyState, max_count: int, context: float) -> bool:
        """Return True if drafts of a request with "auto" are expected to pay once it runs alone.

        Args:
            context: bytes of its KV cache.
        """
        if self.costs is None or not (state.auto and max_count):
            return False
        of_batch = self.costs.context
        self._set_context(context)
        counts, _ = BatchPlanner(self.costs, [state], [max_count], [0]).best(math.inf)
        self._set_context(of_batch)
        return any(counts)

    def spend(self, states: Sequence[PolicyState], seconds: float) -> bool:
        """Deduct from the credit that drafts take so long between two cycles of these requests.
        Return False, and deduct nothing, if it is not affordable."""
        credits = [self.credit, *(t.credit for t in states)]
        if min(c.balance for c in credits) < seconds:
            return False
        for credit in credits:
            credit.balance -= seconds
        return True

    def decisions(
        self,
        step: int,
        states: Sequence[PolicyState],
        counts: Sequence[int],
        max_counts: Sequence[int],
    ) -> list[DraftDecision]:
        """Return what the newest plan, of cycle `step`, gives each request, with the reason."""
        seconds = plain = None
        if self.costs is not None:
            seconds, plain = self.costs(counts), self.costs([0] * len(counts))
        rows = len(counts) + sum(counts)
        out = []
        for state, count, room in zip(states, counts, max_counts, strict=True):
            chosen = state.auto and room > 0
            expected = state.acceptance.expected(count)[-1] if chosen else None
            why = self._reason if chosen else "room" if state.requested else "off"
            if count and not state.auto:
                why = "asked"
            elif chosen and self._reason == "pays" and not count:
                why = "others"
            out.append(DraftDecision(step, count, why, expected, len(counts), rows, seconds, plain))
        return out

    def observe(
        self,
        states: Sequence[PolicyState],
        counts: Sequence[int],
        accepted: Sequence[int],
        seconds: float,
    ) -> None:
        """Learn from the oldest planned cycle: it drafted counts[i] tokens for states[i], of
        which accepted[i] were accepted, and took `seconds`. Requests that have ended since may be
        missing."""
        for state, count, held in zip(states, counts, accepted, strict=True):
            state.acceptance.observe(count, held)
            self.acceptance.observe(count, held)
        if self._contexts:
            self._set_context(self._contexts.popleft())
        if self.costs is None:
            return
        planned = list(self._plan.values())
        drafted = list({**self._plan, **dict(zip(states, counts, strict=True))}.values())
        assert len(drafted) == len(planned), "a request was not planned"
        # A draft that proposed nothing still took time, so this is not a plain step.
        empty_drafts = any(planned) and not any(drafted)
        seconds = min(seconds, SPIKE * self.costs(planned if empty_drafts else drafted))
        if not empty_drafts:
            self.costs.update(drafted, seconds)
        without = _without_auto(list(self._plan), planned)
        base = self.costs(without)
        step = seconds if without == planned else base
        # The gain of each request, in steps: requests with a fixed length would have advanced as
        # far without the drafts of others.
        steps = [held + 1 if t.auto else 1 for t, held in zip(states, accepted, strict=True)]
        for state, n in zip(states, steps, strict=True):
            state.credit.add((1 + MARGIN) * n * step - seconds, CREDIT * base)
        mean = sum(steps) / len(steps)
        self.credit.add((1 + MARGIN) * mean * step - seconds, CREDIT * base)
        self._newest = base, len(steps)

    def discard(self, state: PolicyState, tokens: int) -> None:
        """Record that the last `tokens` of the newest observed cycle are after the end of the text,
        so that they gained nothing."""
        if tokens and state.auto:
            base, n_requests = self._newest
            state.credit.deduct((1 + MARGIN) * tokens * base, CREDIT * base)
            self.credit.deduct((1 + MARGIN) * tokens * base / n_requests, CREDIT * base)

    def _start(self, state: PolicyState) -> None:
        """Initialize acceptance and credit of a request from those of the engine, once."""
        if not state.started:
            state.started = True
            state.acceptance.copy_from(self.acceptance)
            state.credit.balance = self.credit.balance
            state.since_draft = self.since_draft

    def _set_context(self, context: float) -> None:
        if self.costs is not None:
            self.costs.context = context

    def _commit(self, states: Sequence[PolicyState], counts: Sequence[int], context: float) -> None:
        self._contexts.append(context)
        self._plan = dict(zip(states, counts, strict=True))
        self.since_draft = 0 if any(counts) else self.since_draft + 1
        for state, count in self._plan.items():
            state.since_draft = 0 if count else state.since_draft + 1

    def _choose(
        self, states: Sequence[PolicyState], max_counts: Sequence[int], lost: float
    ) -> list[int]:
        """Return the counts of the best affordable plan if every credit were `lost` seconds
        lower."""
        fixed = [
            0 if t.requested == "auto" else min(t.requested, m)
            for t, m in zip(states, max_counts, strict=True)
        ]
        self._reason = "unmeasured"
        if self.costs is None or not any(
            t.auto and m for t, m in zip(states, max_counts, strict=True)
        ):
            return fixed
        saved = min(self.credit.balance, *(t.credit.balance for t in states)) - lost
        planner = BatchPlanner(self.costs, states, max_counts, fixed)
        counts, self._reason = planner.best(saved)
        tries = 2 if len(states) == 1 else 1  # a batch shows enough with one token each
        for i, state in enumerate(states):
            if state.auto and state.since_draft >= PROBE and max_counts[i] and not counts[i]:
                probe = [*counts[:i], min(tries, max_counts[i]), *counts[i + 1 :]]
                if planner.plan(probe).credit_needed <= saved:
                    counts, self._reason = probe, "probe"
        return counts


class BatchPlan(NamedTuple):
    """Draft lengths of a batch, with the predicted time of the cycle, tokens per second, and
    `credit_needed`: the seconds of credit that the engine and every request must have."""

    counts: list[int]
    seconds: float
    rate: float
    credit_needed: float


class BatchPlanner:
    """Finds the best plan for a batch whose requests draft at least `fixed` tokens, and `auto` ones
    up to `max_counts`."""

    def __init__(
        self,
        costs: CycleCosts,
        states: Sequence[PolicyState],
        max_counts: Sequence[int],
        fixed: list[int],
    ) -> None:
        self._costs, self._fixed = costs, fixed
        self._base = costs(fixed)
        self._room = [m if t.auto else n for t, m, n in zip(states, max_counts, fixed, strict=True)]
        self._auto = [i for i, t in enumerate(states) if t.auto]
        self._tokens = [t.acceptance.expected(m) for t, m in zip(states, self._room, strict=True)]

    def best(self, saved: float) -> tuple[list[int], str]:
        """Return the counts with the most expected tokens per second that `saved` seconds of
        credit can afford, and the reason (`REASONS`).

        If some requests gain much from their drafts, others may lose by waiting for them. If the
        best plan is not affordable, the next candidate is the best one in which no request is
        expected to lose: other plans, however cheap, would spend the credit that is being saved for
        the best.
        """
        plain = self.plan(self._fixed)
        equal = self._costs.padded or len(self._auto) == 1
        plans = self._affordable(
            self._equal_plans() if equal else self._greedy_plans(help_slowed=False)
        )
        top = max([plain, *plans], key=_rate)
        top = top if equal else self._drop_slow_requests(top)
        if top.credit_needed <= saved:
            return top.counts, "plain" if top.counts == self._fixed else "pays"
        if self._slowed_requests(top) and not equal:
            plans += self._affordable(self._greedy_plans(help_slowed=True))
        fair = (p for p in plans if p.credit_needed <= saved and p.rate > plain.rate)
        best = max((p for p in fair if not self._slowed_requests(p)), key=_rate, default=plain)
        return best.counts, "saving"

    def _drop_slow_requests(self, plan: BatchPlan) -> BatchPlan:
        """Return the plan without the drafts that slow it down, because the first token of a
        request may cost more than further ones."""
        for i in self._auto:
            counts = [n * (j != i) for j, n in enumerate(plan.counts)]
            plan = max(plan, self.plan(counts), key=_rate)
        return plan

    def _affordable(self, plans: Iterable[BatchPlan]) -> list[BatchPlan]:
        """Return the plans that full credit can afford."""
        return [p for p in plans if p.credit_needed <= CREDIT * self._base]

    def plan(self, counts: list[int]) -> BatchPlan:
        """Predict the time and tokens of `counts`."""
        seconds = self._costs(counts)
        expected = sum([t[n] for t, n in zip(self._tokens, counts, strict=True)])
        extra = seconds - (1 + MARGIN) * self._base
        several = max([counts[i] for i in self._auto], default=0) > 1
        risked = min(extra / RISK, max(extra, FULL * CREDIT * self._base)) if several else extra
        return BatchPlan(counts, seconds, expected / seconds, risked)

    def _slowed_requests(self, plan: BatchPlan) -> list[int]:
        """Return the requests that are expected to take more than 1 + `MARGIN` times the base."""
        steps = plan.seconds / ((1 + MARGIN) * self._base)
        return [
            i
            for i, tokens in enumerate(self._tokens)
            if tokens[plan.counts[i]] < steps * tokens[self._fixed[i]]
        ]

    def _equal_plans(self) -> Iterator[BatchPlan]:
        """Yield plans with the same length for all requests. If every request costs as much as the
        longest draft, shorter drafts save nothing."""
        for count in range(1, max(self._room[i] for i in self._auto) + 1):
            counts = list(self._room)
            for i in self._auto:
                counts[i] = min(count, counts[i])
            yield self.plan(counts)

    def _greedy_plans(self, help_slowed: bool) -> Iterator[BatchPlan]:
        """Yield plans with one more token each: the one most likely to be accepted, or, with
        `help_slowed`, one for a request that would otherwise be slowed, as long as that can
        help."""
        plan, slowed = self.plan(self._fixed), list[int]()
        while not any(plan.counts[i] == self._room[i] for i in slowed):
            candidates = [i for i in slowed or self._auto if plan.counts[i] < self._room[i]]
            if not candidates:
                return
            counts = plan.counts
            gains = [
                self._tokens[i][counts[i] + 1] - self._tokens[i][counts[i]] for i in candidates
            ]
            chosen = candidates[gains.index(max(gains))]
            plan = self.plan([*counts[:chosen], counts[chosen] + 1, *counts[chosen + 1 :]])
            yield plan
            slowed = self._slowed_requests(plan) if help_slowed else []


def _rate(plan: BatchPlan) -> float:
    return plan.rate


def _without_auto(states: Sequence[PolicyState], counts: Sequence[int]) -> list[int]:
    """Return the plan without drafts of `auto` requests."""
    return [0 if t.auto else n for t, n in zip(states, counts, strict=True)]
