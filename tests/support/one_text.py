"""The draft length policy and cycle costs for an engine that runs one request at a time."""

from __future__ import annotations

from collections.abc import Mapping

from g4spec.runtime import cycle_costs, draft_length
from g4spec.runtime.draft_history import PolicyState


def policy_of(table: Mapping[int, float]) -> draft_length.DraftLengthPolicy:
    """Return a policy in which a cycle of one request takes table[drafted tokens] seconds."""
    lengths = draft_length.DraftLengthPolicy()
    lengths.set_costs({(1, n): seconds for n, seconds in table.items()})
    return lengths


class CycleCosts:
    """Cycle costs of one request: costs[n] is the time of a cycle with n drafted tokens."""

    def __init__(self, table: Mapping[int, float]) -> None:
        self.costs = cycle_costs.CycleCosts({(1, n): seconds for n, seconds in table.items()})

    def __getitem__(self, count: int) -> float:
        return self.costs([count])

    def update(self, count: int, seconds: float) -> None:
        self.costs.update([count], seconds)


class Policy:
    """The draft length policy for one request at a time; `begin` starts the next request."""

    def __init__(
        self, lengths: draft_length.DraftLengthPolicy, requested: int | None = None
    ) -> None:
        self.lengths, self.requested = lengths, requested
        self.begin()

    def begin(self) -> None:
        self._certain: int | None = None
        self.state = PolicyState("auto" if self.requested is None else self.requested)

    def next(self, max_count: int) -> int:
        """Return how many tokens to draft now."""
        if self._certain is not None:
            count, self._certain = self._certain, None
            assert count <= max_count
            return count
        return self.lengths.plan([self.state], [max_count])[0]

    def plan_ahead(self, count: int, max_count: int) -> bool:
        """See `DraftLengthPolicy.plan_ahead`: True if `next` is certain to return `count`."""
        assert self._certain is None
        certain = self.lengths.plan_ahead([self.state], [count], [max_count])
        self._certain = count if certain else None
        return certain

    def observe(self, count: int, accepted: int, seconds: float) -> None:
        self.lengths.observe([self.state], [count], [accepted], seconds)

    def discard(self, tokens: int) -> None:
        self.lengths.discard(self.state, tokens)


class Auto(Policy):
    """`auto` for an engine in which a cycle takes table[drafted tokens] seconds."""

    def __init__(self, table: Mapping[int, float]) -> None:
        super().__init__(policy_of(table))

    @property
    def step(self) -> float:
        """Cost of a plain step as the policy estimates it now, in seconds."""
        assert self.lengths.costs is not None
        return self.lengths.costs([0])


class Fixed(Policy):
    """A constant draft length."""

    def __init__(self, count: int) -> None:
        super().__init__(draft_length.DraftLengthPolicy(), count)
