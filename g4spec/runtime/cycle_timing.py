"""Measurement of cycle times, for the policy of draft lengths."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from g4spec.core import MAX_STEP_ROWS, PAGE, Draft, Runner, Sequence, StepRows, Work
from g4spec.runtime.chooser import RequestChooser
from g4spec.runtime.pool import Pool
from g4spec.runtime.request import Options
from g4spec.runtime.target import Target, batch_of

REPEATS = 3
"""Number of repetitions. The fastest counts; the first one is a warm-up."""

PROMPT = [2] * MAX_STEP_ROWS
"""Prompt of the timed requests."""

MIN_LONG_CONTEXT, LONG_CONTEXT = 1024, 8192
"""Context lengths that are required and used when the share of attention in a step is timed."""


def measure_costs(
    target: Target, draft: Draft | None, pool: Pool, runners: Seq[Runner]
) -> tuple[dict[tuple[int, int], float], float]:
    """Measure the time of cycles; return the results of `measure_cycles` and
    `measure_seconds_per_byte`. All slots and pages must be free."""
    found = measure_cycles(target, draft, pool, runners)
    return found, measure_seconds_per_byte(target, pool, runners, found[1, 0])


def measure_seconds_per_byte(
    target: Target, pool: Pool, runners: Seq[Runner], plain: float
) -> float:
    """Measure the seconds that a step takes per byte of KV cache it reads, given that a plain step
    of a short context takes `plain`. The content of the cache does not matter."""
    ahead = MAX_STEP_ROWS * max(r.depth for r in runners)
    far = min(target.n_ctx - 2, LONG_CONTEXT, PAGE * pool.n_free - ahead)
    if far < MIN_LONG_CONTEXT:
        return 0.0
    s = Sequence(pool.free_slots.pop(), PROMPT[:1] * (far + 1), far, far)
    pool.grow(s, far + ahead)
    seconds = min(_time_cycle(target, [(s, None)], 0, runners) for _ in range(REPEATS))
    pool.free_sequence(s)
    more = target.context_bytes(far) - target.context_bytes(len(PROMPT))
    return max(0.0, seconds - plain) / more


def measure_cycles(
    target: Target, draft: Draft | None, pool: Pool, runners: Seq[Runner]
) -> dict[tuple[int, int], float]:
    """Measure the seconds of cycles of 1, 2, 4, ... requests without a draft, with 1 drafted token
    and with the maximum; the update of the draft is part of a cycle. All slots and pages must be
    free."""
    assert draft is not None
    out: dict[tuple[int, int], float] = {}
    most = min(draft.max_tokens, target.n_ctx - len(PROMPT) - 1)
    texts = 1
    while texts <= min(len(pool.free_slots), pool.n_free):
        sequences = _start_sequences(target, draft, pool, texts)
        for count in [0, 1, most] * REPEATS:
            seconds = _time_cycle(target, sequences, count, runners)
            out[texts, count] = min(out.get((texts, count), 1e9), seconds)
        for s, _ in sequences:
            pool.free_sequence(s)
        texts *= 2
    return out


def _start_sequences(
    target: Target, draft: Draft, pool: Pool, count: int
) -> list[tuple[Sequence, StepRows]]:
    """Create sequences that have read PROMPT, with the last row of each in the form a draft
    reads."""
    out = []
    for _ in range(count):
        s = Sequence(pool.free_slots.pop(), [*PROMPT, PROMPT[0]], len(PROMPT), len(PROMPT))
        pool.grow(s, len(PROMPT) + 1)
        draft.begin(s.slot)
        rows = target.forward(batch_of(target.ops, [(s.slot, 0, PROMPT)]))
        n = len(PROMPT) - 1
        head = rows.rows(0, n, (n,))
        draft.commit(head, head.batch.ids.new_tensor([n - 1]))
        out.append((s, rows.rows(n, n + 1, (1,))))
    return out


def _time_cycle(
    target: Target,
    sequences: Seq[tuple[Sequence, StepRows | None]],
    count: int,
    runners: Seq[Runner],
) -> float:
    """Measure the seconds of a cycle of `count` drafted tokens each; on a backend that starts
    cycles ahead, of one that directly follows another."""
    options = Options(ignore_eos=True)
    work = []
    for s, last in sequences:
        s.ids[s.n_read + 1 :] = []
        s.drafting = count > 0
        s.pending = [last] if count and last is not None else []
        chooser = RequestChooser(options, PROMPT, target.config.n_vocab, target.backend)
        work.append(Work(s, count, chooser))
    runner = next(r for r in runners if r.can_run(work))
    began = time.perf_counter()
    runner.start(work)
    for _ in range(runner.depth - 1):
        runner.start(work)
        runner.result()
        began = time.perf_counter()
    runner.result()
    seconds = time.perf_counter() - began
    for s, _ in sequences:
        s.pending = []
    return seconds
