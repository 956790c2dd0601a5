"""Cycles of the running requests: their draft lengths, their pages, and the one that is started
before the result of another is known."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from g4spec.backend import Backend
from g4spec.core import MAX_STEP_ROWS, Cycle, Draft, Runner, Sequence, Work
from g4spec.runtime.draft_decision import DraftDecision
from g4spec.runtime.draft_history import PolicyState
from g4spec.runtime.draft_length import DraftLengthPolicy
from g4spec.runtime.pool import Pool
from g4spec.runtime.target import Target
from g4spec.runtime.task import Task


@dataclass(frozen=True, slots=True)
class StartedCycle:
    """A cycle that was started and whose result has not been fetched."""

    runner: Runner
    tasks: list[Task]
    counts: list[int]
    decisions: list[DraftDecision]
    began: float


class Cycles:
    """Starts cycles and fetches their results.

    Args:
        length: decides the draft length of every request.

    Attributes:
        n_steps: number of started cycles.
        n_step_requests: sum of their numbers of requests.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        backend: Backend,
        pool: Pool,
        length: DraftLengthPolicy,
    ) -> None:
        self.target, self.draft, self.pool, self.length = target, draft, pool, length
        self.runners = backend.runners(target, draft)
        self._started: deque[StartedCycle] = deque()
        # Seconds a row of past updates of the draft; the first may have compiled kernels.
        self._row_seconds = deque[float](maxlen=4)
        self._ended = self._left = 0.0  # when the newest result was fetched, and distributed
        self.n_steps = self.n_step_requests = 0

    @property
    def oldest(self) -> StartedCycle | None:
        """The cycle whose result is fetched next; None if none is started."""
        return self._started[0] if self._started else None

    def resume(self) -> None:
        """Note that a step of the scheduler begins: the caller's time since the newest one is not
        a cycle's."""
        now = time.perf_counter()
        self._ended, self._left = self._ended + now - self._left, now

    def pause(self) -> None:
        """Note that the results of a cycle were distributed."""
        self._left = time.perf_counter()

    # ---- pages

    def grow(self, task: Task) -> bool:
        """Allocate the pages of this cycle and of those that may be started ahead of its result.
        Return False if the pool does not have them."""
        if self.pages_missing([task]) > self.pool.n_free:
            return False
        self.pool.grow(task.seq, task.seq.position + self.rows_ahead)
        return True

    @property
    def rows_ahead(self) -> int:
        """Rows of a request in this cycle and in those that may be started ahead of its result."""
        return MAX_STEP_ROWS * max(runner.depth for runner in self.runners)

    def pages_missing(self, tasks: list[Task]) -> int:
        """Return the number of pages that the next cycles of `tasks` need and that they lack."""
        return sum(self.pool.pages_needed(t.seq, t.seq.position + self.rows_ahead) for t in tasks)

    # ---- starting

    def start(self, tasks: list[Task], began: float) -> None:
        """Start a cycle of these requests, which have their pages.

        Args:
            began: `time.perf_counter()` when its step began.
        """
        counts = self._plan(tasks)
        began += self._keep_up(tasks, counts)
        self._start(tasks, counts, began)

    def start_ahead(self, tasks: list[Task], began: float) -> None:
        """Start the cycle after the oldest one, if the runner can and it is certain to have the
        same requests, which are `tasks`, and the same draft lengths."""
        oldest = self._started[0]
        if len(self._started) < oldest.runner.depth and self._next_is_certain(oldest, tasks):
            self._start(tasks, oldest.counts, began, oldest.runner)

    def _plan(self, running: list[Task]) -> list[int]:
        """Return the number of tokens to draft for each request."""
        return self.length.plan(
            [t.draft_state for t in running],
            [self._max_draft(t) for t in running],
            self._context_bytes(running, [0] * len(running)),
        )

    def _keep_up(self, running: list[Task], counts: list[int]) -> float:
        """Update the drafts that lag too far behind, or stop drafting for their requests: a draft
        cannot be used once rows were lost. Return the seconds that it took.

        Drafts that pay if a request runs alone are worth some time in a batch in which they do not:
        the longest request is alone in the end.
        """
        rows = len(counts) + sum(counts)
        idle = [t for t, n in zip(running, counts, strict=True) if not n and t.seq.pending]
        if not any(self.target.pending.overrun(t.seq, rows) for t in idle):
            return 0.0
        useful = sorted(filter(self._would_pay, idle), key=lambda t: -t.tokens_left)
        took = self._catch_up([t.seq for t in useful], [t.draft_state for t in running])
        for task in idle:
            if self.target.pending.overrun(task.seq, rows):
                task.stop_drafting("for many tokens no proposal was worth its time")
        return took

    def _catch_up(self, sequences: list[Sequence], waiting: list[PolicyState]) -> float:
        """Update the draft with all pending rows of as many of these sequences as the requests that
        wait for it can afford. Return the seconds that it took."""
        seconds = min(islice(self._row_seconds, 1, None), default=0.0)
        while sequences and not self.length.spend(waiting, seconds * _n_pending(sequences)):
            sequences = sequences[: len(sequences) // 2]
        if not sequences:
            return 0.0
        assert self.draft is not None
        rows = _n_pending(sequences)
        took = self.target.pending.catch_up(self.draft, sequences)
        self._row_seconds.append(took / rows)
        return took

    def _would_pay(self, task: Task) -> bool:
        """Return True if drafts of a request are expected to pay once it runs alone."""
        context = self._context_bytes([task], [0])
        return self.length.pays_alone(task.draft_state, self._max_draft(task), context)

    def _context_bytes(self, tasks: list[Task], ahead: list[int]) -> float:
        """Return the bytes of KV cache of the requests, each with `ahead` more tokens."""
        of = self.target.context_bytes
        return sum(of(t.seq.position + n) for t, n in zip(tasks, ahead, strict=True))

    def _max_draft(self, task: Task, ahead: int = 0) -> int:
        """Return the maximum draft length of a request once it has `ahead` more tokens."""
        if self.draft is None or not task.seq.drafting:
            return 0
        position = task.seq.position + ahead
        room = min(task.tokens_left - ahead - 1, self.target.n_ctx - 1 - position)
        return max(0, min(room, self.draft.max_tokens))

    def _start(
        self, tasks: list[Task], counts: list[int], began: float, runner: Runner | None = None
    ) -> None:
        work = [Work(t.seq, n, t.chooser) for t, n in zip(tasks, counts, strict=True)]
        rows = MAX_STEP_ROWS * (1 + len(self._started))
        assert not any(self.pool.pages_needed(t.seq, t.seq.position + rows) for t in tasks)
        runner = runner or next(r for r in self.runners if r.can_run(work))
        runner.start(work)
        self.n_steps += 1
        self.n_step_requests += len(tasks)
        decisions = self.length.decisions(
            self.n_steps,
            [t.draft_state for t in tasks],
            counts,
            [self._max_draft(t) for t in tasks],
        )
        self._started.append(StartedCycle(runner, tasks, counts, decisions, began))

    def _next_is_certain(self, oldest: StartedCycle, tasks: list[Task]) -> bool:
        """Return True if the next cycle is certain to have the same requests and draft lengths,
        whatever the result of this one, and has pages, so that it can be started now."""
        if tasks != oldest.tasks:
            return False
        most = [self._max_draft(t, ahead=1 + n) for t, n in zip(tasks, oldest.counts, strict=True)]
        for task, count, room in zip(tasks, oldest.counts, most, strict=True):
            position = task.seq.position + 1 + count
            if task.tokens_left <= 1 + count or position >= self.target.n_ctx or room < count:
                return False
        rows = len(tasks) + sum(oldest.counts)
        if not all(self.grow(t) and not self.target.pending.overrun(t.seq, rows) for t in tasks):
            return False
        context = self._context_bytes(tasks, [1 + n for n in oldest.counts])
        return self.length.plan_ahead([t.draft_state for t in tasks], oldest.counts, most, context)

    # ---- results

    def finish(self, after_prefill: bool) -> list[tuple[Task, Cycle]]:
        """Wait for the oldest cycle. Return its result for each request that has not ended.

        Args:
            after_prefill: rows of prompts were computed in the same step.
        """
        oldest = self._started.popleft()
        cycles = oldest.runner.result()
        # A cycle that was started ahead runs from the end of the one before it. If a prompt was
        # computed meanwhile, its time is not the cycle's.
        began, self._ended = max(oldest.began, self._ended), time.perf_counter()
        waited = 0.0 if after_prefill else self._ended - began
        alive = [i for i, t in enumerate(oldest.tasks) if not t.request.done]
        for i in alive:
            cycles[i].count_wait(waited)
            cycles[i].decision = oldest.decisions[i]
        if alive:
            seconds = cycles[alive[0]].draft_seconds + cycles[alive[0]].step_seconds
            self.length.observe(
                [oldest.tasks[i].draft_state for i in alive],
                [len(cycles[i].drafted) for i in alive],
                [cycles[i].accepted for i in alive],
                seconds,
            )
        return [(oldest.tasks[i], cycles[i]) for i in alive]

    def discard_ended(self) -> None:
        """Discard all started cycles if none of their requests runs any more."""
        if all(t.request.done for s in self._started for t in s.tasks):
            self.discard()

    def discard(self) -> None:
        """Discard started cycles whose results are no longer needed."""
        while self._started:
            self._started.popleft().runner.drop()

    def abandon(self) -> None:
        """Discard what runs after a step failed, also cycles that were not noted yet, or that a
        measurement started."""
        self._started.clear()
        for runner in self.runners:
            runner.drop()

    def close(self) -> None:
        """Drop the references to the models."""
        self.draft, self.runners = None, ()


def _n_pending(sequences: list[Sequence]) -> int:
    return sum(len(s.pending) for s in sequences)
