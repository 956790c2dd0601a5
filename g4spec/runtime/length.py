"""How many tokens to draft in the next cycle."""

from __future__ import annotations

from typing import Protocol

from g4spec.models.spec import MAX_DRAFT

MARGIN = 0.02
"""Most that `Auto` may cost against plain decoding, as a share of it."""

CREDIT = 64
"""Plain steps of time won that may at most be risked later, when a good draft turns bad."""


PRIOR, PRIOR_WEIGHT = 0.6, 2.0
"""Acceptance of the first position before any was seen, and how many observations it is worth."""


class Length(Protocol):
    """A policy for the number of drafted tokens."""

    def next(self, most: int) -> int:
        """Tokens to draft now, at most `most`."""
        ...

    def observe(self, count: int, accepted: int, seconds: float) -> None:
        """A cycle drafted `count` tokens, of which `accepted` held, and took `seconds`."""
        ...


class Fixed:
    """Always the same number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def next(self, most: int) -> int:
        return min(self.count, most)

    def observe(self, count: int, accepted: int, seconds: float) -> None:
        pass


class Costs:
    """Seconds of a cycle by drafted tokens, from measurements; straight lines in between."""

    def __init__(self, measured: dict[int, float]) -> None:
        assert 0 in measured and len(measured) > 1, measured
        self._seconds = dict(measured)

    def __getitem__(self, count: int) -> float:
        known = sorted(self._seconds)
        if count in self._seconds:
            return self._seconds[count]
        # 0 is plain decoding, without a draft: it never takes part in the interpolation.
        known = known[1:]
        low = max((k for k in known if k < count), default=known[0])
        high = min((k for k in known if k > count), default=known[-1])
        a, b = self._seconds[low], self._seconds[high]
        return a if low == high else a + (b - a) * (count - low) / (high - low)

    def update(self, count: int, seconds: float, weight: float = 0.2) -> None:
        old = self._seconds.get(count, seconds)
        self._seconds[count] = old + weight * (seconds - old)


class Auto:
    """Picks the length with the most tokens per second, and never loses more than `MARGIN`.

    Expected tokens of a cycle come from the running acceptance of each position given that the
    ones before it held (rejection says nothing about later positions). A cycle with a draft is
    only started if its whole cost could be wasted: what was lost so far against plain decoding,
    plus what this cycle costs beyond a plain step, must stay within `MARGIN` of the time that plain
    decoding would have taken, or within one plain step while that is more (so that a short text
    can have a draft at all). This holds after every cycle since the policy was made, whatever the
    draft does, as far as costs are known. Time won counts for at most `CREDIT` steps, which bounds
    what a draft that turns bad can lose later.

    Args:
        measured: seconds of a cycle by number of drafted tokens, 0 (plain) included.
        memory: cycles after which an observation's weight has halved.
    """

    def __init__(self, measured: dict[int, float], memory: int = 64) -> None:
        self.costs = Costs(measured)
        self._keep = 0.5 ** (1.0 / memory)
        self._held = [0.0] * MAX_DRAFT
        self._tried = [0.0] * MAX_DRAFT
        self._lost = 0.0  # seconds against plain decoding; negative when time was won
        self._plain = 0.0  # seconds plain decoding would have taken
        self._since_draft = 0

    def next(self, most: int) -> int:
        count = self._best(most)
        if count == 0 and self._since_draft >= CREDIT and most:
            count = min(2, most)  # a draft that was useless may have become useful
        self._since_draft += 1
        if count == 0 or not self._affordable(count):
            return 0
        self._since_draft = 0
        return count

    def _affordable(self, count: int) -> bool:
        step = self.costs[0]
        allowed = max(step, MARGIN * (self._plain + step))
        return self._lost + self.costs[count] - step <= allowed

    def _best(self, most: int) -> int:
        """The length with the most expected tokens per second; 0 if none beats plain decoding."""
        best, rate = 0, 1.0 / self.costs[0]
        reach, expected, accept = 1.0, 1.0, PRIOR
        for count in range(1, most + 1):
            # What is not known of a position yet is taken from the one before it.
            held, tried = self._held[count - 1], self._tried[count - 1]
            accept = (held + PRIOR_WEIGHT * accept) / (tried + PRIOR_WEIGHT)
            reach *= accept
            expected += reach
            if expected / self.costs[count] > rate:
                best, rate = count, expected / self.costs[count]
        return best

    def observe(self, count: int, accepted: int, seconds: float) -> None:
        self.costs.update(count, seconds)
        plain = (accepted + 1) * self.costs[0]
        self._plain += plain
        self._lost = max(self._lost + seconds - plain, -CREDIT * self.costs[0])
        for i in range(min(accepted + 1, count)):
            self._tried[i] = self._tried[i] * self._keep + 1
            self._held[i] = self._held[i] * self._keep + (i < accepted)
