"""The choice of drafted tokens inside a recorded proposal."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from g4spec.runtime.cuda.step import screen
from g4spec.runtime.cuda.step.choose import Choice, Chosen
from g4spec.runtime.cuda.step.linear import SplitKWorkspace
from g4spec.runtime.cuda.weights.dequant import Weight


@dataclass(frozen=True, slots=True)
class Picks:
    """Chooses drafted tokens of S sequences (`g4spec.core.Pick`).

    Attributes:
        positions: int64 [S * W]: drafted token i of sequence s is the successor of positions[s * W
            + i].
        ids: int64: drafted token i of a single sequence is written to ids[i]. Tokens of several
            sequences go to new memory, because a draft reads them as consecutive rows.
        bad: int32 [S * W]: `RowFault` of the logits of a drafted token.
        sequences: S.
    """

    choice: Choice
    positions: torch.Tensor
    ids: torch.Tensor
    bad: torch.Tensor
    sequences: int = 1

    def __call__(self, logits: torch.Tensor, at: int) -> torch.Tensor:
        into = self._into(len(logits), at)
        return self.choice(
            logits.contiguous(),
            self.positions[at:],
            into=into,
            sequences=self.sequences,
            pitch=self._pitch,
        ).ids

    def best(
        self, hidden: torch.Tensor, table: Weight, by: SplitKWorkspace, at: int, cap: float
    ) -> torch.Tensor | None:
        """Choose the same tokens from rows [S * n, H] and the table [V, H]. Return None if all
        logits are needed."""
        if self.choice.modes != ("greedy",) or not screen.takes(table, self.choice.columns):
            return None
        into = self._into(len(hidden), at)
        screen.best(hidden, table, self.choice, by, cap, into, self.sequences, self._pitch)
        return into.ids

    @property
    def _pitch(self) -> int:
        return len(self.positions) // self.sequences

    def _into(self, count: int, at: int) -> Chosen:
        ids = self.ids[at : at + count] if self.sequences == 1 else self.ids.new_empty(count)
        values = torch.empty(count, dtype=torch.float32, device=ids.device)
        return Chosen(ids, values, self.bad[at:])
