"""Benchmarks a draft: every draft length on every category of prompts, against plain decoding.

Method:

- All draft lengths of a prompt run one after the other, in an order that rotates from prompt to
  prompt and repeat to repeat, so that thermal throttling affects all of them. A speed-up compares
  runs of the same repeat. Repeats time the same prompts again; counts of tokens come from the
  first.
- Every draft length first runs once on another prompt as a warm-up.
- Prefill is timed separately. Speed is emitted tokens over the time of drafting and steps.
- The text of every run must equal the plain text; otherwise the benchmark has failed.
- Ctrl-C stops early; prompts measured with every draft length count (`SweepResult.interrupted`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from g4spec import ranges
from g4spec.core import MAX_DRAFT
from g4spec.errors import EnvironmentProblem, InputError, UsageError
from g4spec.measure.bench_summary import ALL, SCHEMA, DraftLength, Sample, SweepRow, summarize
from g4spec.measure.prompts import BenchPrompt, title
from g4spec.models.drafter import WeightedDrafter
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Stats

LOOPING = 0.5
"""Fraction of repeated n-grams above which an output counts as looping."""

Progress = Callable[[int, int], None]

WARM_UP = "A list of words, one word a line:\napple\nbridge\ncandle\n"


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Settings of a benchmark. `lengths` begin with 0, plain decoding."""

    lengths: tuple[DraftLength, ...]
    n_predict: int = 128
    repeats: int = 3
    sampler: Sampler = field(default_factory=Sampler)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        ranges.check(n_predict=self.n_predict, repeats=self.repeats)
        if not self.n_predict:
            raise UsageError("`n_predict`", expected=">= 1", found=0)
        if self.lengths[:1] != (0,) or len(set(self.lengths)) != len(self.lengths):
            raise UsageError("`lengths`", expected="different lengths", found=self.lengths)

    def options(self, length: DraftLength, n_predict: int | None = None) -> Options:
        return Options(n_predict or self.n_predict, self.sampler, length, (), self.ignore_eos)


def longest_proposal(engine: Engine) -> int | None:
    """Return the maximum draft length of an engine's draft; None without a draft."""
    return engine.draft.max_tokens if engine.draft else None


def engine_options(engine: Engine) -> dict[str, Any]:
    """Return the settings of an engine that change speed, acceptance or texts, by parameter of
    `Engine.load`."""
    draft = engine.draft if isinstance(engine.draft, WeightedDrafter) else None
    return {
        "n_ctx": engine.n_ctx,
        "cache_type": engine.backend.cache_type or "f32",
        "draft_window": draft.window if draft else None,
        "draft_p_min": getattr(draft.config, "p_min", 0.0) if draft else 0.0,
    }


@dataclass(frozen=True, slots=True)
class TextDifference:
    """A text that differs from the plain one. `index`: of the first differing token; `plain` and
    `speculative`: its ids, None after the end of a text."""

    prompt: str
    length: DraftLength
    index: int
    plain: int | None
    speculative: int | None


@dataclass(slots=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        texts: prompt name -> digests of the ids of the prompt and of the plain output.
        interrupted: True if Ctrl-C stopped it. Only whole repeats count, or, within the first
            repeat, prompts that were measured with every draft length.
        engine: settings of the engine (see `engine_options`).
    """

    config: BenchConfig
    rows: list[SweepRow]
    differences: list[TextDifference]
    texts: dict[str, dict[str, str]]
    notes: list[str]
    memory: dict[str, int | None]
    interrupted: bool = False
    engine: dict[str, Any] = field(default_factory=dict)

    def row(self, category: str, length: DraftLength) -> SweepRow | None:
        """Return one row, or None if it was not measured."""
        found = (r for r in self.rows if (r.category, r.length) == (category, length))
        return next(found, None)

    def json(self, provenance: dict[str, Any], advice: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of the result file."""
        return {
            "schema": SCHEMA,
            "provenance": provenance,
            "options": asdict(self.config) | self.engine,
            "recommendation": advice,
            "identical": not self.differences,
            "interrupted": self.interrupted,
            "rows": [asdict(r) for r in self.rows],
            "differences": [asdict(d) for d in self.differences],
            "texts": self.texts,
            "memory": self.memory,
            "notes": self.notes,
        }


def sweep(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    config: BenchConfig,
    *,
    idle: int | None = None,
    progress: Progress = lambda done, total: None,
) -> SweepResult:
    """Measure every draft length on every prompt; Ctrl-C stops early (`SweepResult.interrupted`).

    Args:
        idle: `memory_in_use()` before the engine was loaded, to report the growth.

    Raises InputError if two prompts are equal, EnvironmentProblem if the clock stands still, and
    KeyboardInterrupt if it comes before the first prompt is measured.
    """
    ids_of = encode_prompts(engine, prompts, config.n_predict)
    result = SweepResult(config, [], [], {}, list(engine.notes), {}, engine=engine_options(engine))
    peak, turns = 0, list[PromptRuns]()
    total = config.repeats * len(prompts) * len(config.lengths)
    try:
        _warm_up(engine, config)
        for repeat in range(config.repeats):
            for number, prompt in enumerate(prompts):
                runs: dict[DraftLength, TimedRun] = {}
                for length in rotate(config.lengths, repeat + number):
                    runs[length] = _measure(engine, ids_of[prompt.name], config.options(length))
                    peak = max(peak, memory_in_use() or 0)
                    progress(len(turns) * len(config.lengths) + len(runs), total)
                turns.append(PromptRuns(prompt, runs))
    except KeyboardInterrupt:
        if not turns:
            raise
        result.interrupted = True
        turns = turns[: len(turns) // len(prompts) * len(prompts) or None]  # whole repeats, if any
        result.notes.append(
            f"interrupted: {len(turns)} of {config.repeats * len(prompts)} "
            "measurements of a prompt count"
        )
    _sum_up(turns, result, ids_of)
    result.notes += [n for n in engine.notes if n not in result.notes] + _remarks(result)
    result.memory = _memory(engine, idle, peak)
    return result


def _sum_up(turns: Sequence[PromptRuns], result: SweepResult, ids_of: dict[str, list[int]]) -> None:
    """Fill in rows, differences and digests of a result."""
    samples: dict[tuple[str, DraftLength], Sample] = {}
    for prompt, runs in turns:
        ids = ids_of[prompt.name]
        for length in result.config.lengths:
            sample = Sample(prompt, length, len(ids))
            _add(runs[length], samples.setdefault((prompt.name, length), sample))
        result.differences += differences(prompt.name, {n: run.ids for n, run in runs.items()})
        result.texts[prompt.name] = {"prompt": _digest(ids), "text": _digest(runs[0].ids)}
    result.rows = summarize(list(samples.values()), result.config.lengths)


def _warm_up(engine: Engine, config: BenchConfig) -> None:
    """Run every setting once on another prompt."""
    warm, began = engine.tokenizer.encode(WARM_UP), time.perf_counter()
    for length in config.lengths:
        list(engine.generate(warm, config.options(length, min(16, config.n_predict))))
    check_clock(began)


def check_clock(began: float) -> None:
    """Raise EnvironmentProblem if no time has passed since `began`, although a text was made."""
    if time.perf_counter() == began:
        raise EnvironmentProblem(
            "the clock of this machine stands still: nothing can be measured",
            expected="time.perf_counter() to advance while a text is generated",
            found=f"{began:g} before and after",
            fix="measure outside of the sandbox or emulator that stops it",
        )


def repetition(ids: Sequence[int]) -> float:
    """Return the fraction of 4-grams ending in the second half of `ids` that occurred before.

    Near 1 for looping text, which any draft predicts; 0 for fewer than 32 tokens.
    """
    if len(ids) < 32:
        return 0.0
    seen: set[tuple[int, ...]] = set()
    again = total = 0
    for end in range(4, len(ids) + 1):
        gram = tuple(ids[end - 4 : end])
        if end > len(ids) // 2:
            total += 1
            again += gram in seen
        seen.add(gram)
    return again / total


def memory_in_use() -> int | None:
    """Return this process's anonymous memory in bytes; None except on Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("RssAnon:")), None)


def encode_prompts(
    engine: Engine, prompts: Sequence[BenchPrompt], n_predict: int
) -> dict[str, list[int]]:
    """Tokenize prompts, by name; reject equal prompts and prompts that do not fit the context."""
    found: dict[str, list[int]] = {}
    seen: dict[tuple[int, ...], str] = {}
    for prompt in prompts:
        ids = prompt.encode(engine.tokenizer)
        if (first := seen.setdefault(tuple(ids), prompt.name)) != prompt.name:
            raise InputError(
                f"prompts {first} and {prompt.name} are the same text",
                fix="remove one: a prompt may count only once",
            )
        if len(ids) + n_predict > engine.n_ctx:
            raise UsageError(
                f"{title(prompt.name)} and `n_predict` {n_predict} do not fit",
                expected=f"at most {engine.n_ctx} tokens",
                found=len(ids) + n_predict,
                fix="raise `n_ctx` or lower `n_predict`",
            )
        found[prompt.name] = ids
    return found


def rotate(lengths: tuple[DraftLength, ...], by: int) -> tuple[DraftLength, ...]:
    """Rotate `lengths` to the left by `by` places."""
    by %= len(lengths)
    return lengths[by:] + lengths[:by]


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One timed text. `accepted_lengths`: number of cycles by number of accepted tokens."""

    ids: list[int]
    stats: Stats
    accepted_lengths: Counter[int]


class PromptRuns(NamedTuple):
    """A prompt with one run per draft length."""

    prompt: BenchPrompt
    runs: dict[DraftLength, TimedRun]


def _measure(engine: Engine, prompt: list[int], options: Options) -> TimedRun:
    """Generate a text once."""
    run = engine.generate(prompt, options)
    # The first token comes from the prompt alone.
    counts = Counter(cycle.accepted for number, cycle in enumerate(run) if number)
    engine.notes += [n for n in run.notes if n not in engine.notes]
    return TimedRun(run.ids, run.stats, counts)


def _add(run: TimedRun, sample: Sample) -> None:
    """Add the counts and timings of a run to a sample."""
    stats = run.stats
    sample.seconds.append(stats.seconds)
    sample.prefill.append(stats.prefill_seconds)
    sample.draft.append(stats.draft_seconds)
    sample.step.append(stats.step_seconds)
    sample.cycles.append(stats.cycles)
    for i in range(MAX_DRAFT):
        sample.drafted[i] += stats.drafted_by_position[i]
        sample.accepted[i] += stats.accepted_by_position[i]
    for accepted, cycles in run.accepted_lengths.items():
        sample.accepted_lengths[accepted] += cycles
    # A stop token is computed but not emitted; the last cycle's tokens after it never counted.
    sample.tokens = len(run.ids) - 1 + stats.stop_reason.startswith("stop token")
    sample.looping = repetition(run.ids) > LOOPING


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the index of the first token in which texts differ, or the length of the shorter."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def differences(prompt: str, ids: dict[DraftLength, list[int]]) -> Iterable[TextDifference]:
    """Yield the first difference of each text from the plain one, ids[0]."""
    plain = ids[0]
    for length, other in ids.items():
        if other != plain:
            at = first_difference(plain, other)
            a, b = (x[at] if at < len(x) else None for x in (plain, other))
            yield TextDifference(prompt, length, at, a, b)


def _remarks(result: SweepResult) -> list[str]:
    """Return notes on how reliable the numbers are."""
    notes = [
        f"{r.category}: {r.looping} of {r.prompts} outputs loop, which inflates acceptance"
        for r in result.rows
        if r.looping and r.length == 0 and r.category != ALL
    ]
    if result.config.repeats == 1:
        notes.append("one repeat: the spread of the timing is unknown")
    return notes


def _memory(engine: Engine, idle: int | None, peak: int) -> dict[str, int | None]:
    planned = asdict(engine.memory) | {"total": engine.memory.total}
    return {**planned, "grown": peak - idle if idle is not None and peak else None}


def _digest(ids: list[int]) -> str:
    return sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
