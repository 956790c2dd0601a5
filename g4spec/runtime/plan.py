"""Record what the scheduler decided for one text in one cycle, and why."""

from __future__ import annotations

from dataclasses import dataclass

WHY = {
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
class Share:
    """The part of one text in one cycle.

    Attributes:
        step: number of the cycle, counted by the scheduler.
        length: tokens that were to be drafted. why: a key of WHY.
        expected: tokens that the policy expected of the cycle, the target's own included, or None
            where it did not choose the length.
        texts, rows: of the whole step; the rows of a text are its newest token and its draft.
        seconds: what the cycle was expected to take. plain_seconds: what a step of the same texts
            takes without any draft. Both come from measured cycles (`costs.py`); None before.
    """

    step: int
    length: int
    why: str
    expected: float | None
    texts: int
    rows: int
    seconds: float | None
    plain_seconds: float | None
