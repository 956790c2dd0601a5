"""Keeps what the policy of draft lengths knows of past cycles, of one request and of all: the
acceptance of each draft position, and the credit of time that drafting may lose."""

from __future__ import annotations

from typing import Literal

from g4spec.core import MAX_DRAFT

PRIOR, PRIOR_WEIGHT = 0.6, 4.0
"""Prior acceptance of the first position, and its weight in observations."""

HALF_LIFE = 12
"""Number of cycles after which the weight of an observation has halved."""
_DECAY = 0.5 ** (1.0 / HALF_LIFE)


class Acceptance:
    """Estimates the acceptance of each draft position, given that the previous positions were
    accepted."""

    def __init__(self) -> None:
        self._accepted = [0.0] * MAX_DRAFT
        self._tried = [0.0] * MAX_DRAFT

    def copy_from(self, other: Acceptance) -> None:
        """Start from the observations of another estimate."""
        self._accepted, self._tried = other._accepted.copy(), other._tried.copy()

    def observe(self, count: int, accepted: int) -> None:
        """Record `count` drafted tokens of which the first `accepted` were accepted. A rejection
        gives no information about later positions."""
        for i in range(min(accepted + 1, count)):
            self._tried[i] = self._tried[i] * _DECAY + 1
            self._accepted[i] = self._accepted[i] * _DECAY + (i < accepted)

    def expected(self, max_count: int) -> list[float]:
        """Return the expected tokens of a cycle that drafts 0, 1, ... `max_count` tokens,
        [max_count + 1]."""
        out, p_reached, acceptance = [1.0], 1.0, PRIOR
        for held, tried in zip(self._accepted[:max_count], self._tried[:max_count], strict=True):
            # The prior of a position is the acceptance of the one before it.
            acceptance = (held + PRIOR_WEIGHT * acceptance) / (tried + PRIOR_WEIGHT)
            p_reached *= acceptance
            out.append(out[-1] + p_reached)
        return out


class TimeCredit:
    """Credit in seconds that drafting may lose. Negative only after a cycle took longer than
    predicted."""

    def __init__(self) -> None:
        self.balance = 0.0
        self._uncapped = 0.0

    def add(self, seconds: float, cap: float) -> None:
        """Add the gain (or loss) of a cycle."""
        self._uncapped = self.balance + seconds
        self.balance = min(self._uncapped, cap)

    def deduct(self, seconds: float, cap: float) -> None:
        """Subtract a part of the newest gain."""
        self._uncapped -= seconds
        self.balance = min(self._uncapped, cap)


class PolicyState:
    """State of the policy for one request.

    Attributes:
        requested: fixed number of drafted tokens per step, or "auto".
        acceptance, credit: of this request; initialized from the engine's when it is first
            planned (`started`).
        since_draft: number of steps since the last one that drafted.
    """

    def __init__(self, requested: int | Literal["auto"]) -> None:
        self.requested = requested
        self.acceptance = Acceptance()
        self.credit = TimeCredit()
        self.since_draft = 0
        self.started = False

    @property
    def auto(self) -> bool:
        """True if the policy chooses the length."""
        return self.requested == "auto"
