"""Tests of the rows that a draft has not been given yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4spec.core import Sequence, StepRows
from g4spec.runtime import pending_rows
from g4spec.runtime.pending_rows import PendingRows


class Reader:
    """A draft that notes what it is given."""

    def __init__(self, commit_rows: int = 100) -> None:
        self.commit_rows = commit_rows
        self.given: list[StepRows] = []

    def commit(self, rows: StepRows, accepted: torch.Tensor) -> None:
        assert accepted.tolist() == [n - 1 for n in rows.batch.sizes]
        self.given.append(rows)


class Texts:
    """Sequences whose rows tell slot and position: token, hidden state and taps."""

    def __init__(self, *slots: int) -> None:
        ops: Any = SimpleNamespace(ids=torch.tensor)
        self.pending = PendingRows(ops, len(slots))
        self.each = {s: Sequence(s, [100 * s], 0) for s in slots}

    def step(self, *slots: int) -> None:
        """Compute a row of each slot in one step."""
        rows = torch.tensor([[float(self.each[s].ids[-1])] for s in slots])
        for s, row in zip(slots, self.pending.put(rows, rows.repeat(1, 3)), strict=True):
            sequence = self.each[s]
            sequence.pending.append(row)
            sequence.ids.append(sequence.ids[-1] + 1)
            sequence.n_read += 1

    def flush(self, draft: Any, *slots: int) -> None:
        self.pending.flush(draft, [self.each[s] for s in slots])
        assert not any(self.each[s].pending for s in slots)


def check(rows: StepRows, wanted: dict[int, list[int]]) -> None:
    """Compare the rows with the wanted positions of each slot."""
    ids = [100 * s + p for s, positions in wanted.items() for p in positions]
    assert rows.batch.ids.tolist() == ids
    assert rows.batch.positions.tolist() == [p for each in wanted.values() for p in each]
    assert rows.batch.slots.tolist() == [s for s, each in wanted.items() for _ in each]
    assert rows.batch.sizes == tuple(map(len, wanted.values()))
    assert rows.hidden.tolist() == [[x] for x in ids]
    assert rows.taps.tolist() == [[x] * 3 for x in ids]


def test_rows_of_sequences_that_share_steps_are_in_order() -> None:
    """Slot 2 took part in all steps, slot 5 came later, slot 3 ran by itself."""
    texts, draft = Texts(2, 5, 3), Reader()
    for slots in ((2,), (2, 5), (5, 2), (3,)):
        texts.step(*slots)
    texts.flush(draft, 2, 3, 5)
    (rows,) = draft.given
    check(rows, {2: [0, 1, 2], 3: [0], 5: [0, 1]})


def test_a_draft_is_given_so_many_rows_at_a_time() -> None:
    texts, draft = Texts(2, 5), Reader(commit_rows=3)
    for slots in ((2,), (2, 5), (2,), (2,)):
        texts.step(*slots)
    texts.flush(draft, 2, 5)
    first, second = draft.given
    check(first, {2: [0, 1, 2], 5: [0]})
    check(second, {2: [3]})


def test_rows_stay_until_they_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step across the end of the ring buffer; a sequence that lags too far behind."""
    monkeypatch.setattr(pending_rows, "MAX_BYTES", 0)
    texts, draft = Texts(2, 5, 3), Reader()  # room for 48 rows
    for _ in range(15):
        texts.step(2, 5, 3)
    texts.step(3)
    texts.flush(draft, 2, 5)
    late = texts.each[3]
    assert not texts.pending.overrun(late, 4) and texts.pending.overrun(late, 5)
    assert not texts.pending.overrun(texts.each[2], 48)
    texts.step(2, 5, 3)
    texts.flush(draft, 2, 3)
    check(draft.given[-1], {2: [15], 3: list(range(17))})


def test_a_sequence_lags_behind_by_so_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_rows, "MAX_LAG", 3)
    texts, most = Texts(2, 5), []
    for _ in range(3):
        texts.step(2)
        most.append(texts.pending.overrun(texts.each[2], 1))
    assert most == [False, False, True]


def test_memory_is_bounded() -> None:
    row = 4 * 5376 * 7
    few = pending_rows.max_bytes(5376, 6, 1)
    assert few == row * (pending_rows.MAX_LAG + pending_rows.MAX_ROWS_AT_ONCE)
    many = pending_rows.max_bytes(5376, 6, 64)
    assert many <= pending_rows.MAX_BYTES + row * 16 * 64
