"""Which draft length to use, from a sweep, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from g4spec.measure.bench_summary import ALL, Row
from g4spec.measure.prompts import TITLES

NOISE = 0.02
"""Differences in speed below this say nothing, even when the repeats agree better."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Length by category, what `auto` reaches of the best fixed length, and each in words. Both
    are empty where no fixed length was measured."""

    lengths: dict[str, int]
    auto: dict[str, float]
    words: str
    auto_words: str

    def json(self) -> dict[str, Any]:
        return asdict(self)


def recommend(rows: Sequence[Row]) -> Recommendation:
    """The fastest fixed length of each category.

    A length at which no draft was accepted cannot gain; whatever the clock said, it was noise.
    Lengths whose speed-up lies within the spread of the fastest one's repeats, or within `NOISE`,
    are ties; the smallest of them is taken, because it wastes the least.
    """
    by_category: dict[str, list[Row]] = {}
    for row in rows:
        by_category.setdefault(row.category, []).append(row)
    if len(by_category) > 1:
        by_category.pop(ALL, None)
    if all(row.length in (0, "auto") for row in rows):
        return Recommendation({}, {}, _unfixed(by_category), "")
    lengths: dict[str, int] = {}
    auto: dict[str, float] = {}
    for category, mine in by_category.items():
        fixed = [r for r in mine if r.length == 0 or (r.length != "auto" and r.committed > 1)]
        best = max(fixed, key=lambda r: r.ratio)
        enough = min(best.ratio_spread[0], best.ratio * (1 - NOISE))
        lengths[category] = min(int(r.length) for r in fixed if r.ratio >= enough)
        for row in mine:
            if row.length == "auto" and best.ratio:
                auto[category] = row.ratio / best.ratio
    return Recommendation(lengths, auto, _words(lengths), _auto_words(auto))


def _unfixed(by_category: dict[str, list[Row]]) -> str:
    """Without a fixed length there is none to recommend."""
    autos = {name: row.ratio for name, rows in by_category.items()
             for row in rows if row.length == "auto"}  # fmt: skip
    if not autos:
        return "Only plain decoding was measured."
    mean, lowest = sum(autos.values()) / len(autos), min(autos, key=lambda name: autos[name])
    text = f"Only auto was measured: {mean:.2f} x plain"
    if len(autos) > 1:
        text += f" on average, at least {autos[lowest]:.2f} ({TITLES.get(lowest, lowest)})"
    return text + "."


def _words(lengths: dict[str, int]) -> str:
    groups: dict[int, list[str]] = {}
    for category, length in lengths.items():
        groups.setdefault(length, []).append(TITLES.get(category, category))
    if list(groups) == [0]:
        return "Use no draft: it gains nothing on any of these prompts."
    if len(groups) == 1 and len(lengths) > 1:
        groups = {next(iter(groups)): [TITLES[ALL]]}
    parts = [f"{n} for {_listed(names)}" for n, names in groups.items() if n]
    text = f"Draft {', '.join(parts)}." if parts else ""
    if 0 in groups:
        text += f" No draft for {_listed(groups[0])}: it gains nothing there."
    return text.strip()


def _auto_words(auto: dict[str, float]) -> str:
    """Empty when `auto` was not measured."""
    if not auto:
        return ""
    mean = sum(auto.values()) / len(auto)
    lowest = min(auto, key=lambda name: auto[name])
    text = f"auto, which chooses while it runs, reaches {mean:.0%} of the best fixed length"
    if len(auto) > 1:
        text += f" on average, at least {auto[lowest]:.0%} ({TITLES.get(lowest, lowest)})"
    return text + "."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
