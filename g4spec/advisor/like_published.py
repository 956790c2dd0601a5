"""Finds the published size and draft like a local model; they have what its files lack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from g4spec.advisor.facts import Facts
from g4spec.advisor.named_models import DraftModel, TargetModel
from g4spec.advisor.schema import DraftFact, SizeFact
from g4spec.models import pairing

SHORT = 2
"""Bytes per 16-bit cache value."""
EAGLE3_LENGTH = 5
"""Tokens that RedHat recommends to draft with EAGLE-3; a chain has no maximum of its own."""


def size_like(facts: Facts, hidden: int, layers: int) -> SizeFact | None:
    """Return the published size with these dimensions, or None."""
    return next(
        (s for s in facts.all(SizeFact) if s.hidden == hidden and s.sliding + s.full == layers),
        None,
    )


def published_draft(facts: Facts, kind: str, maker: str, size: str) -> DraftFact | None:
    """Return a maker's published draft of a kind for a size, or None."""
    rows = [d for d in facts.all(DraftFact) if d.kind == kind and d.model == size]
    return next((d for d in rows if d.maker == maker), None)


def check_sizes(
    facts: Facts, path: Path, sizes: tuple[Any, Any], of: TargetModel, *, trained: bool = False
) -> None:
    """Raise InputError if a draft was made for a target of another size than `of`. A target of no
    published size is not compared. Arguments: see `pairing.check_sizes`."""
    size = facts.find(SizeFact, of.size)
    if size is not None:
        pairing.check_sizes(path, sizes, size.sliding + size.full, size.hidden, trained=trained)


def new_draft(path: Path, given: str, of: TargetModel, nbytes: int, gguf: bool) -> DraftModel:
    """Return a draft of `nbytes` bytes with nothing known but its files."""
    return DraftModel(
        title=path.name,
        kind="",
        given=given,
        hub="",
        ids=(),
        model=of.size,
        nbytes=nbytes,
        gguf_bytes=nbytes if gguf else 0,
        is_gguf=gguf,
        is_local=True,
    )


def with_row(made: DraftModel, row: DraftFact | None) -> DraftModel:
    """Fill in what the file does not say from the row of the similar published draft."""
    if row is None:
        return made
    return replace(
        made,
        ids=(row.id,),
        hub=row.hub,
        accepted=row.accepted,
        maker=row.maker,
        title=f"{made.title} (like {row.name})",
        vllm_n=made.vllm_n or row.vllm_n,
        sglang_n=made.sglang_n or row.sglang_n,
        llamacpp_n=made.llamacpp_n or row.llamacpp_n,
        head=made.head or row.head,
    )
