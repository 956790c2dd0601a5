"""Rows that the target has computed but the draft has not been given yet.

Steps without drafting do not update the draft; it catches up before its next proposal, or before
rows are overwritten (`Cycles`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from g4spec.core import MAX_STEP_ROWS, Draft, Sequence, StepRows
from g4spec.runtime.batches import batch_of

if TYPE_CHECKING:
    from g4spec.ops.reference import Ops

MAX_LAG = 1024
"""Number of rows of a sequence that its draft may lag behind."""

MAX_BYTES = 512 << 20
"""Maximum memory of the rows of all sequences, in float32, unless those of one step need more."""

MAX_ROWS_AT_ONCE = 512
"""Maximum number of rows of all sequences with which the draft is updated at a time, if each has
more than MAX_STEP_ROWS."""


class PendingRows:
    """A ring buffer of the newest rows of all sequences, allocated with the first ones. Rows are
    numbered as they come; `Sequence.pending` has the numbers of those that the draft of a sequence
    has not been given.

    Args:
        sequences: maximum number of running sequences.
    """

    def __init__(self, ops: Ops, sequences: int) -> None:
        self._ops, self._sequences = ops, sequences
        self._rows: tuple[torch.Tensor, ...] = ()  # hidden states and taps
        self._size = self._next = 0

    def put(self, hidden: torch.Tensor, taps: torch.Tensor) -> range:
        """Copy rows (see `StepRows`) in place of the oldest ones. Return their numbers."""
        if not self._rows:
            width = hidden.shape[1] + taps.shape[1]
            self._size = _capacity(4 * width, self._sequences)
            self._rows = tuple(x.new_empty(self._size, x.shape[1]) for x in (hidden, taps))
        n, at = len(hidden), self._next % self._size
        first = min(n, self._size - at)
        for kept, new in zip(self._rows, (hidden, taps), strict=True):
            kept[at : at + first] = new[:first]
            if first < n:
                kept[: n - first] = new[first:]
        self._next += n
        return range(self._next - n, self._next)

    def close(self) -> None:
        """Free the memory."""
        self._rows = ()

    def overrun(self, sequence: Sequence, more: int) -> bool:
        """Return True if the draft of a sequence lags too far behind, or would lose rows if `more`
        were put."""
        held = sequence.pending
        return len(held) >= MAX_LAG or (bool(held) and self._next + more - held[0] > self._size)

    def flush(self, draft: Draft, sequences: Seq[Sequence]) -> None:
        """Update the draft with all pending rows of these sequences."""
        share = MAX_ROWS_AT_ONCE // max(1, len(sequences))
        most = min(draft.commit_rows, max(MAX_STEP_ROWS, share))
        while behind := [s for s in sequences if s.pending]:
            rows = self._take(behind, most)
            draft.commit(rows, self._ops.ids([n - 1 for n in rows.batch.sizes]))

    def catch_up(self, draft: Draft, sequences: Seq[Sequence]) -> float:
        """Update the draft as `flush` does, and return the seconds that it took."""
        self._wait()
        began = time.perf_counter()
        self.flush(draft, sequences)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        """Wait for what the device has been given."""
        self._rows[0][0, 0].item()

    def _take(self, sequences: Seq[Sequence], most: int) -> StepRows:
        """Remove and return the first `most` pending rows of each sequence."""
        parts, places = [], list[int]()
        for s in sequences:
            start, numbers = s.n_read - len(s.pending), s.pending[:most]
            parts.append((s.slot, start, s.ids[start : start + len(numbers)]))
            places += [number % self._size for number in numbers]
            del s.pending[:most]
        at = self._ops.ids(places)
        hidden, taps = (kept[at] for kept in self._rows)
        return StepRows(batch_of(self._ops, parts), hidden, taps)


def max_bytes(n_embd: int, n_taps: int, sequences: int) -> int:
    """Return the most memory that pending rows of so many sequences take, and those that a draft
    is given at a time."""
    row = 4 * n_embd * (1 + n_taps)
    at_once = max(MAX_ROWS_AT_ONCE, MAX_STEP_ROWS * sequences)
    return row * (_capacity(row, sequences) + at_once)


def _capacity(row: int, sequences: int) -> int:
    """Return the number of rows of `row` bytes that are kept: those of a step always fit."""
    return max(min(MAX_LAG * sequences, MAX_BYTES // row), MAX_STEP_ROWS * sequences)
