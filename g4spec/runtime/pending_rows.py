"""Rows that the target has computed but the draft has not been given yet.

Steps without drafting do not update the draft; it catches up before its next proposal.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import torch

from g4spec.core import MAX_STEP_ROWS, Batch, Draft, PendingRows, Sequence, StepRows

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
        rows = gather_rows([of[turn] for of in waiting if turn < len(of)])
        draft.commit(rows, rows.batch.ids.new_tensor([n - 1 for n in rows.batch.sizes]))
    for sequence in sequences:
        sequence.pending.clear()


def group_steps(pending: Seq[PendingRows], most: int) -> list[list[PendingRows]]:
    """Group the rows of successive steps of one sequence, at most `most` in each group."""
    out: list[list[PendingRows]] = []
    count = most
    for rows in pending:
        count += rows.size
        if count > most:
            out.append([])
            count = rows.size
        out[-1].append(rows)
    return out


def gather_rows(groups: Seq[Seq[PendingRows]]) -> StepRows:
    """Join the pending rows of several sequences to one batch, a group for each. Sequences that
    ran together share their steps: these are joined first, then their rows are put in order."""
    steps = list({id(rows.step): rows.step for group in groups for rows in group}.values())
    ends = accumulate((len(s.batch) for s in steps), initial=0)
    starts = dict(zip(map(id, steps), ends, strict=False))
    order = [
        starts[id(rows.step)] + rows.first + i
        for group in groups
        for rows in group
        for i in range(rows.size)
    ]
    joined = concat_steps(steps)
    b, sizes = joined.batch, tuple(sum(rows.size for rows in group) for group in groups)
    if order == list(range(len(b))):
        return StepRows(Batch(b.ids, b.positions, b.slots, sizes), joined.hidden, joined.taps)
    at = b.ids.new_tensor(order)
    batch = Batch(b.ids[at], b.positions[at], b.slots[at], sizes)
    return StepRows(batch, joined.hidden[at], joined.taps[at])


def merge_steps(steps: Seq[StepRows]) -> StepRows:
    """Join successive steps of a sequence to one batch."""
    rows = concat_steps(steps)
    b = rows.batch
    return StepRows(Batch(b.ids, b.positions, b.slots, (len(b),)), rows.hidden, rows.taps)


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
    newest = next((s.pending[-1].step for s in sequences if s.pending), None)
    if newest is None:
        return MAX_STEPS
    row = (newest.hidden.nbytes + newest.taps.nbytes) // len(newest.batch)
    return min(MAX_STEPS, MAX_BYTES // (row * len(sequences)))


def max_bytes(n_embd: int, n_taps: int, sequences: int) -> int:
    """Return the most memory that pending rows of so many sequences take."""
    return min(MAX_BYTES, MAX_STEPS * sequences * 4 * n_embd * (1 + n_taps))
