"""One part of a prefill: rows of a prompt, or tokens that are recomputed after a preemption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from g4spec.core import MAX_STEP_ROWS, Draft, Logprobs, StepRows
from g4spec.errors import EnvironmentProblem
from g4spec.ops.logits import logprobs
from g4spec.runtime.batches import batch_of
from g4spec.runtime.target import Target
from g4spec.runtime.task import Task


class Part(NamedTuple):
    """Computed rows of a task.

    Attributes:
        cost: number of prompt rows they count as (`Backend.prefill_rows`).
        logprobs: those of the prompt tokens after each row, if requested.
    """

    rows: StepRows
    cost: int
    logprobs: Sequence[Logprobs] = ()


def compute_part(
    task: Task, max_rows: int, target: Target, draft: Draft | None, pause: Callable[[], None]
) -> Part | None:
    """Compute tokens of a prompt that count as at most `max_rows` rows, up to the next snapshot, or
    part of the tokens that were generated before a preemption, and update the draft. Return None if
    a block is more than `max_rows`.

    Args:
        pause: see `Backend.read`.

    Raises:
        NotFinite: log-probabilities are requested, and a row has no largest logit.
    """
    s, backend = task.seq, target.backend
    drafting = draft if s.drafting else None
    if task.recomputes:
        count = min(len(s.ids) - 1 - s.n_read, MAX_STEP_ROWS)
        part = (s.slot, s.n_read, s.ids[s.n_read : s.n_read + count])
        rows = target.forward(batch_of(target.ops, [part]))
        if drafting is not None:
            drafting.commit(rows, rows.batch.ids.new_tensor([count - 1]))
        return Part(rows, max(count, backend.block))
    count = min([task.n_prompt, *task.snapshot_points[:1]]) - s.n_read
    if backend.prefill_rows(count) > max_rows:
        count = max_rows - max_rows % backend.block
        if not count:
            return None
    rows = backend.read(target, s.slot, s.ids[s.n_read : s.n_read + count], s.n_read, pause)
    if drafting is not None:
        backend.commit(drafting, rows)
    return Part(rows, backend.prefill_rows(count), _prompt_logprobs(task, rows, target))


def _prompt_logprobs(task: Task, rows: StepRows, target: Target) -> list[Logprobs]:
    """Return the log-probabilities of the prompt tokens after each of these rows, which
    `Sequence.n_read` does not count yet; none twice after a preemption."""
    n, start = task.request.options.prompt_logprobs, task.seq.n_read
    if n is None:
        return []
    first = max(start, task.request.stats.read_tokens)
    end = min(start + len(rows.batch), task.n_prompt - 1)
    found: list[Logprobs] = []
    for at in range(first, end, MAX_STEP_ROWS):
        last = min(at + MAX_STEP_ROWS, end)
        logits = target.logits(rows.hidden[at - start : last - start])
        after = task.ids[at + 1 : last + 1]
        found += [logprobs(row, token, n) for row, token in zip(logits, after, strict=True)]
    return found


def out_of_memory(error: torch.OutOfMemoryError) -> EnvironmentProblem:
    """Return the error of a request whose prompt has no memory."""
    return EnvironmentProblem(
        "out of GPU memory during prefill",
        found=str(error)[:200],
        fix="use a smaller `n_ctx`, `pool` or `parallel`",
    )
