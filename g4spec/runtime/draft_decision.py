"""The scheduler's decision for one request in one cycle, and the reason, for display."""

from __future__ import annotations

from dataclasses import dataclass

REASONS = {
    "off": "nothing is drafted for this text",
    "asked": "the request asks for this number",
    "room": "nothing can be drafted: the text is about to end, or its draft has failed",
    "unmeasured": "nobody knows yet what a draft costs",
    "pays": "most expected tokens per second",
    "plain": "drafting is expected to cost more than it brings",
    "others": "the drafts of other texts bring more",
    "saving": "the best length could lose more time than has been won so far",
    "probe": "the draft is tried again after steps without it",
}
"""Reasons for a draft length."""


@dataclass(frozen=True, slots=True)
class DraftDecision:
    """The decision for one request in one cycle.

    Attributes:
        step: number of the cycle, counted by the scheduler.
        length: number of tokens to draft.
        why: a key of REASONS.
        expected: number of tokens that the policy expected from the cycle, including the target's
            own; None if the policy did not choose the length.
        texts, rows: number of requests and rows of the whole step; the rows of a request are its
            anchor and its draft.
        seconds: predicted time of the cycle. plain_seconds: predicted time of a step of the same
            requests without drafts. Both come from measured cycles (`cycle_costs.py`); None before.
    """

    step: int
    length: int
    why: str
    expected: float | None
    texts: int
    rows: int
    seconds: float | None
    plain_seconds: float | None
