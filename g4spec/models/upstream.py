"""What upstream llama.cpp makes of a draft: the same drafts, slightly different ones, or nonsense.

A file that upstream would load and compute otherwise than it was trained gets an architecture name
that upstream does not know, so that it is refused there instead of being slow for no visible reason
(the text is right either way: the target checks every token). Each kind lists its `LIMITS`; they
are checked against llama.cpp commit 0c1e57098.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Case = Literal["same", "differs", "refused"]

ARCHITECTURES = ("dflash", "eagle3", "gemma4-assistant")
"""Of drafts that upstream has code for. It refuses a file of any other."""

REFUSED_SUFFIX = "-g4spec"
"""Ends the architecture name of a file that upstream must not load."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Something drafts may be that upstream does not compute as they were trained.

    Attributes:
        case: "differs" where upstream's drafts are a little worse, "refused" where they would be
            something else.
        what: the property of the draft. `does`: what upstream makes of it.
        applies: whether a configuration of the kind has the property.
    """

    case: Literal["differs", "refused"]
    what: str
    does: str
    applies: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The case of one draft, and each limit that led to it."""

    case: Case
    reasons: tuple[Limit, ...] = ()


UNKNOWN = Limit(
    "refused",
    "an architecture of our own",
    "has no code for it",
    lambda c: c.arch.removesuffix(REFUSED_SUFFIX) not in ARCHITECTURES,
)


def judge(limits: Iterable[Limit], config: Any) -> Verdict:
    """What upstream makes of a draft of this configuration; the worst limit decides."""
    hit = tuple(limit for limit in (*limits, UNKNOWN) if limit.applies(config))
    cases = {limit.case for limit in hit}
    if "refused" in cases:
        return Verdict("refused", hit)
    return Verdict("differs" if hit else "same", hit)


def architecture(arch: str, limits: Iterable[Limit], config: Any) -> str:
    """`arch`, or its name that upstream refuses if upstream would compute something else."""
    refused = judge(limits, config).case == "refused"
    return arch + REFUSED_SUFFIX if refused and arch in ARCHITECTURES else arch
