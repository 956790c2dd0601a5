"""N-gram lookup: proposes the tokens that followed the latest earlier occurrence of the last n
tokens. Needs no file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from g4spec.core import MAX_DRAFT, MAX_STEP_ROWS, Batch, Pick, StepRows

if TYPE_CHECKING:
    import torch

ARCH = None
TITLE = "n-gram lookup"


class History:
    """Tokens of one sequence, with an index of where each n-gram occurred last."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        self.ids: list[int] = []
        self.n_gram_ends: dict[tuple[int, ...], int] = {}

    def add(self, ids: Sequence[int]) -> None:
        """Append verified tokens."""
        for token in ids:
            for n in self.lengths:
                if len(self.ids) >= n:
                    self.n_gram_ends[tuple(self.ids[-n:])] = len(self.ids)
            self.ids.append(token)

    def continuation(self, anchor: int, count: int) -> list[int]:
        """Return at most `count` tokens that followed the latest earlier occurrence of the last n
        tokens, trying the longest n first; [] if there is none."""
        history = [*self.ids[-self.lengths[0] :], anchor]
        for n in self.lengths:
            end = self.n_gram_ends.get(tuple(history[-n:]))
            if end is not None:
                return [*self.ids, anchor][end : end + count]
        return []


class Drafter:
    """Copies the continuation of the latest earlier occurrence of the newest tokens
    (`g4spec.core.Draft`).

    Args:
        longest, shortest: maximum and minimum length of the n-gram to search for.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()
    max_tokens = MAX_DRAFT
    rows = 1
    one_pass = True
    commit_rows = MAX_STEP_ROWS
    recordable = False
    mask = 0
    caches: Sequence[Any] = ()
    state: tuple[torch.Tensor, ...] = ()

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.longest, self.shortest = longest, shortest
        self._histories: dict[int, History] = {}

    def begin(self, slot: int, ids: Sequence[int] = ()) -> None:
        """Start a new sequence with tokens `ids`."""
        self._histories[slot] = History(self.shortest, self.longest)
        self._histories[slot].add(ids)

    def commit(self, rows: StepRows, accepted: torch.Tensor) -> None:
        """Add verified tokens to the history."""
        batch, ids = rows.batch, rows.batch.ids.tolist()
        slots = batch.slots.tolist()
        for start, count in zip(batch.starts, accepted.tolist(), strict=True):
            self._histories[slots[start]].add(ids[start : start + count + 1])

    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        """See `g4spec.core.Draft`."""
        out = []
        for anchor, slot in zip(batch.ids.tolist(), batch.slots.tolist(), strict=True):
            found = self._histories[slot].continuation(anchor, count)
            out.append(found + [-1] * (count - len(found)))
        return batch.ids.new_tensor(out)
