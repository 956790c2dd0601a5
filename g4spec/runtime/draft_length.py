"""The policy of `--draft-max auto`: how many tokens each request of a batch drafts in the next
cycle.

The batch has one budget. The drafted tokens of all requests are ranked by their probability of
acceptance, and the number of tokens is chosen that maximizes the expected tokens per second,
using a table of measured cycle times. Requests with a fixed length (`--draft-max 4`) get it; those
with `auto` are planned around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from g4spec.core import MAX_DRAFT
from g4spec.runtime.cycle_costs import CycleCosts
from g4spec.runtime.draft_decision import DraftDecision

MARGIN = 0.02
"""Maximum slowdown caused by `auto`, as a fraction of the time without it."""

CREDIT = 4
"""Maximum credit of an account, in steps: the time that a stretch of text can lose beyond `MARGIN`
when a good draft turns bad. With 4 steps `auto` is nearly as fast as without a limit, with 2 it is
not (`benchmarks/auto_lengths.py`)."""

RISK = 0.5
"""Fraction of the credit that one cycle may risk, so that a second failure does not end
drafting."""

SPIKE = 1.5
"""Limit of a cycle's time, as a multiple of its predicted time. Beyond that the machine was busy
with something else, which would have slowed down plain decoding too."""

PROBE = 64
"""Number of steps without a draft after which a draft that had no acceptance is tried again."""

PRIOR, PRIOR_WEIGHT = 0.6, 4.0
"""Prior acceptance of the first position, and its weight in observations."""


class Acceptance:
    """Estimates the acceptance of each draft position, given that the previous positions were
    accepted.

    Args:
        memory: number of cycles after which the weight of an observation has halved.
    """

    def __init__(self, memory: int) -> None:
        self._keep = 0.5 ** (1.0 / memory)
        self._held = [0.0] * MAX_DRAFT
        self._tried = [0.0] * MAX_DRAFT

    def take_over(self, other: Acceptance) -> None:
        """Start from the observations of another estimate."""
        self._held, self._tried = other._held.copy(), other._tried.copy()

    def observe(self, count: int, accepted: int) -> None:
        """Record `count` drafted tokens of which the first `accepted` were accepted. A rejection
        gives no information about later positions."""
        for i in range(min(accepted + 1, count)):
            self._tried[i] = self._tried[i] * self._keep + 1
            self._held[i] = self._held[i] * self._keep + (i < accepted)

    def expected(self, most: int) -> list[float]:
        """Return the expected tokens of a cycle that drafts 0, 1, ... `most` tokens, [most + 1]."""
        out, reach, accept = [1.0], 1.0, PRIOR
        for held, tried in zip(self._held[:most], self._tried[:most], strict=True):
            # What is not known of a position yet is taken from the one before it.
            accept = (held + PRIOR_WEIGHT * accept) / (tried + PRIOR_WEIGHT)
            reach *= accept
            out.append(out[-1] + reach)
        return out


class Account:
    """Credit in seconds that drafting may lose. Negative only after a cycle took longer than
    predicted."""

    def __init__(self) -> None:
        self.balance = 0.0
        self._uncapped = 0.0

    def add(self, seconds: float, cap: float) -> None:
        """Add the gain (or loss) of a cycle."""
        self._uncapped = self.balance + seconds
        self.balance = min(self._uncapped, cap)

    def take_back(self, seconds: float, cap: float) -> None:
        """Subtract a part of the newest gain."""
        self._uncapped -= seconds
        self.balance = min(self._uncapped, cap)


class PolicyState:
    """What the policy knows of one request. Created by `DraftLengthPolicy.text`.

    Attributes:
        asked: fixed number of drafted tokens per cycle, or "auto".
        acceptance, account: of this request; initialized from the engine's when it is first
            planned.
        since_draft: number of steps since the last one that drafted.
    """

    def __init__(self, lengths: DraftLengthPolicy, asked: int | Literal["auto"]) -> None:
        self.asked = asked
        self.acceptance = Acceptance(lengths.memory)
        self.account = Account()
        self.since_draft = 0
        self._lengths = lengths
        self._joined = False

    @property
    def auto(self) -> bool:
        """Whether the policy chooses the length."""
        return self.asked == "auto"

    def join(self) -> None:
        """Initialize acceptance and account from those of the engine, once."""
        if not self._joined:
            self._joined = True
            self.acceptance.take_over(self._lengths.acceptance)
            self.account.balance = self._lengths.account.balance
            self.since_draft = self._lengths.since_draft

    def cut(self, tokens: int) -> None:
        """Record that the last `tokens` of the newest observed cycle are after the end of the text,
        so that they gained nothing."""
        if tokens and self.auto:
            self._lengths.take_back(self, tokens)


class DraftLengthPolicy:
    """Plans the drafts of all requests of an engine.

    The plan is the one with the most expected tokens per second (`Choice.best`) among those whose
    complete loss is affordable. All requests wait for the drafts of each, so the time of a cycle
    beyond one in which no `auto` request drafts (its *base*) must be covered by the account of the
    engine and by that of every request in the batch (by `RISK` of it, for more than one token per
    request). An account starts at 0, earns `MARGIN` of all time without such drafts and all time
    that drafts save, and pays for what they lose; a request's account starts with the value of the
    engine's. So after every cycle decoding has taken at most 1 + `MARGIN` times the time without
    `auto`: for the engine, and, beyond its initial credit, for every request, whatever the drafts
    do, as far as times are predictable. A cycle that took longer is paid back before the next
    draft. An account never exceeds `CREDIT` steps, so any stretch of text loses at most `MARGIN`
    and that credit.

    The bound has a price. If a draft of one token costs 1.2 steps, a new engine drafts for the
    first time after 9 tokens. A request whose draft is never accepted, or that drafts a fixed
    number, gains
    nothing from the drafts of others: while it runs they continue only at the rate that `MARGIN` of
        its
    time pays for. No rule with this bound can do better.

    Args:
        padded: see `CycleCosts`.
        memory: see `Acceptance`.

    Attributes:
        costs: None until measured; until then `auto` drafts nothing.
    """

    def __init__(self, padded: bool = False, memory: int = 12) -> None:
        self.padded, self.memory = padded, memory
        self.costs: CycleCosts | None = None
        self.acceptance = Acceptance(memory)
        self.account = Account()
        self.since_draft = 0
        self._plan: dict[PolicyState, int] = {}  # of the cycles that have not been observed yet
        self._newest = 0.0, 1  # seconds of the base and number of texts of the last one observed
        self._why = "unmeasured"  # of the newest plan

    @property
    def wants_costs(self) -> bool:
        """Whether costs have to be measured before `auto` can draft."""
        return self.costs is None

    def measured(self, seconds: Mapping[tuple[int, int], float], per_byte: float = 0.0) -> None:
        """Set the measured cycle times: (requests, drafted tokens each) -> seconds, at short
        contexts; `per_byte`: seconds per byte of KV cache that a step reads."""
        self.costs = CycleCosts(seconds, self.padded, per_byte)

    def text(self, asked: int | Literal["auto"]) -> PolicyState:
        """Create the state of a new request that drafts a fixed number of tokens, or "auto"."""
        return PolicyState(self, asked)

    def plan(
        self, texts: Sequence[PolicyState], most: Sequence[int], context: float = 0.0
    ) -> list[int]:
        """Choose the number of tokens to draft for each request, at most most[i]. Every earlier
        planned cycle must have been observed or discarded.

        Args:
            context: bytes of KV cache that all requests have together.
        """
        for text in texts:
            text.join()
        if self.costs is not None:
            self.costs.context = context
        counts = self._choose(texts, most, 0.0)
        self._commit(texts, counts)
        return counts

    def again(
        self, texts: Sequence[PolicyState], counts: Sequence[int], most: Sequence[int]
    ) -> bool:
        """Plan a second cycle while one with the same requests and counts is running. Return True
        if it is certain to have the same `counts`, whatever that cycle's result, given at least
        `most` room; it is then planned, and `plan` is not called.

        This is certain if `counts` are the choice now even if the whole running cycle is wasted.
        Anything that would change the choice then takes effect one cycle later.
        """
        lost = 0.0
        if self.costs is not None:  # if nothing is accepted
            lost = self.costs(counts) - (1 + MARGIN) * self.costs(_base(texts, counts))
        if self._choose(texts, most, lost) != list(counts):
            return False
        self._commit(texts, counts)
        return True

    def shares(
        self, step: int, texts: Sequence[PolicyState], counts: Sequence[int], most: Sequence[int]
    ) -> list[DraftDecision]:
        """Return what the newest plan, of cycle `step`, gives each request, with the reason."""
        seconds = plain = None
        if self.costs is not None:
            seconds, plain = self.costs(counts), self.costs([0] * len(counts))
        rows = len(counts) + sum(counts)
        out = []
        for text, count, room in zip(texts, counts, most, strict=True):
            chosen = text.auto and room > 0
            expected = text.acceptance.expected(count)[-1] if chosen else None
            why = self._why if chosen else "room" if text.asked else "off"
            if count and not text.auto:
                why = "asked"
            elif chosen and self._why == "pays" and not count:
                why = "others"
            out.append(DraftDecision(step, count, why, expected, len(counts), rows, seconds, plain))
        return out

    def observe(
        self,
        texts: Sequence[PolicyState],
        counts: Sequence[int],
        accepted: Sequence[int],
        seconds: float,
    ) -> None:
        """Learn from the oldest planned cycle: it drafted counts[i] tokens for texts[i], of which
        accepted[i] were accepted, and took `seconds`. Requests that have ended since may be
        missing."""
        for text, count, held in zip(texts, counts, accepted, strict=True):
            text.acceptance.observe(count, held)
            self.acceptance.observe(count, held)
        if self.costs is None:
            return
        planned = list(self._plan.values())
        drafted = list({**self._plan, **dict(zip(texts, counts, strict=True))}.values())
        assert len(drafted) == len(planned), "a text was not planned"
        # A draft that proposed nothing took its time all the same: not a plain step.
        fruitless = any(planned) and not any(drafted)
        seconds = min(seconds, SPIKE * self.costs(planned if fruitless else drafted))
        if not fruitless:
            self.costs.update(drafted, seconds)
        without = _base(list(self._plan), planned)
        base = self.costs(without)
        step = seconds if without == planned else base
        # What the cycle was worth to each text, in steps: those that ask for a fixed number would
        # have come as far without the drafts of others.
        steps = [held + 1 if t.auto else 1 for t, held in zip(texts, accepted, strict=True)]
        for text, n in zip(texts, steps, strict=True):
            text.account.add((1 + MARGIN) * n * step - seconds, CREDIT * base)
        mean = sum(steps) / len(steps)
        self.account.add((1 + MARGIN) * mean * step - seconds, CREDIT * base)
        self._newest = base, len(steps)

    def take_back(self, text: PolicyState, tokens: int) -> None:
        """Subtract the value of `tokens` of the newest observed cycle from the accounts."""
        base, texts = self._newest
        text.account.take_back((1 + MARGIN) * tokens * base, CREDIT * base)
        self.account.take_back((1 + MARGIN) * tokens * base / texts, CREDIT * base)

    def _commit(self, texts: Sequence[PolicyState], counts: Sequence[int]) -> None:
        self._plan = dict(zip(texts, counts, strict=True))
        self.since_draft = 0 if any(counts) else self.since_draft + 1
        for text, count in self._plan.items():
            text.since_draft = 0 if count else text.since_draft + 1

    def _choose(self, texts: Sequence[PolicyState], most: Sequence[int], lost: float) -> list[int]:
        """Return the counts of the best affordable plan if every account had `lost` seconds
        less."""
        fixed = [
            0 if t.asked == "auto" else min(t.asked, m) for t, m in zip(texts, most, strict=True)
        ]
        self._why = "unmeasured"
        if self.costs is None or not any(t.auto and m for t, m in zip(texts, most, strict=True)):
            return fixed
        saved = min(self.account.balance, *(t.account.balance for t in texts)) - lost
        choice = Choice(self.costs, texts, most, fixed)
        counts, self._why = choice.best(saved)
        for i, text in enumerate(texts):
            if text.auto and text.since_draft >= PROBE and most[i] and not counts[i]:
                probe = [*counts[:i], min(2, most[i]), *counts[i + 1 :]]
                if choice.plan(probe).needed <= saved:
                    counts, self._why = probe, "probe"
        return counts


class Plan(NamedTuple):
    """Draft lengths of a batch, with the predicted time of the cycle, tokens per second, and
    `needed`: the seconds that every account must have."""

    counts: list[int]
    seconds: float
    rate: float
    needed: float


class Choice:
    """Finds the best plan for a batch whose requests draft at least `fixed` tokens, and `auto` ones
    up to `most`."""

    def __init__(
        self, costs: CycleCosts, texts: Sequence[PolicyState], most: Sequence[int], fixed: list[int]
    ) -> None:
        self._costs, self._fixed = costs, fixed
        self._base = costs(fixed)
        self._room = [m if t.auto else n for t, m, n in zip(texts, most, fixed, strict=True)]
        self._auto = [i for i, t in enumerate(texts) if t.auto]
        self._tokens = [t.acceptance.expected(m) for t, m in zip(texts, self._room, strict=True)]

    def best(self, saved: float) -> tuple[list[int], str]:
        """Return the counts with the most expected tokens per second that accounts with `saved`
        seconds can afford, and the reason (`REASONS`).

        If some requests gain much from their drafts, others may lose by waiting for them. If the
        best plan is not affordable, the next candidate is the best one in which no request is
        expected to
        lose: other plans, however cheap, would spend the credit that is being saved for the best.
        """
        plain = self.plan(self._fixed)
        equal = self._costs.padded or len(self._auto) == 1
        plans = self._attainable(self._equal() if equal else self._ranked(help_losers=False))
        top = max([plain, *plans], key=_rate)
        top = top if equal else self._fewer(top)
        if top.needed <= saved:
            return top.counts, "plain" if top.counts == self._fixed else "pays"
        if self._losers(top) and not equal:
            plans += self._attainable(self._ranked(help_losers=True))
        fair = (p for p in plans if p.needed <= saved and p.rate > plain.rate)
        best = max((p for p in fair if not self._losers(p)), key=_rate, default=plain)
        return best.counts, "saving"

    def _fewer(self, plan: Plan) -> Plan:
        """Return the plan without the drafts that slow it down, because the first token of a
        request may cost more than further ones."""
        for i in self._auto:
            counts = [n * (j != i) for j, n in enumerate(plan.counts)]
            plan = max(plan, self.plan(counts), key=_rate)
        return plan

    def _attainable(self, plans: Iterable[Plan]) -> list[Plan]:
        """Return the plans that accounts with full credit can afford."""
        return [p for p in plans if p.needed <= CREDIT * self._base]

    def plan(self, counts: list[int]) -> Plan:
        """Predict the time and tokens of `counts`."""
        seconds = self._costs(counts)
        expected = sum([t[n] for t, n in zip(self._tokens, counts, strict=True)])
        extra = seconds - (1 + MARGIN) * self._base
        risked = extra / RISK if any(counts[i] > 1 for i in self._auto) else extra
        return Plan(counts, seconds, expected / seconds, risked)

    def _losers(self, plan: Plan) -> list[int]:
        """Return the requests that are expected to take more than 1 + `MARGIN` times the base."""
        steps = plan.seconds / ((1 + MARGIN) * self._base)
        return [
            i
            for i, tokens in enumerate(self._tokens)
            if tokens[plan.counts[i]] < steps * tokens[self._fixed[i]]
        ]

    def _equal(self) -> Iterator[Plan]:
        """Yield plans with the same length for all requests. If every request costs as much as the
        longest draft, shorter drafts save nothing."""
        for count in range(1, max(self._room[i] for i in self._auto) + 1):
            yield self.plan(
                [min(count, m) if i in self._auto else m for i, m in enumerate(self._room)]
            )

    def _ranked(self, help_losers: bool) -> Iterator[Plan]:
        """Yield plans with one more token each: the one most likely to be accepted, or, with
        `help_losers`, one for a request that would lose otherwise, as long as that can help."""
        plan, losers = self.plan(self._fixed), list[int]()
        while not any(plan.counts[i] == self._room[i] for i in losers):
            open_ones = [i for i in losers or self._auto if plan.counts[i] < self._room[i]]
            if not open_ones:
                return
            now = plan.counts
            gains = [self._tokens[i][now[i] + 1] - self._tokens[i][now[i]] for i in open_ones]
            chosen = open_ones[gains.index(max(gains))]
            plan = self.plan([*now[:chosen], now[chosen] + 1, *now[chosen + 1 :]])
            yield plan
            losers = self._losers(plan) if help_losers else []


def _rate(plan: Plan) -> float:
    return plan.rate


def _base(texts: Sequence[PolicyState], counts: Sequence[int]) -> list[int]:
    """Return the plan without drafts of `auto` requests."""
    return [0 if t.auto else n for t, n in zip(texts, counts, strict=True)]
