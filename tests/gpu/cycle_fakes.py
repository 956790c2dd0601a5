"""A target and drafts of a few tensor operations, to test cycles without models.

They compute logits from the tokens of a text in a cache by slot and position. A cycle that reads or
writes a wrong slot or position therefore changes the chosen tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import torch

from g4spec.core import MAX_STEP_ROWS, Batch, Pick, StepRows
from g4spec.runtime.pending_rows import PendingRows

VOCAB, CODES, ROOM = 48, 97, 512
"""Number of tokens; number of distinct contexts; positions of a cache."""

_HEAD = 6.0 * torch.randn(CODES, VOCAB, generator=torch.Generator().manual_seed(5))


class Memory:
    """Tokens by slot and position, int64 [slots, ROOM]."""

    def __init__(self, slots: int, device: str) -> None:
        self.ids = torch.full((slots, ROOM), -1, device=device)

    def write(self, batch: Batch) -> None:
        self.ids[batch.slots, batch.positions] = batch.ids

    def codes(self, batch: Batch) -> torch.Tensor:
        """Return a code of the text up to each row, int64 [T]."""
        before = (batch.positions - 1).clamp(min=0)
        first = self.ids[batch.slots, before] * 31 + self.ids[batch.slots, before // 2] * 7
        return (batch.ids * 3 + first + batch.positions) % CODES


class FakeTarget:
    """A target (`runtime.target.Target`) whose logits depend on the newest tokens and one in the
    middle of the text.

    Attributes:
        poison: added to the logits of each slot.
    """

    def __init__(self, n_slots: int, device: str) -> None:
        self.config = SimpleNamespace(n_vocab=VOCAB, softcap=30.0)
        self.ops: Any = SimpleNamespace(
            device=torch.device(device), ids=lambda values: torch.tensor(values, device=device)
        )
        self.pending = PendingRows(self.ops, n_slots)
        self.space = SimpleNamespace(n_slots=n_slots, table=torch.zeros(n_slots + 1, 4))
        self.memory = Memory(n_slots + 1, device)
        self.poison = torch.zeros(n_slots + 1, device=device)
        self.head = _HEAD.to(device)

    def step(self, batch: Batch, *, capped: bool = True) -> tuple[StepRows, torch.Tensor]:
        self.memory.write(batch)
        codes = self.memory.codes(batch)
        raw = self.head[codes] + self.poison[batch.slots][:, None]
        logits = 30.0 * torch.tanh(raw / 30.0) if capped else raw
        hidden = codes[:, None].float()
        return StepRows(batch, hidden, 2.0 * hidden), logits


class Chain:
    """A draft (`g4spec.core.Draft`) that proposes one token after the other. It follows the target
    up to a token that depends on the sum of all committed rows, and differs afterwards.

    Attributes:
        poison: added to the logits of each slot, from drafted token `healthy` on.
    """

    name = "chain"
    taps: tuple[int, ...] = (0,)
    max_tokens, rows, mask = 15, 16, 3
    one_pass, recordable = False, True
    commit_rows = MAX_STEP_ROWS
    state: tuple[torch.Tensor, ...]
    caches: Seq[Any] = ()

    def __init__(self, n_slots: int, device: str) -> None:
        self.memory = Memory(n_slots + 1, device)
        self.seen = torch.zeros(n_slots + 1, device=device)
        self.poison, self.healthy = torch.zeros(n_slots + 1, device=device), 0
        self.head = _HEAD.to(device)
        self.state = (self.seen,)

    def begin(self, slot: int, ids: Seq[int] = ()) -> None:
        self.seen[slot] = 0

    def commit(self, rows: StepRows, accepted: torch.Tensor) -> None:
        batch = rows.batch
        self.memory.write(batch)
        for s, (start, size) in enumerate(zip(batch.starts, batch.sizes, strict=True)):
            verified = torch.arange(size, device=accepted.device) <= accepted[s]
            added = (rows.taps[start : start + size, 0] * verified).sum()
            slot = batch.slots[start : start + 1]
            self.seen[slot] = (self.seen[slot] + added) % CODES

    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        rows, seen, out = batch.columns(0, 1), self.seen[batch.columns(0, 1).slots], []
        for j in range(count):
            token = pick(self._logits(rows, seen, j), j)
            out.append(token)
            rows = rows.with_positions(rows.positions + 1).with_ids(token)
        return torch.stack(out, dim=1)

    def _logits(self, rows: Batch, seen: torch.Tensor, j: int) -> torch.Tensor:
        """Return the logits of drafted token j: the target's, or others from some j on."""
        self.memory.write(rows)
        codes, lead = self.memory.codes(rows), seen.long()
        astray = (lead % 8 <= j) | (lead % 2 == 1)
        codes = torch.where(astray & (lead % 3 > 0), codes + 1, codes) % CODES
        raw = self.head[codes]
        if j >= self.healthy:
            raw = raw + self.poison[rows.slots][:, None]
        return 30.0 * torch.tanh(raw / 30.0)


class Block(Chain):
    """As `Chain`, but proposes all tokens at once; each row follows the most likely token of the
    row before.

    Attributes:
        asked: (sequences, tokens) of each proposal.
    """

    name = "block"
    max_tokens, rows = 7, 20
    one_pass = True

    def __init__(self, n_slots: int, device: str) -> None:
        super().__init__(n_slots, device)
        self.asked: list[tuple[int, int]] = []

    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        self.asked.append((len(batch.sizes), count))
        rows, seen, out = batch.columns(0, 1), self.seen[batch.columns(0, 1).slots], []
        for j in range(count):
            out.append(self._logits(rows, seen, j))
            rows = rows.with_positions(rows.positions + 1).with_ids(out[-1].nan_to_num().argmax(1))
        logits = torch.stack(out, dim=1)
        return pick(logits.flatten(0, 1), 0).view(logits.shape[:2])


KINDS = {"chain": Chain, "block": Block}
