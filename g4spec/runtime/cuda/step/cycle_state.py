"""Where sequences stand between cycles, in device memory, so that cycles follow each other without
the host; and what the host is told of each cycle.

Everything holds `room` sequences. A cycle of S of them uses the first S, and arrays of rows are
packed for its S and its rows: each cycle's first kernel (`place`) writes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from g4spec.core import MAX_STEP_ROWS, Batch
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import (
    RESULT_CHOSEN,
    RESULT_IDS,
    RESULT_LOGITS,
    RESULT_WORDS,
    CycleField,
)
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.step.choose import Chosen

PLANES = 3
"""Arrays of rows that a batch has: ids, positions, slots."""


class SequenceState(NamedTuple):
    """Where a sequence begins a cycle: `rows` of its step count."""

    slot: int
    position: int
    anchor: int
    rows: int


class CycleResult(NamedTuple):
    """The result of a cycle for a sequence.

    Attributes:
        position, anchor: where the next cycle begins.
        accepted: drafted tokens that held.
        turn: which of the host's places this was written to.
        bad, unfit: bits: rows of the step, and drafted tokens, whose logits are not finite.
        ids: what the step read, anchor first. chosen, logits: for each row.
    """

    position: int
    anchor: int
    accepted: int
    turn: int
    bad: int
    unfit: int
    ids: list[int]
    chosen: list[int]
    logits: list[float]


class CycleState:
    """State of at most `room` sequences.

    Args:
        room: most sequences.
        width: rows of a sequence that a proposal is given, not fewer than a step may have.
        turns: places on the host, used one after the other.

    Attributes:
        values: int64 [fields, room], a line for each `CycleField`.
        unfit: int32 [room * width], of the drafted tokens (`Chosen.bad`).
        seen: int64 [turns, room, RESULT_WORDS] in pinned memory.
    """

    def __init__(self, room: int, device: torch.device | str, *, width: int, turns: int) -> None:
        self.room, self.width, self.turns = room, width, turns

        def zeros(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self.values = zeros(len(CycleField) * room).view(len(CycleField), room)
        self.unfit = zeros(room * self.width, torch.int32)
        self._step = zeros(PLANES * room * self.width)
        self._draft = zeros(PLANES * room * self.width)
        rows = room * MAX_STEP_ROWS
        self._chosen, self._bad = zeros(rows), zeros(rows, torch.int32)
        self._logits = zeros(rows, torch.float32)
        self.seen = torch.zeros(turns, room, RESULT_WORDS, dtype=torch.int64).pin_memory()

    def set(self, stands: Seq[SequenceState], spare: SequenceState, turn: int) -> None:
        """Begin the next cycle at `stands`, the host's next place being `turn`. What fills a batch
        behind them stands at `spare`, whose rows are 0: it never moves."""
        assert len(stands) <= self.room and spare.rows == 0, (len(stands), spare)
        every = [*stands, *[spare] * (self.room - len(stands))]
        lines = {
            CycleField.POSITION: [s.position for s in every],
            CycleField.ANCHOR: [s.anchor for s in every],
            CycleField.ACCEPTED: [0] * self.room,
            CycleField.ROWS: [s.rows for s in every],
            CycleField.SLOT: [s.slot for s in every],
            CycleField.TURN: [turn] * self.room,
        }
        _write(self.values, [lines[field] for field in CycleField])

    def set_rows(self, rows: Seq[int]) -> None:
        """Let so many rows of each sequence count from the next cycle on."""
        _write(self.values[CycleField.ROWS][: len(rows)], rows)

    def accepted(self, sequences: int) -> torch.Tensor:
        """Drafted tokens that held in the newest cycle, int64 [S]."""
        return self.values[CycleField.ACCEPTED][:sequences]

    def slots(self, sequences: int) -> torch.Tensor:
        """Slots of the sequences, int64 [S]."""
        return self.values[CycleField.SLOT][:sequences]

    def step(self, sequences: int, rows: int) -> Batch:
        """The batch of a step."""
        return _batch(self._placed(self._step, sequences, rows), sequences)

    def draft(self, sequences: int, rows: int) -> Batch:
        """The batch of a proposal. With one sequence that of the step lies over it."""
        planes = self._step if sequences == 1 else self._draft
        return _batch(self._placed(planes, sequences, rows), sequences)

    def rows(self, sequences: int, rows: int) -> torch.Tensor:
        """Ids, positions and slots of a step's batch, int64 [3, S * rows]."""
        return self._placed(self._step, sequences, rows)

    def _placed(self, planes: torch.Tensor, sequences: int, rows: int) -> torch.Tensor:
        """Ids, positions and slots of `rows` rows a sequence, as `place` lays them out."""
        width = self.width if sequences == 1 else rows
        assert rows <= self.width, (rows, self.width)
        return planes[: PLANES * sequences * width].view(PLANES, -1)[:, : sequences * rows]

    def place(self, sequences: int, rows: int, draft_rows: int = 0, mask: int = 0) -> None:
        """Write the batch of a step of `rows` rows a sequence, and that of a proposal if it has
        `draft_rows`: the anchor and then `mask`, at successive positions. Whatever follows this
        kernel may read them early."""
        alone = sequences == 1
        launch.kernel("accept.cu", "place")(
            sequences,
            32,
            state=self.values,
            room=self.room,
            step=self._step,
            step_width=self.width if alone else rows,
            draft=self._draft if draft_rows and not alone else None,
            draft_width=draft_rows,
            mask=mask,
            pdl=False,
        )

    def chosen(self, sequences: int, rows: int) -> Chosen:
        """Where the choices of a step go."""
        n = sequences * rows
        return Chosen(self._chosen[:n], self._logits[:n], self._bad[:n])

    def accept(
        self, sequences: int, rows: int, *, drafted: bool, forced: torch.Tensor | None = None
    ) -> None:
        """Commit the choices of a step, for each sequence up to the first one that was not drafted,
        included, and tell the host.

        Args:
            drafted: whether there was a proposal, so that `unfit` is of this cycle.
            forced: int64 [1] or None: accept so many drafted tokens, whatever they are.
        """
        chosen, step = self.chosen(sequences, rows), self.rows(sequences, rows)
        launch.kernel("accept.cu", "accept")(
            sequences,
            32,
            chosen=chosen.ids,
            logits=chosen.values,
            bad=chosen.bad,
            ids=step[0],
            rows=rows,
            state=self.values,
            room=self.room,
            forced=forced,
            unfit=self.unfit if drafted else None,
            pitch=self.width,
            seen=self.seen,
            turns=self.turns,
        )

    def results(self, turn: int, sequences: int) -> list[CycleResult]:
        """What the cycle with this turn did, once it has ended."""
        at = self.seen[turn, :sequences]
        words = at[:, RESULT_LOGITS : RESULT_LOGITS + MAX_STEP_ROWS // 2]
        logits = words.contiguous().view(torch.float32).tolist()
        out = []
        for row, values in zip(at.tolist(), logits, strict=True):
            position, anchor, accepted, turn, bad, unfit = row[:RESULT_IDS]
            ids, chosen = row[RESULT_IDS:RESULT_CHOSEN], row[RESULT_CHOSEN:RESULT_LOGITS]
            out.append(
                CycleResult(position, anchor, accepted, turn, bad, unfit, ids, chosen, values)
            )
        return out


def _batch(planes: torch.Tensor, sequences: int) -> Batch:
    ids, positions, slots = planes.unbind()
    return Batch(ids, positions, slots, (len(ids) // sequences,) * sequences)


def _write(there: torch.Tensor, values: Seq[int] | Seq[Seq[int]]) -> None:
    """Write numbers into device memory, after what has been started and before what will be."""
    there.copy_(torch.tensor(values, dtype=torch.int64).pin_memory(), non_blocking=True)


UNITS = [Unit("accept.cu", ("accept", "place"), max_registers=48)]
