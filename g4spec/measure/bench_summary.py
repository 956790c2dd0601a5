"""Measurements of one draft length on one prompt, and their summary over a category."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from g4spec.core import MAX_DRAFT
from g4spec.measure.prompts import BenchPrompt

SCHEMA = "g4spec.bench/1"
"""Schema version of a result file."""

ALL = "all"
"""Name of the row that sums up the categories."""

DraftLength = int | Literal["auto"]


@dataclass(slots=True)
class Sample:
    """Measurements of one draft length on one prompt. Lists of seconds and cycles have one entry
    per repeat; counts are over all repeats, because `auto` may choose differently each time."""

    prompt: BenchPrompt
    length: DraftLength
    prompt_tokens: int
    tokens: int = 0  # generated; the same for every draft length of a prompt
    seconds: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    cycles: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    accepted_lengths: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFT + 1))
    looping: bool = False

    @property
    def committed(self) -> float:
        """Mean tokens per step."""
        return 1 + sum(self.accepted) / sum(self.cycles) if any(self.cycles) else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else 0.0


@dataclass(frozen=True, slots=True)
class SweepRow:
    """Summary of one draft length on one category.

    Attributes:
        tokens_per_second: median of the repeats; `spread`: lowest and highest of them.
        prompt_range: lowest and highest prompt, medians of the repeats.
        ratio: speed over plain, median of the repeats; `ratio_spread`: lowest and highest.
        committed: mean tokens per step (accepted ones and the target's own);
            `committed_range`: lowest and highest prompt.
        acceptance: accepted over drafted tokens; `acceptance_range`: as above.
        tokens: generated in one repeat; all other counts are over all repeats.
        drafted_by_position, accepted_by_position: first drafted token first.
        accepted_lengths: cycles by number of accepted tokens, from 0.
        draft_ms, step_ms: milliseconds per cycle.
        looping: number of prompts whose output loops.
    """

    category: str
    length: DraftLength
    prompts: int
    tokens: int
    tokens_per_second: float
    spread: tuple[float, float]
    prompt_range: tuple[float, float]
    ratio: float
    ratio_spread: tuple[float, float]
    committed: float
    committed_range: tuple[float, float]
    acceptance: float
    acceptance_range: tuple[float, float]
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    accepted_lengths: list[int]
    draft_ms: float
    step_ms: float
    prefill_tokens_per_second: float
    looping: int


def summarize(samples: Sequence[Sample], lengths: Sequence[DraftLength]) -> list[SweepRow]:
    """Return a row per category and draft length; with several categories also rows for ALL."""
    categories = list(dict.fromkeys(s.prompt.category for s in samples))
    rows = []
    for category in categories if len(categories) == 1 else [*categories, ALL]:
        mine = [s for s in samples if category in (s.prompt.category, ALL)]
        plain = [s for s in mine if s.length == 0]
        for length in lengths:
            rows.append(_row(category, length, [s for s in mine if s.length == length], plain))
    return rows


def _row(
    category: str, length: DraftLength, samples: list[Sample], plain: list[Sample]
) -> SweepRow:
    # A prompt whose answer ends with its first token has nothing to time.
    timed = [s for s in samples if any(s.cycles)]
    speeds, base = _speeds(timed), _speeds([s for s in plain if any(s.cycles)])
    ratios = [a / b for a, b in zip(speeds, base, strict=True)] or [0.0]
    each = [statistics.median(s.tokens / t for t in s.seconds) for s in timed]
    cycles = sum(sum(s.cycles) for s in timed)
    drafted = _summed(s.drafted for s in timed)
    accepted = _summed(s.accepted for s in timed)
    return SweepRow(
        category=category,
        length=length,
        prompts=len(samples),
        tokens=sum(s.tokens for s in timed),
        tokens_per_second=statistics.median(speeds) if speeds else 0.0,
        spread=_range(speeds),
        prompt_range=_range(each),
        ratio=statistics.median(ratios),
        ratio_spread=_range(ratios),
        committed=1 + sum(accepted) / cycles if cycles else 0.0,
        committed_range=_range([s.committed for s in timed]),
        acceptance=sum(accepted) / sum(drafted) if sum(drafted) else 0.0,
        acceptance_range=_range([s.acceptance for s in timed]),
        drafted_by_position=drafted,
        accepted_by_position=accepted,
        accepted_lengths=_summed(s.accepted_lengths for s in timed),
        draft_ms=_milliseconds([s.draft for s in timed], timed),
        step_ms=_milliseconds([s.step for s in timed], timed),
        prefill_tokens_per_second=statistics.median(
            s.prompt_tokens / statistics.median(s.prefill) for s in samples
        ),
        looping=sum(s.looping for s in samples),
    )


def _speeds(samples: list[Sample]) -> list[float]:
    """Return tokens per second over all samples, one entry per repeat."""
    tokens = sum(s.tokens for s in samples)
    return [tokens / sum(times) for times in zip(*(s.seconds for s in samples), strict=True)]


def _milliseconds(times: list[list[float]], samples: list[Sample]) -> float:
    """Return milliseconds per cycle, median of the repeats."""
    seconds = [sum(column) for column in zip(*times, strict=True)]
    cycles = [sum(column) for column in zip(*(s.cycles for s in samples), strict=True)]
    each = [1000 * t / n for t, n in zip(seconds, cycles, strict=True)]
    return statistics.median(each) if each else 0.0


def _summed(columns: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*columns, strict=True)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 0.0)
