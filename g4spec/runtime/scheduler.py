"""The scheduler: admission, prefill, decode steps and preemption.

Each `step` admits requests that fit, runs prefill for some of the waiting prompts, and runs one
cycle of all running requests. The rules:

- Requests are admitted in order of arrival, when a slot is free and the pool has enough pages for
  the prompt. No request overtakes another, so none starves.
- Every running request takes part in every cycle. In one step at most INTERLEAVED_ROWS prompt rows
  (as `Backend.prefill_rows` counts them) are computed, oldest request first, so that a long prompt
  does not stall the others. A cycle runs after them, and one in their middle.
- When the pool has no free page, prefix snapshots are evicted first. Then the newest request is
  preempted: its pages and slot are freed, and it waits at its place in the order of arrival. Its
  generated tokens are later recomputed through steps, so that its text does not change; a step
  counts as a block of a prompt. The oldest request is never preempted, because the pool holds at
  least one full context.
"""

from __future__ import annotations

import gc
import time
from bisect import insort
from collections import deque
from contextlib import ExitStack

import torch

from g4spec.backend import Backend
from g4spec.core import MAX_STEP_ROWS, PROMPT_BLOCK, Cycle, Draft, Sequence
from g4spec.errors import InputError
from g4spec.ops.kv_size import pages_of
from g4spec.runtime import prefill
from g4spec.runtime.cycle_timing import CycleMeter
from g4spec.runtime.cycles import Cycles
from g4spec.runtime.draft_length import DraftLengthPolicy
from g4spec.runtime.pool import Pool
from g4spec.runtime.prefix import PrefixCache
from g4spec.runtime.target import Target
from g4spec.runtime.task import Task

INTERLEAVED_ROWS = PROMPT_BLOCK
"""Maximum number of prompt rows computed in a step while requests are running."""


class Scheduler:
    """Runs the requests of an engine, one step at a time. Not thread-safe, but a handler of a
    signal may call `submit` at any point: loops over `waiting` are over a copy.

    Args:
        length: decides the draft length of every request.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        backend: Backend,
        pool: Pool,
        prefix: PrefixCache,
        length: DraftLengthPolicy,
    ) -> None:
        self.target, self.draft, self.backend = target, draft, backend
        self.pool, self.prefix = pool, prefix
        self.cycles = Cycles(target, draft, backend, pool, length)
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []
        self._prepared = self._froze = False  # see `_prepare`

    def submit(self, task: Task) -> None:
        """Add a request to the queue."""
        self.waiting.append(task)

    @property
    def idle(self) -> bool:
        """True if there is nothing to do."""
        return not (self.waiting or self.running)

    def step(self) -> bool:
        """Run one step; return False if there was nothing to do."""
        self.cycles.resume()
        self._free_cancelled()
        if self.idle:
            return False
        self._admit()
        self._cycle(after_prefill=self._prefill())
        return True

    def abandon(self, error: BaseException) -> None:
        """End all requests after a step failed, because the state of the caches is unknown."""
        problem = error if isinstance(error, Exception) else None
        for task in [*self.running, *self.waiting]:  # first: what follows may fail like the step
            task.request.abandon(problem)
        self.running.clear()
        for task in tuple(self.waiting):  # a listener may have submitted others
            if task.request.done:
                self.waiting.remove(task)
        self.cycles.abandon()
        self.prefix.clear()
        self.pool.reset()

    def close(self) -> None:
        """End all requests, also if a listener fails, and drop the references to the models."""
        self.cycles.discard()
        with ExitStack() as last_first:
            last_first.callback(self._drop_models)
            for task in reversed([*self.running, *self.waiting]):
                last_first.callback(self._finish, task, "closed")

    def _drop_models(self) -> None:
        self.prefix.close()
        if self._froze:
            gc.unfreeze()  # also what others froze: no collection frees a part of it
        self.draft = None
        self.cycles.close()

    # ---- admission and memory

    def _free_cancelled(self) -> None:
        """Free the memory of cancelled requests."""
        for task in [t for t in (*self.running, *self.waiting) if t.request.cancelled]:
            self._finish(task, "cancelled")

    def _admit(self) -> None:
        if self.waiting and not self.running:
            self._prepare()
        while self.waiting and self.pool.free_slots and self._try_admit(self.waiting[0]):
            task = self.waiting.popleft()
            insort(self.running, task, key=lambda t: t.number)

    def _prepare(self) -> None:
        """Measure costs if `auto` needs them. Before the first request, run what would make others
        wait later."""
        suppress = self.waiting[0].request.options.sampler.suppress
        meter = CycleMeter(self.target, self.draft, self.pool, self.cycles.runners, suppress)
        if self.cycles.length.wants_costs and any(t.draft_state.auto for t in tuple(self.waiting)):
            self.prefix.clear()  # the measurement needs the pages
            self.cycles.length.set_costs(*meter.costs())
        elif not self._prepared and self.backend.padded and len(self.pool.free_slots) > 1:
            meter.run_plain()
        if not self._prepared and self.backend.padded:
            gc.collect()
            gc.freeze()  # a full collection of what a model consists of takes 0.1 s
            self._froze = True
        self._prepared = True

    def _try_admit(self, task: Task) -> bool:
        """Allocate a slot and the pages for the tokens of a task, if the pool has them; restore the
        longest prefix snapshot. Without enough pages nothing is restored or evicted."""
        prompt = task.request.prompt
        positions = len(task.ids) + MAX_STEP_ROWS
        spare = len(self.running)  # each may need a page before long
        whole = task.request.options.prompt_logprobs is not None
        snapshot = None if whole else self.prefix.find(prompt, task.drafting)
        shared = snapshot.pages if snapshot else []
        missing = pages_of(positions) - len(shared) + spare - self.pool.n_free
        if self.running and missing > 0 and missing > self.prefix.n_evictable(shared):
            return False
        sequence = Sequence(self.pool.free_slots.pop(), task.ids, task.n_prompt)
        sequence.drafting = task.drafting
        if snapshot is not None:
            try:
                self.prefix.restore(snapshot, sequence)
            except torch.OutOfMemoryError:  # treat it as a cache miss
                self.pool.free_sequence(sequence)
                self.pool.free_slots.remove(sequence.slot)
        while self.pool.n_free < self.pool.pages_needed(sequence, positions) + spare:
            if not self.prefix.evict():
                if self.running:
                    self.pool.free_sequence(sequence)
                    return False
                break
        self.pool.grow(sequence, positions)
        if task.drafting and self.draft is not None:
            self.draft.begin(sequence.slot, prompt[: sequence.n_read])
        task.sequence = sequence
        task.snapshot_points = [
            n for n in self.prefix.snapshot_points(prompt, task.drafting) if n > sequence.n_read
        ]
        if not task.request.stats.preempted:
            task.request.stats.cached_tokens = sequence.n_read
            task.request.stats.queue_seconds = time.perf_counter() - task.submitted
            task.request.record_prefill(sequence.n_read)
        return True

    def _make_room(self, running: list[Task]) -> list[Task]:
        """Allocate the pages of the next cycles, oldest request first, preempting the newest if
        there are none. Return the requests that keep running."""
        for task in running:
            while task.sequence is not None and not self.cycles.grow(task):
                if not self.prefix.evict():
                    self._preempt(self.running[-1])
        return [t for t in running if t.sequence is not None]

    def _preempt(self, task: Task) -> None:
        """Free the memory of a task and put it back into the queue."""
        self._release(task)
        task.request.stats.preempted += 1
        at = sum(t.number < task.number for t in tuple(self.waiting))
        self.waiting.insert(at, task)

    def _release(self, task: Task) -> None:
        self.pool.free_sequence(task.seq)
        task.sequence = None
        self.running.remove(task)

    def _finish(self, task: Task, reason: str, error: Exception | None = None) -> None:
        """End a request and free its memory. Cycles in flight write before any new owner does."""
        if task.sequence is not None:
            self._release(task)
        elif task in self.waiting:
            self.waiting.remove(task)
        task.request.finish(reason, error)
        self.cycles.discard_ended()

    # ---- prompts

    def _prefill(self) -> bool:
        """Run prefill, oldest request first: one chunk, or less while requests are running. Return
        True if there was something to compute."""
        prefilling = [t for t in self.running if t.in_prefill]
        if not prefilling:
            return False
        rows = self.target.chunk
        if len(prefilling) < len(self.running):
            rows = min(rows, INTERLEAVED_ROWS)
        while prefilling and rows > 0:
            task = prefilling[0]
            began = time.perf_counter()
            try:
                part = self._prefill_part(task, rows)
            except InputError as error:  # logits that are not finite
                self._finish(task, "error", error)
                prefilling.pop(0)
                continue
            except torch.OutOfMemoryError as error:  # no other request reads its rows
                self._finish(task, "error", prefill.out_of_memory(error))
                prefilling.pop(0)
                continue
            if part is None:
                break
            rows -= part.cost
            stats = task.request.stats
            stats.prefill_seconds += time.perf_counter() - began
            if stats.read_tokens < task.seq.n_read <= task.n_prompt:
                task.request.record_prefill(task.seq.n_read, part.logprobs)
            if not task.in_prefill:
                prefilling.pop(0)
                if len(task.ids) == task.n_prompt:
                    began = time.perf_counter()
                    self._first_token(task)
                    stats.prefill_seconds += time.perf_counter() - began
        return True

    def _prefill_part(self, task: Task, max_rows: int) -> prefill.Part | None:
        """Compute the next part of a prompt, as `prefill.compute_part`, and count its rows."""
        s = task.seq
        part = prefill.compute_part(task, max_rows, self.target, self.draft, self._cycle_between)
        if part is None:
            return None
        s.n_read += len(part.rows.batch)
        if s.n_read == task.n_prompt:
            self._last_hidden = part.rows.hidden[-1:].clone()  # a view would keep the whole chunk
        if task.snapshot_points and s.n_read == task.snapshot_points[0]:
            task.snapshot_points.pop(0)
            self.prefix.take_snapshot(s)
        return part

    def _first_token(self, task: Task) -> None:
        """Choose the first token after the prompt, from the logits of its last row, if its request
        has any."""
        if not task.request.options.n_predict:
            self._finish(task, "length")
            return
        try:
            logits = self.target.logits(self._last_hidden)
            cycle = task.chooser.choose(logits, [], task.n_prompt)
        except InputError as error:  # logits that are not finite, or a mask that allows nothing
            self._finish(task, "error", error)
            return
        except torch.OutOfMemoryError as error:
            self._finish(task, "error", prefill.out_of_memory(error))
            return
        task.ids += cycle.tokens
        task.request.append(cycle, first=True)
        self._finish_if_done(task)

    # ---- cycles

    def _cycle_between(self) -> None:
        """Run a cycle in the middle of a prompt's rows, if there are pages for it: preemption could
        free those of the prompt."""
        decoding = [t for t in self.running if not t.in_prefill]
        if self.cycles.pages_missing(decoding) > self.pool.n_free:
            return
        try:
            self._cycle(after_prefill=True)
        except (torch.OutOfMemoryError, InputError) as error:  # not of the prompt
            raise RuntimeError(f"an error in a cycle: {error}") from error

    def _cycle(self, after_prefill: bool) -> None:
        """Run one cycle of all running requests. If possible, start the next one before waiting for
        this one."""
        began = time.perf_counter()
        if self.cycles.oldest is None:
            running = self._make_room([t for t in self.running if not t.in_prefill])
            if not running:
                return
            self.cycles.start(running, began)
        tasks = [t for t in self.running if not t.in_prefill]
        if not self.waiting and len(tasks) == len(self.running):
            self.cycles.start_ahead(tasks, began)
        for task, cycle in self.cycles.finish(after_prefill):
            self._append(task, cycle)
        self.cycles.pause()

    def _append(self, task: Task, cycle: Cycle) -> None:
        if cycle.error is not None and not cycle.tokens:
            self._finish(task, "error", cycle.error)
            return
        task.ids += cycle.tokens
        task.seq.n_read += len(cycle.tokens)
        if cycle.draft_failed:
            cycle.draft_failed = task.stop_drafting(cycle.draft_failed)
        chosen = len(cycle.tokens)
        self.cycles.length.discard(task.draft_state, chosen - task.request.append(cycle))
        self._finish_if_done(task)
        if cycle.error is not None and not task.request.done:
            self._finish(task, "error", cycle.error)

    def _finish_if_done(self, task: Task) -> None:
        """End a request that has reached its stop condition."""
        if task.request.stats.stop_reason:
            self._finish(task, "")
        elif task.tokens_left <= 0:
            self._finish(task, "length")
        elif task.seq.position >= self.target.n_ctx:
            self._finish(task, "context")
