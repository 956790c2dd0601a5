"""Requests with `--draft-max auto` whose costs a test sets, and what they drafted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from g4spec.core import Cycle
from g4spec.runtime.engine import Engine


def set_costs(engine: Engine, table: Mapping[tuple[int, int], float]) -> None:
    """Set the seconds of (requests, drafted tokens each), whatever cycles take."""
    lengths, observe = engine.lengths, engine.lengths.observe
    lengths.set_costs(table)

    def observed(states: Any, counts: list[int], accepted: list[int], seconds: float) -> None:
        assert lengths.costs is not None
        observe(states, counts, accepted, lengths.costs(counts))

    lengths.observe = observed  # type: ignore[method-assign,assignment]


def proposals(n_prompt: int, cycles: Iterable[Cycle]) -> dict[int, list[int]]:
    """Return the drafted tokens of a request by position."""
    position, out = n_prompt, {}
    for cycle in list(cycles)[1:]:
        if cycle.drafted:
            out[position] = cycle.drafted
        position += len(cycle.tokens)
    return out
