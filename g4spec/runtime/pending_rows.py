"""Rows that the target has computed but the draft has not been given yet.

Steps without drafting do not update the draft; it catches up before its next proposal.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from g4spec.core import MAX_STEP_ROWS, Batch, Draft, Sequence, StepRows

MAX_STEPS = 1024
"""Number of steps that a draft may lag behind. Beyond that, catching up would cost more than the
draft can gain."""

MAX_BYTES = 512 << 20
"""Maximum memory of the pending rows of all sequences, in float32."""

MAX_ROWS_AT_ONCE = 512
"""Maximum number of rows of all sequences with which the draft is updated at a time, if each has
more than MAX_STEP_ROWS."""


def flush(draft: Draft, sequences: Seq[Sequence]) -> None:
    """Update the draft with all pending rows."""
    share = MAX_ROWS_AT_ONCE // max(1, len(sequences))
    most = min(draft.commit_rows, max(MAX_STEP_ROWS, share))
    waiting = [group_steps(s.pending, most) for s in sequences if s.pending]
    for turn in range(max(map(len, waiting), default=0)):
        rows = merge_steps(*(of[turn] for of in waiting if turn < len(of)))
        draft.commit(rows, rows.batch.ids.new_tensor([n - 1 for n in rows.batch.sizes]))
    for sequence in sequences:
        sequence.pending.clear()


def group_steps(steps: Seq[StepRows], most: int) -> list[list[StepRows]]:
    """Group successive steps of one sequence, at most `most` rows in each group."""
    out: list[list[StepRows]] = []
    count = most
    for step in steps:
        count += len(step.batch)
        if count > most:
            out.append([])
            count = len(step.batch)
        out[-1].append(step)
    return out


def merge_steps(*groups: Seq[StepRows]) -> StepRows:
    """Join successive steps of a sequence, or of several, to one batch."""
    rows = concat_steps([step for group in groups for step in group])
    b, sizes = rows.batch, tuple(sum(len(step.batch) for step in group) for group in groups)
    return StepRows(Batch(b.ids, b.positions, b.slots, sizes), rows.hidden, rows.taps)


def concat_steps(steps: Seq[StepRows]) -> StepRows:
    """Join the rows of several sequences to one batch."""
    if len(steps) == 1:
        return steps[0]
    batches = [s.batch for s in steps]
    batch = Batch(
        torch.cat([b.ids for b in batches]),
        torch.cat([b.positions for b in batches]),
        torch.cat([b.slots for b in batches]),
        tuple(size for b in batches for size in b.sizes),
    )
    return StepRows(batch, torch.cat([s.hidden for s in steps]), torch.cat([s.taps for s in steps]))


def max_steps(sequences: Seq[Sequence]) -> int:
    """Return how many steps the draft of these sequences may lag behind."""
    newest = next((s.pending[-1] for s in sequences if s.pending), None)
    if newest is None:
        return MAX_STEPS
    row = (newest.hidden.nbytes + newest.taps.nbytes) // len(newest.batch)
    return min(MAX_STEPS, MAX_BYTES // (row * len(sequences)))


def max_bytes(n_embd: int, n_taps: int, sequences: int) -> int:
    """Return the most memory that pending rows of so many sequences take."""
    return min(MAX_BYTES, MAX_STEPS * sequences * 4 * n_embd * (1 + n_taps))
