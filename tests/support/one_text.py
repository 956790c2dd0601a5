"""The policy of draft lengths in an engine that runs one request at a time."""

from __future__ import annotations

from collections.abc import Mapping

from g4spec.runtime import cycle_costs, draft_length


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

    def __init__(self, lengths: draft_length.DraftLengthPolicy, asked: int | None = None) -> None:
        self.lengths, self.asked = lengths, asked
        self.begin()

    def begin(self) -> None:
        self._certain: int | None = None
        self.text = self.lengths.new_state("auto" if self.asked is None else self.asked)

    def next(self, most: int) -> int:
        """Return how many tokens to draft now."""
        if self._certain is not None:
            count, self._certain = self._certain, None
            assert count <= most
            return count
        return self.lengths.plan([self.text], [most])[0]

    def again(self, count: int, most: int) -> bool:
        """Return True if the next answer is certain to be `count`."""
        assert self._certain is None
        certain = self.lengths.plan_ahead([self.text], [count], [most])
        self._certain = count if certain else None
        return certain

    def observe(self, count: int, accepted: int, seconds: float) -> None:
        self.lengths.observe([self.text], [count], [accepted], seconds)

    def cut(self, tokens: int) -> None:
        self.text.discard(tokens)


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
