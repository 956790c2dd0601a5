"""The eager runner: chooses tokens on the host, for any work on any device."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from g4spec.core import Cycle, Draft, StepRows, Work
from g4spec.errors import InputError
from g4spec.ops.sampling import NotFinite
from g4spec.runtime.batches import Part, batch_of
from g4spec.runtime.target import Target

Step = Callable[[Seq[Part]], tuple[StepRows, torch.Tensor]]
"""Computes rows of sequences; the batch that it returns may have more, as padding."""


@dataclass(slots=True)
class Proposal:
    """The drafted tokens of one sequence.

    Attributes:
        failed: why the draft cannot be used, or None.
    """

    tokens: list[int] = field(default_factory=list)
    failed: str | None = None

    @classmethod
    def of(cls, ids: list[int], failed: str | None) -> Proposal:
        """Return the usable part of the drafted `ids`: those before the first -1."""
        if failed:
            return cls([], failed)
        return cls(ids[: ids.index(-1)] if -1 in ids else ids)

    def extended(self, count: int) -> Proposal:
        """Return a proposal of `count` tokens, whatever the added ones are."""
        return Proposal(self.tokens + [0] * (count - len(self.tokens)), self.failed)


Propose = Callable[[Seq[Work]], Seq[Proposal] | None]
"""Drafts tokens for each sequence, or returns None if it cannot for such work."""


class EagerRunner:
    """Runs a cycle when it is started (`g4spec.core.Runner`).

    Args:
        step: computes the rows and logits of a step; by default `Target.step`.
        propose: drafts tokens where it can; by default, and elsewhere, the draft runs op by op.
    """

    depth = 1

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        step: Step | None = None,
        propose: Propose | None = None,
    ) -> None:
        self._target, self._draft = target, draft
        self._step = step or (lambda parts: target.step(batch_of(target.ops, parts)))
        self._propose = propose or (lambda work: None)
        self._done: list[Cycle] = []

    def can_run(self, work: Seq[Work]) -> bool:
        """Return True: it accepts any work."""
        return True

    def drop(self) -> None:
        """Do nothing: nothing runs between `start` and `result`."""

    def start(self, work: Seq[Work]) -> None:
        """Propose, step and accept; keep the rows for the draft's next update."""
        started = time.perf_counter()
        proposals = [
            p.extended(w.count) if w.whole else p
            for w, p in zip(work, self._proposals(work), strict=True)
        ]
        proposed = time.perf_counter()
        rows, logits = self._step(
            [
                (w.sequence.slot, w.sequence.position, [w.sequence.anchor, *p.tokens])
                for w, p in zip(work, proposals, strict=True)
            ]
        )
        self._done = []
        for w, p, first in zip(work, proposals, rows.batch.starts, strict=False):
            cycle = _chosen(w, p, logits[first : first + 1 + len(p.tokens)])
            if w.sequence.drafting and cycle.tokens:
                own = slice(first, first + len(cycle.tokens))
                w.sequence.pending += self._target.pending.put(rows.hidden[own], rows.taps[own])
            self._done.append(cycle)
        ended = time.perf_counter()
        for cycle in self._done:
            cycle.draft_seconds, cycle.step_seconds = proposed - started, ended - proposed

    def result(self) -> list[Cycle]:
        """Return the result of the cycle that was started last."""
        done, self._done = self._done, []
        return done

    def _proposals(self, work: Seq[Work]) -> Seq[Proposal]:
        """Draft tokens for each sequence; none where the requested count is 0."""
        if not any(w.count for w in work):
            return [Proposal() for _ in work]
        return self._propose(work) or self._op_by_op(work)

    def _op_by_op(self, work: Seq[Work]) -> Seq[Proposal]:
        """Draft tokens with a token at a time chosen on the host."""
        picks = [_Picks(w) for w in work]
        drafting = [p for p in picks if p.work.count]
        draft, ops = self._draft, self._target.ops
        assert draft is not None
        self._target.pending.flush(draft, [p.work.sequence for p in drafting])
        batch = batch_of(
            ops,
            [
                (s.slot, s.position, [s.anchor, *[draft.mask] * (draft.rows - 1)])
                for s in (p.work.sequence for p in drafting)
            ],
        )

        def pick(logits: torch.Tensor, at: int) -> torch.Tensor:
            each = logits.view(len(drafting), -1, logits.shape[-1])
            ids = [
                p.pick(row, at + i)
                for p, rows in zip(drafting, each, strict=True)
                for i, row in enumerate(rows)
            ]
            return ops.ids(ids)

        drafted = iter(draft.propose(batch, max(p.work.count for p in drafting), pick).tolist())
        return [
            Proposal.of(next(drafted)[: p.length], p.failed) if p.work.count else Proposal()
            for p in picks
        ]


class _Picks:
    """Chooses the drafted tokens of one sequence.

    Attributes:
        length: number of tokens to draft: less than asked for once all tokens of a draft that
            scores only some are banned.
        failed: why the draft cannot be used, or None.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.length = work, work.count
        self.failed: str | None = None

    def pick(self, logits: torch.Tensor, i: int) -> int:
        """Choose drafted token i from logits [V]; return 0 if it will not be used."""
        if i >= self.length or self.failed:
            return 0
        try:
            return self.work.chooser.pick(logits, self.work.sequence.position + 1 + i)
        except NotFinite as error:
            if bool(torch.isfinite(logits.max())):
                self.length = i
            else:
                self.failed = str(error)
            return 0


def _chosen(work: Work, proposal: Proposal, logits: torch.Tensor) -> Cycle:
    """Choose the target's tokens over the drafted ones."""
    try:
        cycle = work.chooser.choose(logits, proposal.tokens, work.sequence.position + 1)
    except InputError as error:  # logits that are not finite, or a mask that allows nothing
        cycle = Cycle([], [], proposal.tokens, error=error)
    cycle.draft_failed = proposal.failed
    return cycle
