"""Whole cycles on the GPU: proposal, step, choice, acceptance and the draft's commit follow each
other without the host, which may start a cycle before it has read what the one before it did.

A cycle is two CUDA graphs, one behind the other, so that events between them tell what each takes;
where nobody drafts it is one. Where sequences stand, how many drafted tokens of each count, and
their samplers are numbers in device memory: a graph serves every position, slot, length and seed.
It is recorded for a number of sequences (a power of two) and of rows of each. Sequences that fill
a batch up stand in a spare slot, where nobody looks. Rows behind those that count are padding: what
they leave in caches is overwritten before anything looks there, and rings have room for more than
one step. The same holds for rows of rejected tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from g4spec.core import MAX_DRAFT, MAX_STEP_ROWS, Batch, Cycle, Draft, Sequence, StepRows, Work
from g4spec.ops.sampling import NotFinite
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.choose import Choice, mode_of
from g4spec.runtime.cuda.step.cycle_state import CycleResult, CycleState, SequenceState
from g4spec.runtime.cuda.step.picks import Picks
from g4spec.runtime.pending_rows import flush

if TYPE_CHECKING:
    from g4spec.runtime.target import Target

DEPTH = 2
"""Cycles that may have been started and not asked for."""

STEPS = (1, 2, 4, 8, 16)
"""Rows of a sequence in recorded steps."""

SPARE_POSITION = 1
"""Where sequences stand that fill a batch up. Not 0: some drafts look at the position before."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The key under which a CUDA graph is recorded.

    Attributes:
        part: "proposal", "step" (with the draft's commit) or "plain" (a step without a draft).
        sequences, rows: of the step; each sequence has so many rows.
        drafts: tokens drafted for each sequence; 0 where it makes no difference.
        modes: kernels that choose tokens.
    """

    part: str
    sequences: int
    rows: int
    drafts: int
    modes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Marks:
    """When parts of a cycle have been done."""

    begun: torch.cuda.Event
    proposed: torch.cuda.Event
    ended: torch.cuda.Event

    @classmethod
    def new(cls) -> Marks:
        return cls(*(torch.cuda.Event(enable_timing=True) for _ in range(3)))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Started:
    """A cycle under way.

    Attributes:
        turn: place on the host that it is told to.
        sequences, counts: of its work. `kept`: rows for a draft that does not take part, or None.
    """

    turn: int
    marks: Marks
    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]
    kept: StepRows | None


class GraphRunner:
    """Runs cycles as CUDA graphs (`g4spec.core.Runner`).

    Args:
        draft: or None: cycles of no drafted tokens.
        forced: accept so many drafted tokens, whatever they are (for measurements).
    """

    depth = DEPTH

    def __init__(self, target: Target, draft: Draft | None, *, forced: int | None = None) -> None:
        self._target, self._draft = target, draft
        device, n_slots = target.ops.device, target.space.n_slots
        self._spare = SequenceState(n_slots, SPARE_POSITION, 0, 0)
        room = bucket(n_slots)
        recorded = draft if draft and draft.recordable else None
        if n_slots > 2:  # batches of fewer are never filled up
            assert len(target.space.table) > n_slots, "no spare slot in the table"
            states = recorded.state if recorded else ()
            assert all(len(x) > n_slots for x in states), "no spare slot in the draft's state"
        width = recorded.rows if recorded else MAX_STEP_ROWS
        assert width >= MAX_STEP_ROWS, width  # so that a step's rows lie within a proposal's
        self._state = CycleState(room, device, width=width, turns=DEPTH)
        self._choice = Choice(target.config.n_vocab, device, room=room)
        self._forced = None if forced is None else torch.tensor([forced], device=device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: dict[GraphKey, graphs.Capture] = {}
        self._marks = [Marks.new() for _ in range(DEPTH)]
        self._waiting: deque[Started] = deque()
        self._turn = 0
        self._stands: list[tuple[int, int, int]] = []
        self._counts: tuple[int, ...] = ()

    def can_run(self, work: Seq[Work]) -> bool:
        """True unless a choice needs the host or sorts all logits, sequences suppress different
        tokens, or somebody drafts and the draft cannot be recorded."""
        samplers, draft = [w.chooser.sampler for w in work], self._draft
        return (
            not any(w.chooser.on_host for w in work)
            and len({s.suppress for s in samplers}) == 1
            and all(mode_of(s, self._choice.columns) != "sorted" for s in samplers)
            and (not any(w.count for w in work) or (draft is not None and draft.recordable))
        )

    def start(self, work: Seq[Work]) -> None:
        """See `g4spec.core.Runner`."""
        assert len(self._waiting) < DEPTH and self.can_run(work), len(self._waiting)
        marks, turn = self._marks[self._turn], self._turn
        counts, most = tuple(w.count for w in work), max(w.count for w in work)
        self._enter(work, counts)
        self._stands = []  # nobody knows before `result`, also if this fails half-way
        marks.begun.record()
        step = self._shape("step" if most else "plain", len(work), most)
        if most:
            self._propose(work, most)
        marks.proposed.record()
        graph = self._recorded(step, self._step)
        graph.replay()
        kept = None
        if not most and any(w.sequence.drafting for w in work):
            kept = self._kept(step, *graph.outputs)
        marks.ended.record()
        sequences = tuple(w.sequence for w in work)
        self._waiting.append(Started(turn, marks, sequences, counts, kept))
        self._turn = (turn + 1) % DEPTH

    def result(self) -> list[Cycle]:
        """See `g4spec.core.Runner`."""
        started = self._waiting.popleft()
        marks, sequences = started.marks, started.sequences
        marks.ended.synchronize()
        results = self._state.results(started.turn, len(sequences))
        assert all(seen.turn == started.turn for seen in results), (started.turn, results)
        self._stands = [
            (s.slot, seen.position, seen.anchor) for s, seen in zip(sequences, results, strict=True)
        ]
        seconds = [
            1e-3 * begin.elapsed_time(end)
            for begin, end in ((marks.begun, marks.proposed), (marks.proposed, marks.ended))
        ]
        cycles = [_cycle(*of, *seconds) for of in zip(results, started.counts, strict=True)]
        if started.kept is not None:
            for i, (sequence, cycle) in enumerate(zip(sequences, cycles, strict=True)):
                if sequence.drafting and cycle.error is None:
                    sequence.pending.append(started.kept.rows(i, i + 1, (1,)))
        return cycles

    def drop(self) -> None:
        """Forget cycles that were started and not asked for. A draft's state is already that behind
        them, so this is for sequences that have ended; the cycles of others are to be asked for."""
        self._waiting.clear()
        self._stands = []

    # ---- inside

    def _enter(self, work: Seq[Work], counts: tuple[int, ...]) -> None:
        """Let the device know where sequences begin, as far as it does not know it already."""
        rows = [1 + count for count in counts]
        stands = [
            SequenceState(s.slot, s.position, s.anchor, n)
            for s, n in zip((w.sequence for w in work), rows, strict=True)
        ]
        if self._waiting:  # they begin where the cycle under way will have ended
            slots = [s.slot for s in self._waiting[-1].sequences]
            assert slots == [s.slot for s in stands], (slots, stands)
            known = True
        else:
            known = [s[:3] for s in stands] == self._stands
        if not known:
            self._state.set(stands, self._spare, self._turn)
        elif counts != self._counts:
            self._state.set_rows(rows)
        self._counts = counts
        self._set(work)

    def _set(self, work: Seq[Work]) -> None:
        """Take over the samplers."""
        samplers = [w.chooser.sampler for w in work]
        suppress, choice = samplers[0].suppress, self._choice
        if suppress != choice.suppress:
            torch.cuda.synchronize()
            self._graphs.clear()
            self._choice = Choice(
                choice.columns, self._target.ops.device, suppress=suppress, room=choice.room
            )
        self._choice.set(*samplers)

    def _shape(self, part: str, sequences: int, most: int, drafts: int = 0) -> GraphKey:
        rows = next(size for size in STEPS if size > most)
        return GraphKey(part, bucket(sequences), rows, drafts, self._choice.modes)

    def _propose(self, work: Seq[Work], most: int) -> None:
        """Bring the draft up to date, and start a proposal."""
        draft = self._draft
        assert draft is not None and most <= draft.max_tokens, most
        assert all(s.kept is None for s in self._waiting), "rows under way would be left out"
        if behind := [w.sequence for w in work if w.sequence.pending]:
            flush(draft, behind)
        drafts = min(draft.max_tokens, MAX_DRAFT) if draft.one_pass else most
        # The rows of one sequence's step lie over the proposal's, however many there are.
        shape = self._shape("proposal", len(work), most if len(work) > 1 else MAX_DRAFT, drafts)
        self._recorded(shape, self._proposal).replay()

    def _recorded(
        self, shape: GraphKey, run: Callable[[GraphKey], tuple[torch.Tensor, ...]]
    ) -> graphs.Capture:
        """A part as a graph. It runs twice for real before, from the numbers that the first replay
        finds: the first run packs weights and compiles kernels, and a weight that was read before
        it was packed is read in another way from the second on. The first proposal comes after a
        step, which packs what both read."""
        if shape not in self._graphs:
            kept = [self._state.values, *(self._draft.state if self._draft else ())]
            before = [x.clone() for x in kept]
            step = () if self._graphs else (replace(shape, part="plain", rows=1),)
            for once in (*step, shape, shape):
                (run if once is shape else self._step)(once)
                for x, old in zip(kept, before, strict=True):
                    x.copy_(old)
            self._graphs[shape] = graphs.Capture(lambda: run(shape), self._pool)
        return self._graphs[shape]

    def _proposal(self, shape: GraphKey) -> tuple[()]:
        """The first half: what the step reads."""
        state, draft, n, rows = self._state, self._draft, shape.sequences, shape.rows
        assert draft is not None
        state.place(n, rows, draft.rows, draft.mask)
        batch, ids = state.draft(n, draft.rows), state.step(n, rows).ids
        pick = Picks(self._choice, batch.positions, ids[1:], state.unfit[: len(batch)], n)
        drafted = draft.propose(batch, shape.drafts, pick)
        if n > 1 or drafted.data_ptr() != ids[1:].data_ptr():  # else one call of `pick` wrote there
            count = min(shape.drafts, rows - 1)
            ids.view(n, rows)[:, 1 : 1 + count].copy_(drafted[:, :count])
        return ()

    def _step(self, shape: GraphKey) -> tuple[torch.Tensor, ...]:
        """The second half: a step, and what follows from it. Returns what a draft is given of it,
        if it takes no part."""
        state, target, n, rows = self._state, self._target, shape.sequences, shape.rows
        plain = shape.part == "plain"
        if plain:
            state.place(n, rows)
        batch = state.step(n, rows)
        read, logits = target.step(batch, capped=False)
        self._choice(
            logits.contiguous(),
            batch.positions,
            into=state.chosen(n, rows),
            cap=target.config.softcap,
            sequences=n,
        )
        state.accept(n, rows, drafted=not plain, forced=self._forced)
        if plain:
            return read.hidden, read.taps
        assert self._draft is not None
        self._draft.commit(read, state.accepted(n))
        return ()

    def _kept(self, shape: GraphKey, hidden: torch.Tensor, taps: torch.Tensor) -> StepRows:
        """Copies of the rows of a plain step, before the next one writes there."""
        ids, positions, slots = self._state.rows(shape.sequences, shape.rows).clone()
        batch = Batch(ids, positions, slots, (shape.rows,) * shape.sequences)
        return StepRows(batch, hidden.clone(), taps.clone())


def bucket(sequences: int) -> int:
    """Sequences of the graph that takes so many: the next power of two."""
    return 1 << (sequences - 1).bit_length()


def _cycle(seen: CycleResult, count: int, draft_seconds: float, step_seconds: float) -> Cycle:
    """Return the result of a cycle of `count` drafted tokens for a sequence."""
    used, drafted = 1 + seen.accepted, seen.ids[1 : 1 + count]
    failed = bool(seen.unfit & ((1 << count) - 1))
    cycle = Cycle([], [], drafted, 0, draft_seconds, step_seconds)
    cycle.draft_failed = str(NotFinite.of_logits()) if failed else None
    if seen.bad & ((1 << used) - 1):
        cycle.error = NotFinite.of_logits()
    else:
        cycle.tokens, cycle.logits = seen.chosen[:used], seen.logits[:used]
        cycle.accepted = seen.accepted
    return cycle
