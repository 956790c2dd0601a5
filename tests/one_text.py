"""The policy of draft lengths as one text sees it."""

from __future__ import annotations

from collections.abc import Mapping

from g4spec.runtime import length


class Costs:
    """`length.Costs` of one text: costs[n] are the seconds of a cycle of n drafted tokens."""

    def __init__(self, table: Mapping[int, float] | length.Costs) -> None:
        self.costs = table if isinstance(table, length.Costs) else length.Costs(
            {(1, n): seconds for n, seconds in table.items()})  # fmt: skip

    def __getitem__(self, count: int) -> float:
        return self.costs([count])

    def update(self, count: int, seconds: float) -> None:
        self.costs.update([count], seconds)


class Auto:
    """`length.Lengths` with one text after the other; `end` begins the next one."""

    def __init__(self, table: Mapping[int, float]) -> None:
        self.lengths = length.Lengths()
        self.lengths.measured({(1, n): seconds for n, seconds in table.items()})
        assert self.lengths.costs is not None
        self.costs = Costs(self.lengths.costs)
        self.end()

    def end(self) -> None:
        """The text is over."""
        self.text = self.lengths.text("auto")
        self._certain: int | None = None

    def next(self, most: int) -> int:
        """Tokens to draft now."""
        if self._certain is not None:
            count, self._certain = min(self._certain, most), None
            return count
        return self.lengths.plan([self.text], [most])[0]

    def again(self, count: int, most: int) -> bool:
        """True if the next answer is certain to be `count`."""
        if not self.lengths.again([self.text], [count], [most]):
            return False
        self._certain = count
        return True

    def observe(self, count: int, accepted: int, seconds: float) -> None:
        """A cycle is over."""
        self.lengths.observe([self.text], [count], [accepted], seconds)

    def cut(self, tokens: int) -> None:
        """The last tokens of the newest cycle lie behind the end of the text."""
        self.text.cut(tokens)


class Fixed:
    """Always the same number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def next(self, most: int) -> int:
        return min(self.count, most)

    def again(self, count: int, most: int) -> bool:
        return count == min(self.count, most)

    def observe(self, count: int, accepted: int, seconds: float) -> None:
        """Nothing is learned."""
