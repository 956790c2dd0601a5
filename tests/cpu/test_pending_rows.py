"""Tests of the rows that a draft has not been given yet."""

from __future__ import annotations

import torch

from g4spec.core import Batch, PendingRows, StepRows
from g4spec.runtime.pending_rows import gather_rows, group_steps


def step(position: int, *slots: int) -> StepRows:
    """Return a row of each slot at a position; features tell slot and position."""
    at = torch.tensor(slots)
    positions = torch.full_like(at, position)
    values = (1000.0 * at + position)[:, None]
    batch = Batch(10 * at + position, positions, at, (1,) * len(slots))
    return StepRows(batch, values, values.repeat(1, 3))


def test_rows_of_sequences_that_share_steps_are_in_order() -> None:
    """Slot 2 took part in all steps, slot 5 came later, slot 3 ran by itself."""
    alone, two, both = step(0, 2), step(1, 2, 5), step(2, 5, 2)
    own = step(7, 3)
    groups = [
        [PendingRows(alone, 0, 1), PendingRows(two, 0, 1), PendingRows(both, 1, 1)],
        [PendingRows(own, 0, 1)],
        [PendingRows(two, 1, 1), PendingRows(both, 0, 1)],
    ]
    rows = gather_rows(groups)
    slots, positions = [2, 2, 2, 3, 5, 5], [0, 1, 2, 7, 1, 2]
    assert (rows.batch.slots.tolist(), rows.batch.positions.tolist()) == (slots, positions)
    assert rows.batch.sizes == (3, 1, 2)
    assert rows.batch.ids.tolist() == [10 * s + p for s, p in zip(slots, positions, strict=True)]
    wanted = [1000.0 * s + p for s, p in zip(slots, positions, strict=True)]
    assert rows.hidden[:, 0].tolist() == wanted
    assert rows.taps.tolist() == [[x] * 3 for x in wanted]


def test_part_of_a_step_is_gathered() -> None:
    """A step of several rows of each sequence."""
    whole = step(4, 6, 6, 6, 9, 9, 9)
    rows = gather_rows([[PendingRows(whole, 4, 2)], [PendingRows(whole, 0, 1)]])
    assert (rows.batch.slots.tolist(), rows.batch.sizes) == ([9, 9, 6], (2, 1))


def test_groups_hold_so_many_rows() -> None:
    steps = [PendingRows(step(0, 1), 0, size) for size in (1, 3, 2, 2, 4)]
    sizes = [[rows.size for rows in group] for group in group_steps(steps, 4)]
    assert sizes == [[1, 3], [2, 2], [4]]
