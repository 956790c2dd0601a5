"""Times steps and cycles of models with random weights on a GPU (`bench --synthetic`).

The time of a step is the median replay time of its CUDA graph (CUDA events): GPU time without
Python overhead. The time of a draft is that of its part of the cycles. A cycle is timed by wall
clock, and accepts a forced number of tokens, because random weights predict nothing. The GPU idles
before each measurement, so that its clock does not depend on earlier work; sustained cycles are
timed after a second of cycles, when the power limit determines the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from g4spec import ranges
from g4spec.core import MAX_STEP_ROWS, PAGE, Sequence, Work
from g4spec.errors import UsageError
from g4spec.measure import run_record as provenance
from g4spec.measure import synthetic
from g4spec.quant import policy
from g4spec.runtime.batches import batch_of
from g4spec.runtime.chooser import RequestChooser
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.graph_runner import GraphRunner
from g4spec.runtime.pool import Pool
from g4spec.runtime.request import Options
from g4spec.runtime.target import Target
from g4spec.runtime.torch_settings import own_settings

SCHEMA = "g4spec.synthetic/2"
ROWS = (1, 2, 4, 8, 16)
CONTEXTS = (64, 4096)
WARM = 3
REST = 0.5
"""Idle seconds before a measurement."""
SUSTAIN = 1.0
"""Seconds of back-to-back cycles before sustained cycles are timed."""

LABEL = "random weights, made on the GPU; acceptance forced: speed only, nothing about quality"


@dataclass(frozen=True, slots=True)
class SyntheticConfig:
    """Settings of a synthetic benchmark.

    Attributes:
        type, draft_type: quant types or mixes, as `--type` of `quantize`.
        draft: "dflash" (proposes a block at once), "assistant" (proposes one token after the
            other, as many as a cycle commits), or None for the size's default.
        contexts: context lengths in tokens at which steps are timed.
        accept_length: tokens committed per cycle, the target's own included.
        times: number of repetitions; the median counts.
        streams: batch sizes (texts with one row each) whose step is timed.
    """

    type: str = "q4_k_m"
    draft_type: str = "q8_0"
    draft: str | None = None
    contexts: tuple[int, ...] = CONTEXTS
    accept_length: int = 6
    times: int = 20
    streams: tuple[int, ...] = ()

    @property
    def room(self) -> int:
        """Positions that the timed cycles need after a context."""
        return (self.times + WARM + 1) * self.accept_length + 2 * MAX_STEP_ROWS

    def __post_init__(self) -> None:
        ranges.check(accept_length=self.accept_length)


StepObserver = Callable[[int, int, Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True)
class SyntheticRow:
    """Measurements at one context, in milliseconds.

    Attributes:
        steps: number of rows -> step time of one text.
        streams: number of texts -> step time with one row each.
        draft, cycle: times of the draft and of a cycle after idling.
        sustained: time of a sustained cycle, which gives `tokens_per_second`.
    """

    context: int
    prefill_tokens_per_second: float
    steps: dict[int, float]
    streams: dict[int, float]
    draft: float
    cycle: float
    sustained: float
    tokens_per_second: float


def measure(
    name: str, backend: CudaBackend, config: SyntheticConfig, watch: StepObserver | None = None
) -> dict[str, Any]:
    """Build a model of a size in `synthetic.TARGETS` with a draft, time it, and return the
    contents of the result file.

    Args:
        watch: called with each context, number of rows, and a function that replays that step.
    """
    kind = check_config(name, config)
    with own_settings(backend.ops.device):
        return _measure(name, kind, backend, config, watch)


def _measure(
    name: str,
    kind: str,
    backend: CudaBackend,
    config: SyntheticConfig,
    watch: StepObserver | None,
) -> dict[str, Any]:
    ops = backend.ops
    read = bandwidth(ops.device)
    torch.cuda.empty_cache()
    n_ctx = max(config.contexts) + config.room
    texts = max((1, *config.streams))
    target = synthetic.make_target(name, config.type, backend, n_ctx, texts, texts * (n_ctx + PAGE))
    drafter = synthetic.make_draft(name, config.draft_type, target, kind)
    pool = Pool(target.space)
    sequences = [Sequence(pool.free_slots.pop(), [], 0) for _ in range(texts)]
    for sequence in sequences:
        pool.grow(sequence, n_ctx)
    StepGraph(target, sequences[:1], 1, 0)  # packs the weights that a step reads
    pairs, rows = ops.pairs.nbytes, []
    for context in config.contexts:
        rows.append(_at(context, target, drafter, sequences, config))
        if watch is not None:
            for count in ROWS:
                watch(context, count, StepGraph(target, sequences[:1], count, context).replay)
    held = weight_bytes(target.model.w) + pairs
    step = held - _idle_bytes(target.model.w, target.config.layers[0])
    plain = rows[0].steps[1]
    return {
        "schema": SCHEMA,
        "label": LABEL,
        "model": name,
        "type": config.type,
        "draft": kind,
        "draft_type": config.draft_type,
        "cache_type": backend.cache_type,
        "accept_length": config.accept_length,
        "machine": provenance.describe_machine(),
        "device": backend.title,
        "driver": provenance.driver(),
        "commit": provenance.commit(),
        "torch": torch.__version__,
        "overridden_ops": provenance.overridden(ops),
        "ops_without_kernel": sorted(ops.without_kernel),
        "read_bytes_per_second": read,
        "weight_bytes": held,
        "step_bytes": step,
        "fraction_of_bandwidth": step / (plain * 1e-3) / read,
        "rows": [_json(row) for row in rows],
    }


class StepGraph:
    """A captured step of the target: `count` rows of each sequence, from position `start` on."""

    def __init__(self, target: Target, sequences: Seq[Sequence], count: int, start: int) -> None:
        parts = [(s.slot, start, random_tokens(target, count)) for s in sequences]
        self.batch = batch_of(target.ops, parts)

        def run() -> tuple[torch.Tensor, ...]:
            rows, logits = target.step(self.batch, capped=False)
            return rows.hidden, rows.taps, logits

        for _ in range(2):
            run()
        self.graph = graphs.Capture(run, None)

    def replay(self) -> torch.Tensor:
        """Replay the graph; return logits [T, V]."""
        self.graph.replay()
        return self.graph.outputs[2]


def check_config(name: str, config: SyntheticConfig) -> str:
    """Return the kind of draft; raise UsageError for an unknown size, draft or type."""
    policy.readable_mix(config.type)
    if name not in synthetic.TARGETS:
        raise UsageError("`synthetic`", expected=", ".join(synthetic.TARGETS), found=name)
    kinds = synthetic.draft_kinds(name)
    if config.draft not in (None, *kinds):
        raise UsageError(
            f"`draft` with `synthetic` {name}", expected=" or ".join(kinds), found=config.draft
        )
    return config.draft or kinds[0]


def milliseconds(run: Callable[[], Any], times: int = 20, rest: float = 0.0) -> float:
    """Return the median GPU time of `run` in milliseconds, after one warm-up run and `rest` idle
    seconds. Runs are launched back to back, so launch overhead (0.1 ms on some hosts) is hidden."""
    run()
    torch.cuda.synchronize()
    time.sleep(rest)
    marks = [_mark()]
    for _ in range(times):
        run()
        marks.append(_mark())
    torch.cuda.synchronize()
    return float(round(median(a.elapsed_time(b) for a, b in pairwise(marks)), 3))


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def bandwidth(device: torch.device | str = "cuda") -> float:
    """Measure the read bandwidth in bytes/s: a sum over half of the free memory, at most 8 GiB."""
    count = min(1 << 31, torch.cuda.mem_get_info()[0] // 8)
    x = torch.ones(count, dtype=torch.float32, device=device)
    return float(x.nbytes / (milliseconds(x.sum, 5) * 1e-3))


def weight_bytes(weights: Mapping[str, Any]) -> int:
    """Return the bytes of the weights in GPU memory; shared storage counts once."""
    seen = {}
    for w in weights.values():
        data = w if isinstance(w, torch.Tensor) else w.table
        seen[data.data_ptr()] = data.nbytes
    return sum(seen.values())


def _idle_bytes(weights: Mapping[str, Any], layer: Any) -> int:
    """Return the bytes of the experts that one row does not use."""
    stacks = {name: w for name, w in weights.items() if name.endswith("_exps.weight")}
    if not stacks:
        return 0
    idle: float = 1 - layer.n_expert_used / layer.n_expert
    return int(weight_bytes(stacks) * idle)


def _at(
    context: int, target: Target, drafter: Any, sequences: Seq[Sequence], config: SyntheticConfig
) -> SyntheticRow:
    speed = max(prefill(target, drafter, s, context) for s in sequences)
    steps, streams = {}, {}
    for rows in ROWS:
        step = StepGraph(target, sequences[:1], rows, context)
        assert bool(step.replay().isfinite().all()), (context, rows)
        steps[rows] = milliseconds(step.replay, config.times, REST)
    for count in config.streams:
        step = StepGraph(target, sequences[:count], 1, context)
        assert bool(step.replay().isfinite().all()), (context, count)
        streams[count] = milliseconds(step.replay, config.times, REST)
    length = 1 + min(config.accept_length - 1, drafter.max_tokens)
    most = drafter.max_tokens if drafter.one_pass else min(drafter.max_tokens, length)
    cycles = CycleTimer(target, drafter, sequences[0], most, length - 1)
    cycle = sustained = cycles.time(context, config.times, REST)
    draft = cycles.draft
    end = time.perf_counter() + SUSTAIN
    while time.perf_counter() < end:
        sustained = cycles.time(context, config.times)
    rate = round(length / sustained * 1e3, 1)
    return SyntheticRow(context, speed, steps, streams, draft, cycle, sustained, rate)


def random_tokens(target: Target, n: int) -> list[int]:
    """Return `n` random token ids."""
    ids: list[int] = torch.randint(10, target.config.n_vocab, (n,)).tolist()
    return ids


def prefill(target: Target, drafter: Any, sequence: Sequence, tokens: int) -> float:
    """Prefill `tokens` random tokens, to fill the caches; return tokens per second."""
    ids = random_tokens(target, tokens)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for start in range(0, tokens, target.chunk):
        part = ids[start : start + target.chunk]
        rows = target.backend.read(target, sequence.slot, part, start)
        target.backend.commit(drafter, rows)
    torch.cuda.synchronize()
    return round(tokens / (time.perf_counter() - begin))


class CycleTimer:
    """Times pipelined cycles of one text: propose, step, sample, and commit to the draft. Each
    cycle is launched before the result of the previous one is read.

    Args:
        count: draft length. accepted: forced number of accepted tokens.

    Attributes:
        draft: median milliseconds of the draft's part of the cycles that were timed last.
    """

    def __init__(
        self, target: Target, drafter: Any, sequence: Sequence, count: int, accepted: int
    ) -> None:
        self.runner = GraphRunner(target, drafter, forced=accepted)
        chooser = RequestChooser(Options(), [7], target.config.n_vocab, target.backend)
        self.sequence, self.draft = sequence, 0.0
        self.work = [Work(sequence, count, chooser)]

    def time(self, at: int, times: int, rest: float = 0.0) -> float:
        """Return the median milliseconds per cycle, from position `at` on."""
        self.sequence.ids = [7] * (at + 1)
        self.sequence.drafting = True
        self.runner.start(self.work)
        torch.cuda.synchronize()
        time.sleep(rest)
        ends, drafts = [], []
        for _ in range(WARM + times):
            self.runner.start(self.work)
            drafts.append(self.runner.result()[0].draft_seconds * 1e3)
            ends.append(time.perf_counter())
        self.runner.result()
        self.sequence.pending.clear()
        self.draft = round(median(drafts[WARM:]), 3)
        return round(median(b - a for a, b in pairwise(ends[WARM - 1 :])) * 1e3, 3)


def _json(row: SyntheticRow) -> dict[str, Any]:
    return {
        "context": row.context,
        "prefill_tokens_per_second": row.prefill_tokens_per_second,
        **{f"step_{rows}_ms": ms for rows, ms in row.steps.items()},
        **{f"streams_{count}_ms": ms for count, ms in row.streams.items()},
        "draft_ms": row.draft,
        "cycle_ms": row.cycle,
        "sustained_ms": row.sustained,
        "tokens_per_second": row.tokens_per_second,
    }
