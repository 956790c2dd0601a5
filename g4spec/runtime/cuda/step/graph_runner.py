"""Whole cycles on the GPU: proposal, step, choice, acceptance and the draft's commit follow each
other without the host, which may start a cycle before it has read the result of the previous one.

A cycle is two CUDA graphs, one after the other, so that events between them measure the time of
each; without a draft it is one graph. Positions, number of drafted tokens and sampler parameters of
the sequences are in device memory: a graph serves every position, slot, length and seed. It is
recorded for a number of sequences (a power of two) and of rows of each. Sequences that pad a batch
use a spare slot, which nothing else reads. Rows after the valid ones are padding: what they write
to caches is overwritten before it is read, and rings have room for more than one step. The same
holds for rows of rejected tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from g4spec.core import (
    MAX_DRAFT,
    MAX_STEP_ROWS,
    Cycle,
    Draft,
    Sequence,
    Work,
)
from g4spec.ops.sampling import NotFinite
from g4spec.runtime.cuda.build.constants import RowFault
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.choose import Choice, mode_of
from g4spec.runtime.cuda.step.cycle_state import CycleResult, CycleState, SequenceState
from g4spec.runtime.cuda.step.picks import Picks
from g4spec.runtime.cycle_costs import bucket
from g4spec.runtime.eager_runner import Proposal

if TYPE_CHECKING:
    from g4spec.runtime.target import Target

DEPTH = 2
"""Maximum number of cycles that are started and whose results have not been read."""

STEPS = (1, 2, 4, 8, 16)
"""Rows of a sequence in recorded steps."""

SPARE_POSITION = 1
"""Position of sequences that pad a batch. Not 0: some drafts read the position before."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The key under which a CUDA graph is recorded.

    Attributes:
        part: "proposal", "step" (with the draft's commit) or "plain" (a step without a draft).
        sequences, rows: number of sequences of the step, and rows of each.
        drafts: tokens drafted for each sequence; 0 if it makes no difference.
        modes: kernels that choose tokens.
    """

    part: str
    sequences: int
    rows: int
    drafts: int
    modes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Marks:
    """Events at the borders of a cycle's parts."""

    begun: torch.cuda.Event
    proposed: torch.cuda.Event
    ended: torch.cuda.Event

    @classmethod
    def new(cls) -> Marks:
        return cls(*(torch.cuda.Event(enable_timing=True) for _ in range(3)))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Started:
    """A cycle that has been started.

    Attributes:
        turn: entry of the host's ring buffer that gets its result.
        sequences, counts: sequences of its work, and drafted tokens of each.
        kept: numbers of its rows, one of each sequence (`PendingRows`), or none.
    """

    turn: int
    marks: Marks
    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]
    kept: Seq[int]


class GraphRunner:
    """Runs cycles as CUDA graphs (`g4spec.core.Runner`).

    Args:
        draft: the draft, or None: cycles without drafted tokens.
        forced: accept so many drafted tokens, whatever they are (for measurements).
        pool: memory that graphs share; default: their own.
    """

    depth = DEPTH

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        *,
        forced: int | None = None,
        pool: graphs.Pool | None = None,
    ) -> None:
        self._target, self._draft = target, draft
        device, n_slots = target.ops.device, target.space.n_slots
        self._spare = SequenceState(n_slots, SPARE_POSITION, 0, 0)
        room = bucket(n_slots)
        recorded = draft if draft and draft.recordable else None
        if n_slots > 2:  # batches of fewer are never padded
            assert len(target.space.table) > n_slots, "no spare slot in the table"
            states = recorded.state if recorded else ()
            assert all(len(x) > n_slots for x in states), "no spare slot in the draft's state"
        width = recorded.rows if recorded else MAX_STEP_ROWS
        assert width >= MAX_STEP_ROWS, width  # a step's rows share memory with a proposal's
        self._state = CycleState(room, device, width=width, turns=DEPTH)
        self._choice = Choice(target.config.n_vocab, device, room=room)
        self._forced = None if forced is None else torch.tensor([forced], device=device)
        self._pool = pool or graphs.Pool(device)
        self._graphs: dict[GraphKey, graphs.Recording] = {}
        self._marks = [Marks.new() for _ in range(DEPTH)]
        self._waiting: deque[Started] = deque()
        self._turn = 0
        self._states: list[tuple[int, int, int]] = []
        self._counts: tuple[int, ...] = ()

    def can_run(self, work: Seq[Work]) -> bool:
        """Return True unless a choice needs the host or sorts all logits, sequences suppress
        different tokens, or a sequence drafts and the draft cannot be recorded."""
        return not any(w.chooser.on_host for w in work) and self._recordable(work)

    def propose(self, work: Seq[Work]) -> list[Proposal] | None:
        """Draft tokens for work whose tokens the host chooses; None if a choice among the draft's
        logits needs the host as well."""
        if not self._recordable(work):
            return None
        assert not self._waiting, "a cycle is running"
        counts, most = tuple(w.count for w in work), max(w.count for w in work)
        self._enter(work, counts)
        self._states = []  # the host decides how many tokens are accepted
        shape = self._propose(work, most)
        drafted = zip(*self._state.drafted(shape.sequences, shape.rows), counts, strict=False)
        return [_proposal(ids[:n], faults[:n]) for ids, faults, n in drafted]

    def start(self, work: Seq[Work]) -> None:
        """See `g4spec.core.Runner`."""
        assert len(self._waiting) < DEPTH and self.can_run(work), len(self._waiting)
        marks, turn = self._marks[self._turn], self._turn
        counts, most = tuple(w.count for w in work), max(w.count for w in work)
        self._enter(work, counts)
        self._states = []  # unknown until `result`, and if this raises an error
        marks.begun.record()
        step = self._shape("step" if most else "plain", len(work), most)
        if most:
            self._propose(work, most)
        marks.proposed.record()
        graph = self._recorded(step, self._step)
        graph.replay()
        kept: Seq[int] = ()
        if not most and any(w.sequence.drafting for w in work):
            hidden, taps = (x[: len(work)] for x in graph.outputs)
            kept = self._target.pending.put(hidden, taps)
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
        self._states = [
            (s.slot, seen.position, seen.anchor) for s, seen in zip(sequences, results, strict=True)
        ]
        seconds = [
            1e-3 * begin.elapsed_time(end)
            for begin, end in ((marks.begun, marks.proposed), (marks.proposed, marks.ended))
        ]
        cycles = [_cycle(*of, *seconds) for of in zip(results, started.counts, strict=True)]
        for sequence, cycle, row in zip(sequences, cycles, started.kept, strict=False):
            if sequence.drafting and cycle.error is None:
                sequence.pending.append(row)
        return cycles

    def drop(self) -> None:
        """Forget cycles whose results have not been read. The draft's state is already after them,
        so this is for sequences that have ended; read the results of other sequences first."""
        self._waiting.clear()
        self._states = []

    # ---- inside

    def _recordable(self, work: Seq[Work]) -> bool:
        """Return True if tokens are chosen from plain logits by recordable kernels, and the draft
        can be recorded if a sequence drafts."""
        samplers, draft = [w.chooser.sampler for w in work], self._draft
        return (
            len({s.suppress for s in samplers}) == 1
            and all(s.plain and mode_of(s, self._choice.columns) != "sorted" for s in samplers)
            and (not any(w.count for w in work) or (draft is not None and draft.recordable))
        )

    def _enter(self, work: Seq[Work], counts: tuple[int, ...]) -> None:
        """Upload the state of the sequences, unless the device already has it."""
        rows = [1 + count for count in counts]
        states = [
            SequenceState(s.slot, s.position, s.anchor, n)
            for s, n in zip((w.sequence for w in work), rows, strict=True)
        ]
        if self._waiting:  # the running cycle leaves the state
            slots = [s.slot for s in self._waiting[-1].sequences]
            assert slots == [s.slot for s in states], (slots, states)
            known = True
        else:
            known = [s[:3] for s in states] == self._states
        if not known:
            self._state.set(states, self._spare, self._turn)
        elif counts != self._counts:
            self._state.set_rows(rows)
        self._counts = counts
        self._set(work)

    def _set(self, work: Seq[Work]) -> None:
        """Upload the samplers."""
        samplers = [w.chooser.sampler for w in work]
        suppress, choice = samplers[0].suppress, self._choice
        if suppress != choice.suppress:
            torch.cuda.current_stream().synchronize()  # not the GPU: another engine may record
            self._graphs.clear()
            self._choice = Choice(
                choice.columns, self._target.ops.device, suppress=suppress, room=choice.room
            )
        self._choice.set(*samplers)

    def _shape(self, part: str, sequences: int, most: int) -> GraphKey:
        rows = next(size for size in STEPS if size > most)
        return GraphKey(part, bucket(sequences), rows, 0, self._choice.modes)

    def _propose(self, work: Seq[Work], most: int) -> GraphKey:
        """Give the draft its pending rows, and start a proposal; return its shape."""
        draft = self._draft
        assert draft is not None and most <= draft.max_tokens, most
        assert not any(s.kept for s in self._waiting), "a running cycle keeps rows"
        if pending := [w.sequence for w in work if w.sequence.pending]:
            self._target.pending.flush(draft, pending)
        # With one sequence, step and proposal share memory, whatever their rows.
        shape = self._shape("proposal", len(work), most if len(work) > 1 else MAX_DRAFT)
        # Logits of those positions alone for which the step has rows.
        drafts = min(draft.max_tokens, shape.rows - 1) if draft.one_pass else most
        shape = replace(shape, drafts=drafts)
        self._recorded(shape, self._proposal).replay()
        return shape

    def _recorded(
        self, shape: GraphKey, run: Callable[[GraphKey], tuple[torch.Tensor, ...]]
    ) -> graphs.Recording:
        """Return a part as a graph, recorded at first use."""
        if shape not in self._graphs:
            if all(other.part != shape.part for other in self._graphs):
                self._run_before(shape, run)
            self._graphs[shape] = graphs.record(lambda: run(shape), self._pool)
        return self._graphs[shape]

    def _run_before(
        self, shape: GraphKey, run: Callable[[GraphKey], tuple[torch.Tensor, ...]]
    ) -> None:
        """Run a part without a graph, from the state that the first replay will find. The first run
        packs weights, and a weight that was read before it was packed is read by another kernel
        from the second run on. A step runs before the first proposal and packs what both read."""
        kept = [self._state.values, *(self._draft.state if self._draft else ())]
        before = [x.clone() for x in kept]
        step = () if self._graphs else (replace(shape, part="plain", rows=1),)
        for once in (*step, shape, shape):
            (run if once is shape else self._step)(once)
            for x, old in zip(kept, before, strict=True):
                x.copy_(old)

    def _proposal(self, shape: GraphKey) -> tuple[()]:
        """Compute the first half of a cycle: the input tokens of the step."""
        state, draft, n, rows = self._state, self._draft, shape.sequences, shape.rows
        assert draft is not None
        state.place(n, rows, draft.rows, draft.mask)
        batch, ids = state.draft(n, draft.rows), state.step(n, rows).ids
        pick = Picks(self._choice, batch.positions, ids[1:], state.unfit[: len(batch)], n)
        drafted = draft.propose(batch, shape.drafts, pick)
        if n > 1 or drafted.data_ptr() != ids[1:].data_ptr():  # else `pick` wrote there
            count = min(shape.drafts, rows - 1)
            ids.view(n, rows)[:, 1 : 1 + count].copy_(drafted[:, :count])
        return ()

    def _step(self, shape: GraphKey) -> tuple[torch.Tensor, ...]:
        """Compute the second half of a cycle: step, choice, acceptance, commit. Return hidden
        states and taps if the draft takes no part."""
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


def _cycle(seen: CycleResult, count: int, draft_seconds: float, step_seconds: float) -> Cycle:
    """Return the result of a cycle of `count` drafted tokens for a sequence."""
    count, used = min(count, seen.usable), 1 + seen.accepted
    cycle = Cycle([], [], seen.ids[1 : 1 + count], 0, draft_seconds, step_seconds)
    cycle.draft_failed = _draft_failed(bool(seen.unfit & ((1 << count) - 1)))
    if bad := seen.bad & ((1 << used) - 1):
        used, cycle.error = (bad & -bad).bit_length() - 1, NotFinite.of_logits()
    cycle.tokens, cycle.logits = seen.chosen[:used], seen.logits[:used]
    cycle.accepted = max(0, used - 1)
    return cycle


def _proposal(ids: list[int], faults: list[int]) -> Proposal:
    """Return drafted `ids` up to the first for which all tokens with a logit are suppressed."""
    if RowFault.SUPPRESSED in faults:
        ids = ids[: faults.index(RowFault.SUPPRESSED)]
    return Proposal.of(ids, _draft_failed(RowFault.NOT_FINITE in faults[: len(ids)]))


def _draft_failed(unfit: bool) -> str | None:
    """Return why a proposal cannot be used if logits of its tokens are not finite, or None."""
    return str(NotFinite.of_logits()) if unfit else None
