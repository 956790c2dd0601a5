"""Chooses the draft length to use from a sweep, and describes it in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from g4spec.measure.bench_summary import ALL, DraftLength, SweepRow
from g4spec.measure.prompts import TITLES

NOISE = 0.02
"""Relative difference in speed that counts as scatter, even if the spread is smaller."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended draft lengths.

    Attributes:
        lengths: category -> draft length, or "auto", with the highest median speed; empty if no
            fixed length was measured.
        auto: category -> speed of `auto` as a fraction of the best measured fixed length.
        words, auto_words: the recommendation as text.
        unmeasured: category -> longest measured length, if it was the fastest fixed one although
            the draft supports longer ones, which may be faster.
        ties: category -> other measured lengths that are equal within the scatter of the repeats.
        tie_words: `ties` as text.
    """

    lengths: dict[str, DraftLength]
    auto: dict[str, float]
    words: str
    auto_words: str
    unmeasured: dict[str, int] = field(default_factory=dict)
    ties: dict[str, list[DraftLength]] = field(default_factory=dict)
    tie_words: str = ""

    def json(self) -> dict[str, Any]:
        return asdict(self)


def recommend(rows: Sequence[SweepRow], longest: int | None = None) -> Recommendation:
    """Choose the draft length with the highest median speed for each category, `auto` included.

    Lengths without any accepted token are excluded: their speed-up is noise. Of equal medians, the
    smallest length wins, because it drafts the fewest tokens. Lengths that may be as fast are
    reported as ties (see `_tied`).

    Args:
        longest: maximum draft length.
    """
    by_category: dict[str, list[SweepRow]] = {}
    for row in rows:
        by_category.setdefault(row.category, []).append(row)
    if len(by_category) > 1:
        by_category.pop(ALL, None)
    if all(row.length in (0, "auto") for row in rows):
        return Recommendation({}, {}, _unfixed(by_category), "")
    lengths: dict[str, DraftLength] = {}
    auto: dict[str, float] = {}
    unmeasured: dict[str, int] = {}
    ties: dict[str, list[DraftLength]] = {}
    equal: dict[str, bool] = {}
    for category, mine in by_category.items():
        fixed = [r for r in mine if r.length == 0 or (r.length != "auto" and r.committed > 1)]
        best = max(fixed, key=lambda r: (r.tokens_per_second, -int(r.length)))
        measured = max(int(r.length) for r in mine if r.length != "auto")
        if best.length == measured != 0 and measured < (longest or 0):
            unmeasured[category] = measured
        autos = [r for r in mine if r.length == "auto"]
        for row in autos:
            if best.tokens_per_second:
                auto[category] = row.tokens_per_second / best.tokens_per_second
        autos = [r for r in autos if r.committed > 1]
        # The first one of equal ones.
        chosen = max([best, *autos], key=lambda r: r.tokens_per_second)
        lengths[category] = chosen.length
        others = [r for r in [*fixed, *autos] if r is not chosen and _tied(chosen, r)]
        if others:
            ties[category] = [r.length for r in others]
            equal[category] = any(r.tokens_per_second == chosen.tokens_per_second for r in others)
    return Recommendation(
        lengths,
        auto,
        _words(lengths, ties) + _unmeasured_words(unmeasured),
        _auto_words(auto),
        unmeasured,
        ties,
        _tie_words(lengths, ties, equal),
    )


def _tied(best: SweepRow, other: SweepRow) -> bool:
    """Return True if a median is within the spread of the other's repeats, or within NOISE."""
    near = min(best.spread[0], best.tokens_per_second * (1 - NOISE))
    return other.tokens_per_second >= near or other.spread[1] >= best.tokens_per_second


def _tie_words(
    lengths: dict[str, DraftLength], ties: dict[str, list[DraftLength]], equal: dict[str, bool]
) -> str:
    """Describe which lengths are as fast as the recommended ones, within the scatter.

    Args:
        equal: category -> True if another length has the same median as the recommended one.
    """
    groups: dict[tuple[DraftLength, tuple[DraftLength, ...], bool], list[str]] = {}
    for category, others in ties.items():
        key = lengths[category], tuple(others), equal[category]
        groups.setdefault(key, []).append(TITLES.get(category, category))
    parts = []
    for (chosen, tied, same), names in groups.items():
        ordered = sorted((chosen, *tied), key=lambda n: (n == "auto", n if n != "auto" else 0))
        why = "drafts the fewest tokens" if same else "has the highest median"
        parts.append(
            f"{_listed([_name(n) for n in ordered])} for {_listed(names)} ({_name(chosen)} {why})"
        )
    return f"Equal within the scatter: {'; '.join(parts)}." if parts else ""


def _name(length: DraftLength) -> str:
    return "no draft" if length == 0 else str(length)


def _unfixed(by_category: dict[str, list[SweepRow]]) -> str:
    """Describe a sweep in which no fixed draft length was measured."""
    autos = {
        name: row.ratio
        for name, rows in by_category.items()
        for row in rows
        if row.length == "auto"
    }
    if not autos:
        return "Only plain decoding was measured."
    mean, lowest = sum(autos.values()) / len(autos), min(autos, key=lambda name: autos[name])
    text = f"Only auto was measured: {mean:.2f} x plain"
    if len(autos) > 1:
        text += f" on average, at least {autos[lowest]:.2f} ({TITLES.get(lowest, lowest)})"
    return text + "."


def _words(lengths: dict[str, DraftLength], ties: dict[str, list[DraftLength]]) -> str:
    """Describe the recommended lengths. The reason for a tied one is left to `_tie_words`."""
    groups: dict[DraftLength, list[str]] = {}
    for category, length in lengths.items():
        groups.setdefault(length, []).append(TITLES.get(category, category))
    if list(groups) == [0]:
        return "Use no draft: it gains nothing on any of these prompts."
    if len(groups) == 1 and len(lengths) > 1:
        groups = {next(iter(groups)): [TITLES[ALL]]}
    parts = [f"{n} for {_listed(names)}" for n, names in groups.items() if n not in (0, "auto")]
    text = f"Draft {', '.join(parts)}." if parts else ""
    if "auto" in groups:
        tied = any(lengths[category] == "auto" for category in ties)
        why = "" if tied else ": it was faster than any fixed length"
        text += f" Use auto for {_listed(groups['auto'])}{why}."
    if 0 in groups:
        text += f" No draft for {_listed(groups[0])}: it gains nothing there."
    return text.strip()


def _unmeasured_words(unmeasured: dict[str, int]) -> str:
    """Describe where a longer draft may be faster."""
    if not unmeasured:
        return ""
    names = [TITLES.get(name, name) for name in unmeasured]
    return (
        f" Longer drafts than {max(unmeasured.values())} were not measured and may be faster "
        f"for {_listed(names)}: --draft-max sweep."
    )


def _auto_words(auto: dict[str, float]) -> str:
    """Describe the speed of `auto`; "" if it was not measured."""
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
