"""State of sequences between cycles, in device memory, so that cycles follow each other without the
host; and the result of each cycle in host memory.

Everything has room for `room` sequences. A cycle of S sequences uses the first S. Arrays of rows
have no gaps for its S and its rows: the first kernel of each cycle (`place`) writes them anew.
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
"""Arrays of rows of a batch: ids, positions, slots."""


class SequenceState(NamedTuple):
    """State of a sequence at the beginning of a cycle; `rows`: rows of its step."""

    slot: int
    position: int
    anchor: int
    rows: int


class CycleResult(NamedTuple):
    """The result of a cycle for a sequence.

    Attributes:
        position, anchor: state at the beginning of the next cycle.
        accepted: number of accepted drafted tokens.
        turn: entry of the host's ring buffer that it was written to.
        bad, unfit: bit masks of rows of the step without a valid choice, and of drafted tokens
            with logits that are not finite.
        usable: number of drafted tokens, those before the first one for which all tokens with a
            logit are suppressed.
        ids: input tokens of the step, anchor first.
        chosen, logits: choice of each row, and its logit.
    """

    position: int
    anchor: int
    accepted: int
    turn: int
    bad: int
    unfit: int
    usable: int
    ids: list[int]
    chosen: list[int]
    logits: list[float]


class CycleState:
    """State of at most `room` sequences.

    Args:
        room: maximum number of sequences.
        width: rows of a sequence in the batch of a proposal, at least those of a step.
        turns: entries of the ring buffer on the host.

    Attributes:
        values: int64 [fields, room], a line for each `CycleField`.
        unfit: int32 [room * width], `Chosen.bad` of the drafted tokens.
        seen: int64 [turns, room, RESULT_WORDS] in pinned memory, results of cycles.
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

    def set(self, states: Seq[SequenceState], spare: SequenceState, turn: int) -> None:
        """Set the state of the next cycle to `states`, and its entry on the host to `turn`. Padding
        sequences have the state `spare`, whose rows are 0, so that it never changes."""
        assert len(states) <= self.room and spare.rows == 0, (len(states), spare)
        every = [*states, *[spare] * (self.room - len(states))]
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
        """Set the number of valid rows of each sequence from the next cycle on."""
        _write(self.values[CycleField.ROWS][: len(rows)], rows)

    def accepted(self, sequences: int) -> torch.Tensor:
        """Return the accepted drafted tokens of the newest cycle, int64 [S]."""
        return self.values[CycleField.ACCEPTED][:sequences]

    def slots(self, sequences: int) -> torch.Tensor:
        """Return the slots of the sequences, int64 [S]."""
        return self.values[CycleField.SLOT][:sequences]

    def step(self, sequences: int, rows: int) -> Batch:
        """Return the batch of a step."""
        return _batch(self._placed(self._step, sequences, rows), sequences)

    def draft(self, sequences: int, rows: int) -> Batch:
        """Return the batch of a proposal. With one sequence it shares memory with that of the
        step."""
        planes = self._step if sequences == 1 else self._draft
        return _batch(self._placed(planes, sequences, rows), sequences)

    def rows(self, sequences: int, rows: int) -> torch.Tensor:
        """Return ids, positions and slots of a step's batch, int64 [3, S * rows]."""
        return self._placed(self._step, sequences, rows)

    def _placed(self, planes: torch.Tensor, sequences: int, rows: int) -> torch.Tensor:
        """Return ids, positions and slots of `rows` rows per sequence, in the layout of `place`."""
        width = self.width if sequences == 1 else rows
        assert rows <= self.width, (rows, self.width)
        return planes[: PLANES * sequences * width].view(PLANES, -1)[:, : sequences * rows]

    def place(self, sequences: int, rows: int, draft_rows: int = 0, mask: int = 0) -> None:
        """Write the batch of a step of `rows` rows per sequence, and that of a proposal if it has
        `draft_rows`: the anchor and then `mask`, at successive positions. Any later kernel may read
        them before its `griddep_wait()`."""
        single = sequences == 1
        launch.kernel("accept.cu", "place")(
            sequences,
            32,
            state=self.values,
            room=self.room,
            step=self._step,
            step_width=self.width if single else rows,
            draft=self._draft if draft_rows and not single else None,
            draft_width=draft_rows,
            mask=mask,
            pdl=False,
        )

    def chosen(self, sequences: int, rows: int) -> Chosen:
        """Return the output buffers for the choices of a step."""
        n = sequences * rows
        return Chosen(self._chosen[:n], self._logits[:n], self._bad[:n])

    def accept(
        self, sequences: int, rows: int, *, drafted: bool, forced: torch.Tensor | None = None
    ) -> None:
        """Commit the choices of a step, for each sequence up to and including the first one that
        differs from the drafted token, and write the result to the host.

        Args:
            drafted: there was a proposal, so `unfit` is of this cycle.
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

    def drafted(self, sequences: int, rows: int) -> tuple[list[list[int]], list[list[int]]]:
        """Wait for a proposal whose step has `rows` rows per sequence. Return the drafted tokens of
        each sequence, and the `RowFault` of each of them."""
        ids = self.rows(sequences, rows)[0].view(sequences, rows)[:, 1:]
        unfit = self.unfit[: sequences * self.width].view(sequences, self.width)[:, : rows - 1]
        return ids.tolist(), unfit.tolist()

    def results(self, turn: int, sequences: int) -> list[CycleResult]:
        """Return the results of the cycle with this turn, which must have ended."""
        at = self.seen[turn, :sequences]
        words = at[:, RESULT_LOGITS : RESULT_LOGITS + MAX_STEP_ROWS // 2]
        logits = words.contiguous().view(torch.float32).tolist()
        out = []
        for row, values in zip(at.tolist(), logits, strict=True):
            ids, chosen = row[RESULT_IDS:RESULT_CHOSEN], row[RESULT_CHOSEN:RESULT_LOGITS]
            position, anchor, accepted, turn, bad, unfit, usable = row[:RESULT_IDS]
            state = position, anchor, accepted, turn
            out.append(CycleResult(*state, bad, unfit, usable, ids, chosen, values))
        return out


def _batch(planes: torch.Tensor, sequences: int) -> Batch:
    ids, positions, slots = planes.unbind()
    return Batch(ids, positions, slots, (len(ids) // sequences,) * sequences)


def _write(to: torch.Tensor, values: Seq[int] | Seq[Seq[int]]) -> None:
    """Copy values to device memory, after all work that has been launched and before later work."""
    to.copy_(torch.tensor(values, dtype=torch.int64).pin_memory(), non_blocking=True)


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    return [Unit("accept.cu", ("accept", "place"), max_registers=48)]
