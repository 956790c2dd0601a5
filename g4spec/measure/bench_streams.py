"""Benchmarks concurrent streams: total throughput, and the latency of each stream.

Each of N streams has one request in flight and submits the next when it is done, until every
prompt was answered once; fewer prompts than streams are repeated, so that none is idle from the
start. Draft lengths alternate as in `bench`, after a warm-up that is not counted. The text of every
answer must equal the plain one.

- *First token*: time from submitting a request to its first token. A stream never waits for a
  slot, but it waits for the prefill of other streams.
- *Between tokens*: for each cycle, the time since the previous arrival divided by the number of
  its tokens; one entry per token.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from g4spec.core import Cycle
from g4spec.measure.bench import (
    WARM_UP,
    BenchConfig,
    Progress,
    TextDifference,
    check_clock,
    differences,
    encode_prompts,
    engine_options,
    rotate,
)
from g4spec.measure.bench_summary import DraftLength
from g4spec.measure.prompts import BenchPrompt
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Request

SCHEMA = "g4spec.bench-streams/1"


@dataclass(frozen=True, slots=True)
class StreamsRow:
    """Summary of one draft length. Latencies are in seconds, over all repeats.

    Attributes:
        tokens: generated in one repeat by all streams.
        tokens_per_second: of all streams, median of the repeats; `spread`: lowest and highest.
        ratio: speed over plain, median of the repeats.
        committed: mean tokens per step of one text. acceptance: accepted over drafted tokens.
        preempted: number of preemptions.
    """

    length: DraftLength
    streams: int
    requests: int
    tokens: int
    tokens_per_second: float
    spread: tuple[float, float]
    ratio: float
    first_token_median: float
    first_token_p95: float
    between_tokens_median: float
    between_tokens_p95: float
    committed: float
    acceptance: float
    preempted: int


@dataclass(slots=True)
class StreamsResult:
    """The result of a sweep. `interrupted`: True if Ctrl-C stopped it; then only whole repeats
    count, or the draft lengths that were measured once. `engine`: see `engine_options`."""

    config: BenchConfig
    rows: list[StreamsRow]
    differences: list[TextDifference]
    notes: list[str]
    interrupted: bool = False
    engine: dict[str, Any] = field(default_factory=dict)

    def json(self, provenance: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of the result file."""
        return {
            "schema": SCHEMA,
            "provenance": provenance,
            "options": asdict(self.config) | self.engine,
            "identical": not self.differences,
            "interrupted": self.interrupted,
            "rows": [asdict(row) for row in self.rows],
            "differences": [asdict(d) for d in self.differences],
            "notes": self.notes,
        }


@dataclass(slots=True)
class Round:
    """Measurements of answering all prompts once. `first`, `between`: latencies in seconds.
    `answers`: names of the prompts and their requests, in order of submission."""

    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    answers: list[tuple[str, Request]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(request.ids) for _, request in self.answers)

    def total(self, name: str) -> int:
        """Return the sum of a `Stats` field over all requests."""
        return sum(getattr(request.stats, name) for _, request in self.answers)


@dataclass(slots=True)
class ActiveRequest:
    """A request in flight. `submitted`, `arrived`: times of submission and of the last tokens.
    `times`: when each cycle that was not taken yet arrived."""

    request: Request
    cycles: Iterator[Cycle]
    submitted: float
    times: deque[float]
    arrived: float | None = None

    @classmethod
    def of(cls, request: Request, submitted: float) -> ActiveRequest:
        """Record when each cycle arrives: a step of the engine may bring several."""
        times = deque[float]()
        request.listen(lambda: times.append(time.perf_counter()))
        return cls(request, iter(request), submitted, times)


def sweep(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    config: BenchConfig,
    streams: int,
    *,
    progress: Progress = lambda done, total: None,
) -> StreamsResult:
    """Measure every draft length with `streams` concurrent requests.

    Raises InputError if two prompts are equal, EnvironmentProblem if the clock stands still, and
    KeyboardInterrupt if it comes before plain decoding is measured.
    """
    assert streams <= engine.pool.space.n_slots, streams
    texts = list(encode_prompts(engine, prompts, config.n_predict).items())
    texts *= max(1, -(-streams // len(texts)))
    result = StreamsResult(config, [], [], list(engine.notes), engine=engine_options(engine))
    rounds: dict[DraftLength, list[Round]] = {length: [] for length in config.lengths}
    try:
        _warm_up(engine, config, streams)
        for repeat in range(config.repeats):
            for done, length in enumerate(rotate(config.lengths, repeat)):
                rounds[length].append(
                    answer_prompts(engine, texts, config.options(length), streams)
                )
                progress(repeat * len(rounds) + done + 1, config.repeats * len(rounds))
    except KeyboardInterrupt:
        if not rounds[0]:
            raise
        result.interrupted = True
        whole = min(map(len, rounds.values())) or 1
        rounds = {length: made[:whole] for length, made in rounds.items() if made}
        result.notes.append(
            f"interrupted: {whole} of {config.repeats} repeats count, of "
            f"{len(rounds)} of {len(config.lengths)} settings"
        )
    for repeat in range(len(rounds[0])):
        for i, (name, _) in enumerate(texts):
            ids = {length: made[repeat].answers[i][1].ids for length, made in rounds.items()}
            result.differences += differences(name, ids)
    result.rows = [_row(length, streams, made, rounds[0]) for length, made in rounds.items()]
    result.notes += _remarks(result, rounds, engine, streams)
    return result


def _warm_up(engine: Engine, config: BenchConfig, streams: int) -> None:
    """Run every setting once on another prompt."""
    warm, began = engine.tokenizer.encode(WARM_UP), time.perf_counter()
    for length in config.lengths:
        few = config.options(length, min(16, config.n_predict))
        answer_prompts(engine, [("warm-up", warm)] * streams, few, streams)
    check_clock(began)


def answer_prompts(
    engine: Engine, prompts: Sequence[tuple[str, list[int]]], options: Options, streams: int
) -> Round:
    """Answer each of the named prompts once, `streams` at a time."""
    result, waiting, live = Round(), deque(prompts), list[ActiveRequest]()
    began = time.perf_counter()
    while waiting or live:
        while waiting and len(live) < streams:
            name, ids = waiting.popleft()
            now, request = time.perf_counter(), engine.submit(ids, options)
            result.answers.append((name, request))
            live.append(ActiveRequest.of(request, now))
        engine.step()
        live = [stream for stream in live if _take(stream, result)]
    result.seconds = time.perf_counter() - began
    return result


def _take(stream: ActiveRequest, result: Round) -> bool:
    """Record the arrived tokens; return False if the request is done."""
    while stream.request.has_news:
        cycle = next(stream.cycles, None)
        if cycle is None:
            return False
        n, now = len(cycle.tokens), stream.times.popleft()
        if stream.arrived is None:
            result.first.append(now - stream.submitted)
        else:
            result.between += [(now - stream.arrived) / n] * n if n else []
        stream.arrived = now
    return True


def _row(length: DraftLength, streams: int, rounds: list[Round], plain: list[Round]) -> StreamsRow:
    speeds = [r.tokens / r.seconds for r in rounds]
    ratios = [a / (b.tokens / b.seconds) for a, b in zip(speeds, plain, strict=True)]
    first = [s for r in rounds for s in r.first]
    between = [s for r in rounds for s in r.between]
    cycles, drafted, accepted, preempted = (
        sum(r.total(name) for r in rounds)
        for name in ("cycles", "drafted", "accepted", "preempted")
    )
    return StreamsRow(
        length=length,
        streams=streams,
        requests=len(rounds[0].answers),
        tokens=rounds[0].tokens,
        tokens_per_second=statistics.median(speeds),
        spread=(min(speeds), max(speeds)),
        ratio=statistics.median(ratios),
        first_token_median=percentile(first, 50),
        first_token_p95=percentile(first, 95),
        between_tokens_median=percentile(between, 50),
        between_tokens_p95=percentile(between, 95),
        committed=1 + accepted / cycles if cycles else 0.0,
        acceptance=accepted / drafted if drafted else 0.0,
        preempted=preempted,
    )


def percentile(values: Sequence[float], share: int) -> float:
    """Return the `share`-th percentile (nearest rank); 0 for no values."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)] if ordered else 0.0


def _remarks(
    result: StreamsResult, rounds: dict[DraftLength, list[Round]], engine: Engine, streams: int
) -> list[str]:
    """Return notes on how reliable the numbers are."""
    notes = [
        note
        for made in rounds.values()
        for r in made
        for _, request in r.answers
        for note in request.notes
    ]
    if any(row.preempted for row in result.rows):
        notes.append(
            "texts were preempted: all streams share a cache of one context, "
            f"{engine.n_ctx} tokens; raise -c"
        )
    requests, prompts = result.rows[0].requests, len({name for name, _ in rounds[0][0].answers})
    if prompts < streams:
        notes.append(
            f"fewer prompts than streams: each was answered {requests // prompts} times a repeat, "
            "and equal texts read the same experts"
        )
    elif requests < 2 * streams:
        notes.append(f"{requests} prompts for {streams} streams: fewer were busy most of the time")
    if result.config.repeats == 1:
        notes.append("one repeat: the spread of the timing is unknown")
    return [note for note in dict.fromkeys(notes) if note not in result.notes]
