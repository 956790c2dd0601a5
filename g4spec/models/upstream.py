"""How upstream llama.cpp runs a draft: with the same proposals, slightly different ones, or not.

If upstream would load a file but compute it differently from training, the file gets an
architecture name that upstream does not know. Upstream then refuses it instead of running slowly
for no visible reason (the text would be correct: the target verifies every token). Each kind lists
its `LIMITS`, checked against llama.cpp commit 0c1e57098.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Case = Literal["same", "differs", "refused"]

ARCHITECTURES = ("dflash", "eagle3", "gemma4-assistant")
"""Draft architectures that upstream supports; it refuses all others."""

REFUSED_SUFFIX = "-g4spec"
"""Suffix of the architecture name of files that upstream must refuse."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A property of drafts that upstream computes differently from training.

    Attributes:
        case: "differs" if upstream's proposals are slightly worse, "refused" if they would be
            wrong.
        what: the property, a noun phrase. `does`: what upstream does instead, a verb phrase.
        applies: whether a configuration of the kind has the property.
    """

    case: Literal["differs", "refused"]
    what: str
    does: str
    applies: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The case of one draft, and the limits that apply to it."""

    case: Case
    reasons: tuple[Limit, ...] = ()


UNKNOWN = Limit(
    "refused",
    "an architecture that only g4spec has",
    "does not support it",
    lambda c: c.arch.removesuffix(REFUSED_SUFFIX) not in ARCHITECTURES,
)


def judge(limits: Iterable[Limit], config: Any) -> Verdict:
    """Return how upstream runs a draft of this configuration; the worst limit decides."""
    hit = tuple(limit for limit in (*limits, UNKNOWN) if limit.applies(config))
    cases = {limit.case for limit in hit}
    if "refused" in cases:
        return Verdict("refused", hit)
    return Verdict("differs" if hit else "same", hit)


def architecture(arch: str, limits: Iterable[Limit], config: Any) -> str:
    """Return `arch`, with REFUSED_SUFFIX if upstream would compute wrong proposals."""
    refused = judge(limits, config).case == "refused"
    return arch + REFUSED_SUFFIX if refused and arch in ARCHITECTURES else arch
