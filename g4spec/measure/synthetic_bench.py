"""Times steps and cycles of models with random weights on a GPU (`bench --synthetic`).

A step's time is that of its recording played again (CUDA events, median): what the GPU does, and
not what Python adds. A draft's is that of its part of cycles. A cycle is timed by the clock with
everything in it, and accepts as many drafts as it is told to: random weights predict nothing.
Before each of these the GPU rests, so that its clock does not depend on what ran before; what
cycles take once power limits the clock is measured after a second of them.
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

from g4spec.core import MAX_DRAFT, MAX_STEP_ROWS, PAGE, Sequence, Work
from g4spec.errors import UsageError
from g4spec.measure import run_record as provenance
from g4spec.measure import synthetic
from g4spec.quant import policy
from g4spec.runtime.chooser import RequestChooser
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.graph_runner import GraphRunner
from g4spec.runtime.pool import Pool
from g4spec.runtime.request import Options
from g4spec.runtime.target import Target, batch_of

SCHEMA = "g4spec.synthetic/2"
ROWS = (1, 2, 4, 8, 16)
CONTEXTS = (64, 4096)
WARM = 3
REST = 0.5
"""Seconds without work before something is timed."""
SUSTAIN = 1.0
"""Seconds of cycles, one after the other, before sustained ones are timed."""

LABEL = "random weights, made on the GPU; acceptance forced: speed only, nothing about quality"


@dataclass(frozen=True, slots=True)
class SyntheticConfig:
    """What is measured.

    Attributes:
        type, draft_type: of the matrices, as `--type` of `quantize`.
        draft: "dflash", which proposes a block at once, "assistant": a token after the other, as
            many as a cycle commits, or None: the first of these that there is for the size.
        contexts: tokens in front of the steps that are timed.
        accept_length: tokens a cycle commits, the target's own included.
        times: repetitions whose median counts.
        streams: numbers of texts whose common step of a row each is timed.
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
        """Positions that cycles reach behind a context."""
        return (self.times + WARM + 1) * self.accept_length + 2 * MAX_STEP_ROWS

    def __post_init__(self) -> None:
        if not 1 <= self.accept_length <= MAX_DRAFT + 1:
            raise UsageError(
                "--accept-length",
                expected=f"1 to {MAX_DRAFT + 1}, the target's own token included",
                found=self.accept_length,
            )


StepObserver = Callable[[int, int, Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True)
class SyntheticRow:
    """Figures at one context, in milliseconds: `steps` of one text by rows, `streams` of several
    texts by their number; of cycles those after a rest and `sustained` ones, from which
    `tokens_per_second` follows."""

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
    """Build a model of a size in `synthetic.TARGETS`, with a draft; the result file's contents.

    Args:
        watch: is given each context and number of rows, and what plays a step of so many there.
    """
    kind, ops = check_config(name, config), backend.ops
    backend.enter()
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
    RecordedStep(target, sequences[:1], 1, 0)  # packs what a step reads
    pairs, rows = ops.pairs.nbytes, []
    for context in config.contexts:
        rows.append(_at(context, target, drafter, sequences, config))
        if watch is not None:
            for count in ROWS:
                watch(context, count, RecordedStep(target, sequences[:1], count, context).replay)
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


class RecordedStep:
    """A recorded step of the target: `count` rows of each sequence from position `start` on."""

    def __init__(self, target: Target, sequences: Seq[Sequence], count: int, start: int) -> None:
        parts = [(s.slot, start, random_tokens(target, count)) for s in sequences]
        self.batch = batch_of(target.ops, parts)

        def run() -> tuple[torch.Tensor, ...]:
            rows, logits = target.step(self.batch, capped=False)
            return rows.hidden, rows.taps, logits

        for _ in range(2):
            run()
        self.graph = graphs.Capture(run, torch.cuda.graph_pool_handle())

    def replay(self) -> torch.Tensor:
        """Run it again; logits [T, V]."""
        self.graph.replay()
        return self.graph.outputs[2]


def check_config(name: str, config: SyntheticConfig) -> str:
    """The kind of draft; raises unless there are such a size, draft, and type or mix of weights."""
    policy.parse_type(config.type)
    if name not in synthetic.TARGETS:
        raise UsageError("--synthetic", expected=", ".join(synthetic.TARGETS), found=name)
    kinds = synthetic.draft_kinds(name)
    if config.draft not in (None, *kinds):
        raise UsageError(
            f"-md with --synthetic {name}", expected=" or ".join(kinds), found=config.draft
        )
    return config.draft or kinds[0]


def milliseconds(run: Callable[[], Any], times: int = 20, rest: float = 0.0) -> float:
    """Median time on the GPU of what `run` launches, once it has done so and then rested for so
    many seconds. As in use, the host starts each while the one before it runs: what that takes the
    host, a tenth of a millisecond on some, is not in it."""
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
    """Bytes a second that a sum over most of a GPU's free memory, at most 8 GiB, reads."""
    count = min(1 << 31, torch.cuda.mem_get_info()[0] // 8)
    x = torch.ones(count, dtype=torch.float32, device=device)
    return float(x.nbytes / (milliseconds(x.sum, 5) * 1e-3))


def weight_bytes(weights: Mapping[str, Any]) -> int:
    """Bytes of the weights as they lie in memory, each counted once."""
    seen = {}
    for w in weights.values():
        data = w if isinstance(w, torch.Tensor) else w.table
        seen[data.data_ptr()] = data.nbytes
    return sum(seen.values())


def _idle_bytes(weights: Mapping[str, Any], layer: Any) -> int:
    """Bytes of the experts that one row does not visit."""
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
        step = RecordedStep(target, sequences[:1], rows, context)
        assert bool(step.replay().isfinite().all()), (context, rows)
        steps[rows] = milliseconds(step.replay, config.times, REST)
    for count in config.streams:
        step = RecordedStep(target, sequences[:count], 1, context)
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
    """Any `n` tokens."""
    ids: list[int] = torch.randint(10, target.config.n_vocab, (n,)).tolist()
    return ids


def prefill(target: Target, drafter: Any, sequence: Sequence, tokens: int) -> float:
    """Read random tokens so that caches are real; tokens a second."""
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
    """Cycles of one text: draft, step, choice, and the draft brought up to date with what is said
    to be accepted, each started before the one before it is read.

    Args:
        count: drafted tokens. accepted: of these, whatever they are.

    Attributes:
        draft: median milliseconds of the draft's part of cycles that were timed last.
    """

    def __init__(
        self, target: Target, drafter: Any, sequence: Sequence, count: int, accepted: int
    ) -> None:
        self.runner = GraphRunner(target, drafter, forced=accepted)
        chooser = RequestChooser(Options(), [7], target.config.n_vocab, target.backend)
        self.sequence, self.draft = sequence, 0.0
        self.work = [Work(sequence, count, chooser)]

    def time(self, at: int, times: int, rest: float = 0.0) -> float:
        """Median milliseconds of cycles from position `at` on."""
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
