"""Whole cycles on the GPU: proposal, step, choice, acceptance and the draft's commit follow each
other without the host, which may start a cycle before it has read what the one before it did.

A cycle is two CUDA graphs, one behind the other, so that events between them tell what each takes;
without a draft it is one, a step of one row. Where the sequence stands, and how many drafted tokens
count, are numbers in device memory: a proposal of any length and position is the same graph, and so
is a step of the same number of rows. Rows behind those that count are padding, see
`cuda.step.graphs`. Rows of rejected tokens are appended to the draft's caches like those of
the target: the next cycle overwrites them before anything looks there, and rings have room for more
than one step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from g4spec.core import MAX_STEP_ROWS
from g4spec.runtime.cuda.step import graphs, screen
from g4spec.runtime.cuda.step.choose import Choice, Chosen, CycleState
from g4spec.runtime.cuda.step.linear import Exchange
from g4spec.runtime.cuda.weights.dequant import Weight
from g4spec.runtime.speculate import Cycle, Played
from g4spec.runtime.target import STEPS, Target

if TYPE_CHECKING:
    from g4spec.ops.sampling import Sampler

AHEAD = 2
"""Cycles that may have been started and not yet read."""

FIELDS = 6
"""Lines of `_Numbers` after the state."""


class _Numbers:
    """All that a cycle reads and leaves behind, int64 but where it says so, in one piece, which its
    last kernel shows to the host.

    Attributes:
        state: position, anchor, accepted, rows that count, turn (`CycleState`).
        ids, positions: [16] of the step's rows: the anchor, then what was drafted.
        unfit: int32 [16], not 0 where the draft's logits were no numbers.
        chosen, bad, logits: [16] of the step's rows: choice, whether there was none (int32), and
            the choice's logit (float32).
    """

    SIZE = CycleState.SIZE + FIELDS * MAX_STEP_ROWS

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.state = whole, whole[: CycleState.SIZE]
        lines = whole[CycleState.SIZE :].view(FIELDS, MAX_STEP_ROWS).unbind()
        self.ids, self.positions, self.chosen, *narrow = lines
        unfit, bad, logits = (line[: MAX_STEP_ROWS // 2] for line in narrow)
        self.unfit, self.bad = unfit.view(torch.int32), bad.view(torch.int32)
        self.logits = logits.view(torch.float32)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A started cycle: `seen` its numbers, once `ended` has been reached; before that come `begun`
    and `proposed`."""

    seen: _Numbers
    begun: torch.cuda.Event
    proposed: torch.cuda.Event
    ended: torch.cuda.Event

    @classmethod
    def of(cls, seen: torch.Tensor) -> _Slot:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        return cls(_Numbers(seen), *events)


@dataclass(frozen=True, slots=True)
class Picks:
    """Chooses drafted tokens (`g4spec.models.spec.Pick`): drafted token i stands behind
    `positions` [i] and goes to `ids` [i]; `bad` as of `Chosen`."""

    choice: Choice
    positions: torch.Tensor
    ids: torch.Tensor
    bad: torch.Tensor

    def __call__(self, logits: torch.Tensor, at: int) -> torch.Tensor:
        into = self._into(len(logits), at)
        positions = self.positions[at : at + len(logits)]
        return self.choice(logits.contiguous(), positions, into=into).ids

    def best(
        self, hidden: torch.Tensor, table: Weight, by: Exchange, at: int, cap: float
    ) -> torch.Tensor | None:
        """The same from rows [T, H] and the table [V, H] their logits come from; None where these
        are needed all."""
        if self.choice.mode != ("greedy",) or not screen.takes(table, self.choice.columns):
            return None
        return screen.best(hidden, table, self.choice, by, cap, self._into(len(hidden), at)).ids

    def _into(self, count: int, at: int) -> Chosen:
        rows = slice(at, at + count)
        values = torch.empty(count, dtype=torch.float32, device=self.ids.device)
        return Chosen(self.ids[rows], values, self.bad[rows])


class Cycles:
    """Cycles of a target and a draft (`g4spec.runtime.speculate.Player`).

    Args:
        draft: or None: cycles of no drafted tokens.
        pool: memory that all recordings share.
        forced: accept so many drafted tokens, whatever they are (for measurements).
        keep: whether cycles without a draft bring `Played.read`.
    """

    def __init__(
        self,
        target: Target,
        draft: Recordable | None,
        pool: Any,
        forced: int | None = None,
        keep: bool = False,
    ) -> None:
        self._target, self._draft, self._pool, self._keep = target, draft, pool, keep
        device = target.ops.device
        self._on = _Numbers(torch.zeros(_Numbers.SIZE, dtype=torch.int64, device=device))
        self._state = CycleState(self._on.whole)
        self._seen = torch.zeros(AHEAD, _Numbers.SIZE, dtype=torch.int64).pin_memory()
        self._forced = None if forced is None else torch.tensor([forced], device=device)
        self._choice: Choice | None = None
        self._made: dict[tuple[str, int, tuple[str, ...]], graphs.Capture] = {}
        self._slots = deque(_Slot.of(seen) for seen in self._seen)
        self._waiting: deque[tuple[_Slot, int, list[torch.Tensor]]] = deque()
        self._stands: tuple[int, int] | None = None
        self._count = 0

    def ready(self, sampler: Sampler) -> bool:
        """Take another sampler, if its choices can be recorded; one that sorts could, but every
        setting of it would be a recording of its own."""
        if self._choice is None or self._choice.sampler.suppress != sampler.suppress:
            torch.cuda.synchronize()
            self._made.clear()
            self._choice = Choice(self._target.config.n_vocab, self._target.ops.device,
                                  suppress=sampler.suppress)  # fmt: skip
        self._choice.set(sampler)
        return self._choice.mode[0] != "sorted"

    def begin(self, token: int, position: int) -> None:
        """The next cycle starts here, whatever was started before: `token` is the newest one."""
        if self._waiting or self._stands != (token, position):
            self._state.set(position, token, 1 + self._count)
        self._waiting.clear()

    def start(self, count: int) -> None:
        """Start a cycle of `count` drafted tokens where the one before it ends."""
        draft = self._draft
        assert 1 <= count <= draft.max_tokens if draft else count == 0, count
        assert len(self._waiting) < AHEAD
        if count != self._count:
            self._on.state[3:4].fill_(1 + count)
            self._count = count
        slot = self._slots[0]
        rows = next(size for size in STEPS if size > count)
        slot.begun.record()
        if draft:
            drafts = draft.max_tokens if draft.at_once else count
            self._recorded("proposal", drafts, self._propose).replay()
        slot.proposed.record()
        step = self._recorded("step", rows, self._verify if draft else self._plain)
        step.replay()
        kept = [rows.clone() for rows in step.outputs] if self._keep else []
        slot.ended.record()
        self._slots.rotate(-1)
        self._waiting.append((slot, count, kept))

    def result(self) -> Played:
        """Wait for the oldest cycle that was started."""
        slot, count, kept = self._waiting.popleft()
        slot.ended.synchronize()
        position, anchor, accepted, _, turn = slot.seen.state.tolist()
        assert slot.seen.whole.data_ptr() == self._seen[turn].data_ptr(), turn
        self._stands = anchor, position
        used = slice(accepted + 1)
        cycle = Cycle(
            slot.seen.chosen[used].tolist(),
            slot.seen.logits[used].tolist(),
            slot.seen.ids[1 : 1 + count].tolist(),
            accepted,
            slot.begun.elapsed_time(slot.proposed) * 1e-3,
            slot.proposed.elapsed_time(slot.ended) * 1e-3,
        )
        refused = bool(slot.seen.unfit[:count].any())
        played = Played(cycle, refused, bool(slot.seen.bad[used].any()))
        if kept:
            start = int(slot.seen.positions[0])
            played.read = Committed(slot.seen.ids[:1].tolist(), start, *kept)
        return played

    def _recorded(
        self, name: str, size: int, run: Callable[[int], tuple[torch.Tensor, ...]]
    ) -> graphs.Capture:
        """A half as a graph. It runs twice before, see `graphs.Recorded`, from the numbers that the
        first replay finds."""
        assert self._choice is not None
        key = name, size, self._choice.mode
        if key not in self._made:
            before = self._on.whole.clone()
            for _ in range(2):
                run(size)
                self._on.whole.copy_(before)
            self._made[key] = graphs.Capture(lambda: run(size), self._pool)
        return self._made[key]

    def _plain(self, size: int) -> tuple[torch.Tensor, ...]:
        """A cycle without a draft."""
        self._state.place(self._on.ids, self._on.positions)
        return self._verify(size)

    def _propose(self, count: int) -> tuple[()]:
        """The first half: what the step reads."""
        on = self._on
        assert self._draft is not None
        self._state.place(on.ids, on.positions, self._draft.mask)
        drafts = on.ids[1:]
        assert self._choice is not None
        pick = Picks(self._choice, on.positions, drafts, on.unfit)
        drafted = self._draft.fill(on.ids, on.positions, count, pick)
        if drafted.data_ptr() != drafts.data_ptr():  # not what one call of `pick` returned
            drafts[:count].copy_(drafted)
        return ()

    def _verify(self, size: int) -> tuple[torch.Tensor, ...]:
        """The second half: a step of `size` rows, and what follows from it. Returns what a draft is
        given of them."""
        on = self._on
        ids, positions = on.ids[:size], on.positions[:size]
        hidden, taps, logits = self._target.run(ids, positions, capped=False)
        chosen = Chosen(on.chosen[:size], on.logits[:size], on.bad[:size])
        self._chosen(logits, positions, chosen, self._target.config.softcap)
        self._state.accept(chosen.ids, ids, forced=self._forced, seen=self._seen)
        if self._draft is not None:
            self._draft.take(Unseen(ids, positions, hidden, taps), on.state[2:3])
        return hidden, taps

    def _chosen(
        self, logits: torch.Tensor, positions: torch.Tensor, into: Chosen, cap: float = 0.0
    ) -> Chosen:
        assert self._choice is not None
        return self._choice(logits.contiguous(), positions, into=into, cap=cap)
