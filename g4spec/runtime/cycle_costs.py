"""Prediction of cycle times, for the policy of draft lengths (`draft_length.py`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

SHORTEST = 1e-6
"""Least seconds of a cycle. A clock that is coarse or stands still measures 0."""


def bucket(count: int) -> int:
    """Return the number of sequences, or of rows of each, to which a recorded step pads so many:
    the next power of two."""
    return 1 << (count - 1).bit_length()


class CycleCosts:
    """Predicts the time of a cycle: interpolates a table of measured times and tracks how much
    slower or faster cycles have become since.

    A cycle reads the KV cache of its requests once, however much it drafts: `context` bytes at
    `per_byte` seconds each, added to the table. Beyond that, all cycles with drafts share one
    factor on the table, and plain steps have another. If one factor decreases since the other was
    last measured, the other decreases too; an increase may have its own reasons.

    Args:
        measured: (requests, drafted tokens each) -> seconds; plain steps have 0 tokens.
        padded: whether every request of a step costs as many rows as the longest draft, and a
            batch as much as the next larger one that was measured (recorded CUDA graphs); otherwise
            only its own rows.
        per_byte: seconds per byte of KV cache that a step reads.

    Attributes:
        context: bytes of KV cache of the requests of the next cycle.
    """

    def __init__(
        self,
        measured: Mapping[tuple[int, int], float],
        padded: bool = False,
        per_byte: float = 0.0,
    ) -> None:
        self.padded, self.context, self._per_byte = padded, 0.0, per_byte
        self._tables: dict[int, dict[int, float]] = {}
        for (requests, count), seconds in sorted(measured.items()):
            self._tables.setdefault(requests, {})[count] = max(seconds, SHORTEST)
        assert all(0 in t and len(t) > 1 for t in self._tables.values()), measured
        self._requests = list(self._tables)
        # 0 is plain decoding, without a draft: it never takes part in the interpolation.
        self._counts = {n: [count for count in table if count] for n, table in self._tables.items()}
        self._known: dict[tuple[int, float], float] = {}  # interpolated before
        # Seconds over those measured first, and each when the other was last measured.
        self._plain = self._drafted = self._plain_then = self._drafted_then = 1.0
        self._factors = 1.0, 1.0  # of plain and drafted cycles now

    def __call__(self, counts: Sequence[int]) -> float:
        """Return the seconds of a cycle in which request i drafts counts[i] tokens."""
        requests, total, reading = len(counts), sum(counts), self._per_byte * self.context
        if not total:
            return (self._measured(requests, 0) + reading) * self._factors[0]
        drafting = requests - counts.count(0)
        each = max(counts) if self.padded else total / drafting
        seconds = self._measured(requests, each)
        if drafting < requests and not self.padded:
            # All requests are in the step, some are drafted for. The draft may cost as much for
            # some as for all, and the step's rows may fill another tile: count the dearer of both.
            plain = self._measured(requests, 0)
            by_rows = (seconds - plain) * drafting / requests
            by_requests = self._measured(drafting, each) - self._measured(drafting, 0)
            seconds = plain + max(by_rows, by_requests)
        return (seconds + reading) * self._factors[1]

    def update(self, counts: Sequence[int], seconds: float, weight: float = 0.2) -> None:
        """Learn from a cycle that took `seconds`."""
        change = 1 + weight * (max(seconds, SHORTEST) / self(counts) - 1)
        if any(counts):
            self._drafted = self._factors[1] * change
            self._plain_then = self._plain * min(1.0, self._drafted / self._drafted_then)
        else:
            self._plain = self._factors[0] * change
            self._drafted_then = self._drafted * min(1.0, self._plain / self._plain_then)
        self._factors = (
            self._plain * min(1.0, self._drafted / self._drafted_then),
            self._drafted * min(1.0, self._plain / self._plain_then),
        )

    def _measured(self, requests: int, count: float) -> float:
        """Return the originally measured seconds for `count` drafted tokens each."""
        seconds = self._known.get((requests, count))
        if seconds is None:
            seconds = self._known[requests, count] = self._interpolate_counts(requests, count)
        return seconds

    def _interpolate_counts(self, requests: int, count: float) -> float:
        if requests not in self._tables:
            at = bisect_left(self._requests, requests)
            if self.padded and at < len(self._requests):
                return self._measured(self._requests[at], count)
            return interpolate(requests, self._requests, lambda t: self._measured(t, count))
        if count == 0:
            return self._tables[requests][0]
        return interpolate(count, self._counts[requests], self._tables[requests].__getitem__)


def interpolate(x: float, known: Sequence[int], value: Callable[[int], float]) -> float:
    """Interpolate `value` linearly at x between the ascending points `known`. Constant before the
    first point; after the last one the last slope continues, if it is positive."""
    at = bisect_left(known, x)
    if at == 0 or len(known) == 1:
        return value(known[0])
    at = min(at, len(known) - 1)
    low, high = value(known[at - 1]), value(known[at])
    along = (x - known[at - 1]) / (known[at] - known[at - 1])
    return low + (high - low) * (along if high > low else min(along, 1.0))
