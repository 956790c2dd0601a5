"""The draft lengths that a benchmark measures.

This module does not import torch, so that a wrong option is reported at once.
"""

from __future__ import annotations

import re

from g4spec.core import MAX_DRAFT
from g4spec.errors import UsageError
from g4spec.measure.bench_summary import DraftLength

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 15)
"""Draft lengths of a sweep, in addition to `auto`."""


def parse_lengths(text: str, most: int | None) -> tuple[DraftLength, ...]:
    """Parse draft lengths: "sweep", "auto", "4" or "2,4,auto"; put plain decoding (0) first.

    Args:
        most: maximum draft length; None without a draft, which leaves only plain decoding.

    Raises UsageError for anything else, and for numbers above MAX_DRAFT.
    """
    chosen: list[DraftLength] = [0]
    for word in ("sweep",) if text == "sweep" else text.split(","):
        if word.strip() == "sweep":
            chosen += [*LENGTHS, "auto"]
        elif word.strip() == "auto":
            chosen.append("auto")
        elif re.fullmatch(r"\s*\d{1,3}\s*", word) and int(word) <= MAX_DRAFT:
            chosen.append(int(word))
        else:
            raise UsageError(
                "`lengths`",
                expected=f"sweep, auto, a number from 0 to {MAX_DRAFT}, or several of them with "
                "commas such as 2,5,auto",
                found=f"{word!r:.40}",
            )
    if most is None:
        return (0,)
    numbers = sorted({min(n, most) for n in chosen if n != "auto"})
    return (*numbers, "auto") if "auto" in chosen else tuple(numbers)
