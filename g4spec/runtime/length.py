"""How many tokens to draft in the next cycle."""

from __future__ import annotations

from typing import Protocol

from g4spec.core import MAX_DRAFT

MARGIN = 0.02
"""Most that `Auto` may cost against plain decoding, as a share of it."""

CREDIT = 4
"""Plain steps of time that may at most be saved up and risked later: what a stretch of text can
lose beyond `MARGIN` where a good draft turns bad. With 4 `auto` is nearly as fast as without a
limit, with 2 it is not (`benchmarks/auto_lengths.py`)."""

RISK = 0.5
"""Share of what was saved up that one cycle may risk: a second failure must not end drafting."""

SPIKE = 1.5
"""A cycle counts for at most this many times its expected seconds: a machine that was busy with
something else would have held up plain decoding too."""

PROBE = 64
"""Steps without a draft after which a draft that was useless is tried again."""

PRIOR, PRIOR_WEIGHT = 0.6, 4.0
"""Acceptance of the first position before any was seen, and how many observations it is worth."""


class Length(Protocol):
    """A policy for the number of drafted tokens."""

    def next(self, most: int) -> int:
        """Tokens to draft now, at most `most`."""
        ...

    def again(self, count: int, most: int) -> bool:
        """Whether the next answer is certain to be `count`, like the last one, whatever is observed
        meanwhile, with room for `most` at least. A policy may decide so by saying it."""
        ...

    def observe(self, count: int, accepted: int, seconds: float) -> None:
        """A cycle drafted `count` tokens, of which `accepted` held, and took `seconds`."""
        ...

    def cut(self, tokens: int) -> None:
        """The last `tokens` of the cycle lie behind the end of the text: nobody needed them."""
        ...


class Fixed:
    """Always the same number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def next(self, most: int) -> int:
        return min(self.count, most)

    def again(self, count: int, most: int) -> bool:
        return count == min(self.count, most)

    def observe(self, count: int, accepted: int, seconds: float) -> None:
        pass

    def cut(self, tokens: int) -> None:
        pass


class Costs:
    """Seconds of a cycle by drafted tokens: what was measured first, straight lines in between, and
    how much slower or faster cycles have become since.

    Steps take longer as contexts grow. Cycles with a draft keep the shape of their line and share
    one factor, plain steps have an estimate of their own. Where one has become faster since the
    other was last measured, the other has too; what has become slower may have its own reasons.
    """

    def __init__(self, measured: dict[int, float]) -> None:
        assert 0 in measured and len(measured) > 1, measured
        # 0 is plain decoding, without a draft: it never takes part in the interpolation.
        self._plain = measured[0]
        self._line = sorted((n, s) for n, s in measured.items() if n)
        self._factor = 1.0
        self._factor_then, self._plain_then = self._factor, self._plain

    def __getitem__(self, count: int) -> float:
        if count == 0:
            return self._plain * min(1.0, self._factor / self._factor_then)
        (low, a), (high, b) = self._line[0], self._line[-1]
        for point in self._line:
            if point[0] <= count:
                low, a = point
        for point in reversed(self._line):
            if point[0] >= count:
                high, b = point
        between = a if low >= high else a + (b - a) * (count - low) / (high - low)
        return self._slower() * between

    def _slower(self) -> float:
        """Seconds of cycles with a draft over those measured first."""
        return self._factor * min(1.0, self._plain / self._plain_then)

    def update(self, count: int, seconds: float, weight: float = 0.2) -> None:
        """A cycle took `seconds`."""
        if count:
            self._factor = self._slower() * (1 + weight * (seconds / self[count] - 1))
            self._plain_then = self[0]
        else:
            self._plain = self[0] + weight * (seconds - self[0])
            self._factor_then = self._slower()


class Auto:
    """Picks the length with the most tokens per second, and never loses more than `MARGIN`.

    Expected tokens of a cycle come from the running acceptance of each position given that the
    ones before it held (rejection says nothing about later positions). A cycle with a draft is
    only started if all of it could be wasted: what it costs beyond a plain step must be covered by
    the balance (by `RISK` of it, for more than one token). The balance begins at 0, earns `MARGIN`
    of every plain step's time and all time that drafts win, and pays for what they lose. It is
    never negative, so at the end of every cycle since the policy was made, decoding has taken at
    most 1 + `MARGIN` times what plain decoding would have, whatever the draft does, as far as costs
    are known before a cycle; one that took longer is made up for before the next draft is asked
    for. The balance never exceeds `CREDIT` steps, so any stretch of text costs at most `MARGIN` and
    that much.

    The bound has a price: where a draft of one token costs 1.2 steps, the first one of a new engine
    comes after 9 tokens, and no rule that keeps the bound can be earlier. Later texts begin with
    what was earned and learned.

    Args:
        measured: seconds of a cycle by number of drafted tokens, 0 (plain) included.
        memory: cycles after which an observation's weight has halved.
    """

    def __init__(self, measured: dict[int, float], memory: int = 12) -> None:
        self.costs = Costs(measured)
        self._keep = 0.5 ** (1.0 / memory)
        self._held = [0.0] * MAX_DRAFT
        self._tried = [0.0] * MAX_DRAFT
        self._balance = 0.0  # seconds that may be lost
        self._uncapped = 0.0
        self._asked = 0
        self._since_draft = 0
        self._certain: int | None = None  # the next answer, where `again` has given it

    def next(self, most: int) -> int:
        if self._certain is None:
            count = self._best(most, self._balance)
            if count == 0 and self._since_draft >= PROBE:
                count = min(2, most)
                count = count if self._affordable(count, self._balance) else 0
        else:
            count = min(self._certain, most)
        self._since_draft = 0 if count else self._since_draft + 1
        self._asked, self._certain = count, None
        return count

    def again(self, count: int, most: int) -> bool:
        """Where it is the answer now, even if all of this cycle should be wasted. What would change
        the answer does so a cycle later then."""
        lost = self.costs[count] - (1 + MARGIN) * self.costs[0]  # if nothing is accepted
        same = self._best(most, self._balance - lost) == count
        self._certain = count if same and (count or self._since_draft < PROBE) else None
        return self._certain is not None

    def _affordable(self, count: int, balance: float) -> bool:
        step = self.costs[0]
        saved = balance if count == 1 else RISK * balance
        return self.costs[count] - step <= saved + MARGIN * step

    def _best(self, most: int, balance: float) -> int:
        """The affordable length with the most expected tokens per second; 0 if none beats plain
        decoding."""
        best, rate = 0, 1.0 / self.costs[0]
        reach, expected, accept = 1.0, 1.0, PRIOR
        for count in range(1, most + 1):
            # What is not known of a position yet is taken from the one before it.
            held, tried = self._held[count - 1], self._tried[count - 1]
            accept = (held + PRIOR_WEIGHT * accept) / (tried + PRIOR_WEIGHT)
            reach *= accept
            expected += reach
            if expected / self.costs[count] > rate and self._affordable(count, balance):
                best, rate = count, expected / self.costs[count]
        return best

    def observe(self, count: int, accepted: int, seconds: float) -> None:
        # A draft that proposed nothing took its time all the same: not a plain step.
        seconds = min(seconds, SPIKE * self.costs[count or self._asked])
        if count or not self._asked:
            self.costs.update(count, seconds)
        step = self.costs[0]
        plain = (accepted + 1) * step if self._asked else seconds
        self._uncapped = self._balance + (1 + MARGIN) * plain - seconds
        self._balance = min(self._uncapped, CREDIT * step)
        for i in range(min(accepted + 1, count)):
            self._tried[i] = self._tried[i] * self._keep + 1
            self._held[i] = self._held[i] * self._keep + (i < accepted)
        self._asked = 0

    def cut(self, tokens: int) -> None:
        step = self.costs[0]
        self._uncapped -= (1 + MARGIN) * tokens * step
        self._balance = min(self._uncapped, CREDIT * step)
