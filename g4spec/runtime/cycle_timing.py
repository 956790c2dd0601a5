"""Measurement of cycle times, for the policy of draft lengths."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial

from g4spec.core import MAX_STEP_ROWS, PAGE, Draft, Runner, Sequence, Work
from g4spec.ops.sampling import Sampler
from g4spec.runtime.batches import batch_of, concat_steps
from g4spec.runtime.chooser import RequestChooser
from g4spec.runtime.cycle_costs import bucket, interpolate
from g4spec.runtime.pool import Pool
from g4spec.runtime.request import Options
from g4spec.runtime.target import Target

Parts = tuple[float, float]
"""Seconds of a cycle's proposal, and of the rest."""

REPEATS, GRAPH_REPEATS = 3, 2
"""Number of repetitions, and of those of CUDA graphs, whose times hardly vary. The fastest counts;
the first one is a warm-up."""

MEASURED_ROWS = 128
"""Rows of the largest padded steps that are measured. From 64 rows on time grows with the rows."""

EACH_BATCH = 8
"""Number of requests up to which proposals are measured for every power of two; the time of those
for more grows evenly, and only that for the most is measured, because each is recorded."""

PROMPT = [2] * MAX_STEP_ROWS
"""Prompt of the timed requests."""

MIN_LONG_CONTEXT, LONG_CONTEXT = 1024, 8192
"""Context lengths that are required and used when the share of attention in a step is timed."""


class CycleMeter:
    """Measures cycles of an engine at rest: all slots and pages must be free.

    Args:
        draft: the draft, or None: only cycles without one can be measured.
        suppress: tokens that requests never choose; graphs are recorded for one set of them.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        pool: Pool,
        runners: Seq[Runner],
        suppress: tuple[int, ...] = (),
    ) -> None:
        self._target, self._draft, self._pool = target, draft, pool
        self._runners, self._suppress = runners, suppress

    def costs(self) -> tuple[dict[tuple[int, int], float], float]:
        """Return the results of `cycles` and `seconds_per_byte`."""
        found = self.cycles()
        return found, self.seconds_per_byte(found[1, 0])

    def seconds_per_byte(self, plain: float) -> float:
        """Measure the seconds that a step takes per byte of KV cache it reads, given that a plain
        step of a short context takes `plain`. The content of the cache does not matter."""
        target, pool = self._target, self._pool
        ahead = MAX_STEP_ROWS * max(r.depth for r in self._runners)
        far = min(target.n_ctx - 2, LONG_CONTEXT, PAGE * pool.n_free - ahead)
        if far < MIN_LONG_CONTEXT:
            return 0.0
        s = Sequence(pool.free_slots.pop(), PROMPT[:1] * (far + 1), far, far)
        pool.grow(s, far + ahead)
        seconds = min(sum(self._time([(s, None)], 0)) for _ in range(REPEATS))
        pool.free_sequence(s)
        more = target.context_bytes(far) - target.context_bytes(len(PROMPT))
        return max(0.0, seconds - plain) / more

    def cycles(self) -> dict[tuple[int, int], float]:
        """Measure the seconds of cycles of 1, 2, 4, ... requests without a draft, with 1 drafted
        token and with the maximum; the update of the draft is part of a cycle. On a backend that
        pads steps as few as possible are measured, because each is recorded, and others are
        computed (`padded_costs`)."""
        draft, padded, batches = self._draft, self._target.backend.padded, self._batches()
        assert draft is not None
        found: dict[tuple[int, int], Parts] = {}
        most = min(draft.max_tokens, self._target.n_ctx - len(PROMPT) - 1)
        sequences = self._start_sequences(draft, batches[-1])
        for requests in batches:
            counts = [0, 1, most]
            if padded:
                each = requests <= EACH_BATCH or requests == batches[-1]
                counts = _padded_counts(requests, most, draft.one_pass) if each else [0]
            for count in counts * (GRAPH_REPEATS if padded else REPEATS):
                parts = self._time(sequences[:requests], count)
                found[requests, count] = min(found.get((requests, count), parts), parts, key=sum)
        for s, _ in sequences:
            self._pool.free_sequence(s)
        if padded:
            return padded_costs(found, most)
        return {key: sum(parts) for key, parts in found.items()}

    def run_plain(self) -> None:
        """Run a cycle of 1, 2, 4, ... requests without a draft, so that its graph is not recorded
        when other requests wait for it."""
        pool = self._pool
        for requests in self._batches():
            sequences = [Sequence(pool.free_slots.pop(), PROMPT[:2], 1, 1) for _ in range(requests)]
            for s in sequences:
                pool.grow(s, MAX_STEP_ROWS)
            self._time([(s, None) for s in sequences], 0)
            for s in sequences:
                pool.free_sequence(s)

    def _batches(self) -> list[int]:
        """Return the numbers of requests that are measured: powers of two, and the most."""
        most = min(len(self._pool.free_slots), self._pool.n_free)
        return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]

    def _start_sequences(self, draft: Draft, count: int) -> list[tuple[Sequence, int]]:
        """Create sequences that have read PROMPT, each with the number of its last row, which the
        draft has not been given."""
        target, sequences, n = self._target, [], len(PROMPT)
        for _ in range(count):
            s = Sequence(self._pool.free_slots.pop(), [*PROMPT, PROMPT[0]], n, n)
            self._pool.grow(s, n + 1)
            draft.begin(s.slot)
            sequences.append(s)
        rows = target.forward(batch_of(target.ops, [(s.slot, 0, PROMPT) for s in sequences]))
        heads = [rows.rows(i * n, i * n + n - 1, (n - 1,)) for i in range(count)]
        draft.commit(concat_steps(heads), rows.batch.ids.new_tensor([n - 2] * count))
        ends = slice(n - 1, None, n)
        return list(
            zip(sequences, target.pending.put(rows.hidden[ends], rows.taps[ends]), strict=True)
        )

    def _time(self, sequences: Seq[tuple[Sequence, int | None]], count: int) -> Parts:
        """Measure a cycle of `count` drafted tokens each; on a backend that starts cycles ahead,
        one that directly follows another."""
        options = Options(ignore_eos=True, sampler=Sampler(suppress=self._suppress))
        target, work = self._target, []
        for s, last in sequences:
            s.ids[s.n_read + 1 :] = []
            s.drafting = count > 0
            s.pending = [last] if count and last is not None else []
            chooser = RequestChooser(options, PROMPT, target.config.n_vocab, target.backend)
            work.append(Work(s, count, chooser, whole=True))
        runner = next(r for r in self._runners if r.can_run(work))
        began = time.perf_counter()
        runner.start(work)
        for _ in range(runner.depth - 1):
            runner.start(work)
            runner.result()
            began = time.perf_counter()
        cycle = runner.result()[0]
        cycle.count_wait(time.perf_counter() - began)
        for s, _ in sequences:
            s.pending = []
        return cycle.draft_seconds, cycle.step_seconds


def _padded_counts(requests: int, most: int, one_pass: bool) -> list[int]:
    """Return the draft lengths to measure: none, and the last one of a step of MEASURED_ROWS rows
    or fewer. A length of 1 shows how proposals of several passes grow, and steps of a few rows."""
    counts = {0, min(most, max(2, MEASURED_ROWS // bucket(requests)) - 1)}
    return sorted(counts | {1} if requests == 1 or not one_pass else counts)


def padded_costs(found: Mapping[tuple[int, int], Parts], most: int) -> dict[tuple[int, int], float]:
    """Compute the seconds of cycles of up to `most` drafted tokens each, whose steps are padded to
    a power of two of sequences, and of rows of each: for the first and the last draft length of
    each size, so that the time of the lengths between can be interpolated. The time of a step
    depends on its rows, whoever owns them, and that of a proposal on its sequences and length."""
    proposals: dict[int, dict[int, float]] = {}
    steps: dict[int, float] = {}
    for (requests, count), (seconds, step) in sorted(found.items()):
        if count:
            rows = bucket(requests) * bucket(1 + count)
            steps[rows] = min(steps.get(rows, step), step)
            proposals.setdefault(requests, {})[count] = seconds

    def proposal(count: int, requests: int) -> float:
        by_count = proposals[requests]
        return interpolate(count, [*by_count], by_count.__getitem__)

    out = {key: sum(parts) for key, parts in found.items() if not key[1]}
    for requests, _ in [*out]:
        for count in range(1, most + 1):
            if count == most or count in (bucket(count), bucket(1 + count) - 1):
                rows = bucket(requests) * bucket(1 + count)
                out[requests, count] = interpolate(requests, [*proposals], partial(proposal, count))
                out[requests, count] += interpolate(rows, sorted(steps), steps.__getitem__)
    return out
