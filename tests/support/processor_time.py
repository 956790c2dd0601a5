"""Bounds of processor time that hold on slow machines, too."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

ADDITIONS = 500_000
USUAL_SECONDS = 0.025  # of that many additions on the machines that bounds were set on


def processor_seconds() -> float:
    """Return the processor time of this process and of the children it has waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _slowness() -> float:
    """Return how many times longer than usual Python takes at present, at least 1."""
    start, total = processor_seconds(), 0
    for i in range(ADDITIONS):
        total += i
    return max(1.0, (processor_seconds() - start) / USUAL_SECONDS)


@contextmanager
def processor_time_below(seconds: float) -> Iterator[None]:
    """Fail if the block takes `seconds` of processor time or more on a machine of usual speed.

    Processor time, because other tests run; scaled, because machines of CI were 6 times slower on
    some days.
    """
    slowness = _slowness()
    start = processor_seconds()
    yield
    taken = processor_seconds() - start
    slowness = max(slowness, _slowness())
    assert taken < seconds * slowness, f"{taken:.2f} s; machine: {slowness:.1f} times slower"
