"""Batches made from the rows of several sequences or steps."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from g4spec.core import Batch, StepRows

if TYPE_CHECKING:
    from g4spec.ops.reference import Ops

Part = tuple[int, int, Seq[int]]
"""Rows of one sequence in a batch: slot, position of the first row, tokens."""


def batch_of(ops: Ops, parts: Iterable[Part]) -> Batch:
    """Create a batch from the rows of each sequence."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sizes = []
    for slot, start, tokens in parts:
        ids += tokens
        positions += range(start, start + len(tokens))
        slots += [slot] * len(tokens)
        sizes.append(len(tokens))
    return Batch(ops.ids(ids), ops.ids(positions), ops.ids(slots), tuple(sizes))


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
