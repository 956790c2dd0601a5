"""A request as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from g4spec.core import Chooser, Sequence
from g4spec.runtime.draft_history import PolicyState
from g4spec.runtime.request import Request


@dataclass(slots=True, eq=False)
class Task:
    """A request with its state: waiting, in prefill, or running.

    Attributes:
        number: order of arrival.
        ids: prompt and generated tokens.
        drafting: whether the draft is kept up to date for it.
        sequence: its slot and pages while it is admitted; None while it waits.
        snapshot_points: block boundaries of the prompt at which to take a snapshot, in order.
    """

    number: int
    request: Request
    ids: list[int]
    chooser: Chooser
    draft_state: PolicyState
    drafting: bool
    submitted: float
    sequence: Sequence | None = None
    snapshot_points: list[int] = field(default_factory=list)

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def tokens_left(self) -> int:
        """Number of tokens that it may still generate."""
        return self.request.options.n_predict - (len(self.ids) - self.n_prompt)

    @property
    def seq(self) -> Sequence:
        """Its sequence; it must be admitted."""
        assert self.sequence is not None
        return self.sequence

    def stop_drafting(self, why: str) -> str:
        """Stop drafting and drop the rows that the draft has not seen. Return the note about it."""
        self.drafting = self.seq.drafting = False
        self.seq.pending.clear()
        note = f"the draft cannot be used, going on without it: {why}"
        if note not in self.request.notes:
            self.request.notes.append(note)
        return note

    @property
    def recomputes(self) -> bool:
        """True if the next tokens to compute were generated before a preemption."""
        return self.in_prefill and self.seq.n_read >= self.n_prompt

    @property
    def in_prefill(self) -> bool:
        """True if tokens before the newest one still have to be computed."""
        return self.seq.n_read < max(self.n_prompt, len(self.ids) - 1)
