"""What stands behind -m and -md: a file, a folder, a hub id or a short name.

Files and folders are measured (`files`). For names the facts know sizes and shapes, so that a
question can be asked before anything is downloaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from g4spec.advisor.facts import Facts
from g4spec.advisor.schema import Draft, Size, Weights
from g4spec.core import CacheShape
from g4spec.errors import InputError, UsageError

HEAD_SLIDING, HEAD_FULL = 256, 512
"""Head sizes of every Gemma 4 target."""


@dataclass(frozen=True, slots=True)
class Option:
    """One weight format of a target. `nbytes`: of the weights; `fact`: the row it is from."""

    format: str
    nbytes: int
    engines: tuple[str, ...]
    hub: str = ""
    fact: str = ""
    cc: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A Gemma 4 target.

    Attributes:
        given: as typed; empty for a size that doctor goes through by itself.
        options: weight formats to choose from, best first; one if a file or format was named.
        caches: shape of every layer that keeps keys and values. `context`: trained tokens.
        active: share of the weights that is read for one token.
        notes: what is odd about the files.
    """

    title: str
    size: str
    given: str
    options: tuple[Option, ...]
    caches: tuple[CacheShape, ...]
    context: int
    hub: str
    active: float = 1.0
    moe: bool = False
    is_gguf: bool = False
    is_local: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft. Sizes are bytes; 0 means that they are not known.

    Attributes:
        kind: mtp, dflash, dspark, dflash2, eagle3. `ids`: rows that describe it.
        block: rows of a block, anchor included; 0 for chains.
        vllm_n, sglang_n, llamacpp_n: its full length as each engine counts; 0 if unknown.
        kv_token: bytes a token of its own cache in 16 bits, `kv_fixed`: the rest of it.
        head: head size; 0 unknown. `accepted`: published tokens a step, lowest and highest.
        engines: those that run it, where others would compute it wrongly; empty otherwise.
    """

    title: str
    kind: str
    given: str
    hub: str
    ids: tuple[str, ...]
    model: str
    nbytes: int
    gguf_bytes: int
    block: int = 0
    vllm_n: int = 0
    sglang_n: int = 0
    llamacpp_n: int = 0
    kv_token: int = 0
    kv_fixed: int = 0
    head: int = 0
    causal: bool = True
    accepted: tuple[float, ...] = ()
    maker: str = ""
    is_gguf: bool = False
    is_local: bool = False
    engines: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def own_cache(self, context: int) -> int:
        """Bytes of its own keys and values at `context` tokens, in 16 bits."""
        return self.kv_token * context + self.kv_fixed


def caches_of(size: Size) -> tuple[CacheShape, ...]:
    """Cache shapes of a size from its row."""
    sliding = CacheShape(size.kv_sliding, HEAD_SLIDING, size.window)
    full = CacheShape(size.kv_full, HEAD_FULL, None)
    return (sliding,) * size.own_sliding + (full,) * size.own_full


def options_of(facts: Facts, size: Size) -> tuple[Option, ...]:
    """Every weight format known for a size, best quality first."""
    found = [w for w in facts.all(Weights) if w.model == size.id and w.rank < 90]
    found.sort(key=lambda w: (w.rank, -w.gb))
    return tuple(Option(w.format, int(w.gb * 1e9), w.engines, w.hub, w.id, w.cc) for w in found)


def named_target(facts: Facts, size: Size, given: str = "") -> Target:
    """A size from the facts with all its formats."""
    return Target(
        title=f"Gemma 4 {size.name}",
        size=size.id,
        given=given,
        options=options_of(facts, size),
        caches=caches_of(size),
        context=size.context,
        hub=size.hub,
        active=size.active / size.params,
        moe=size.moe,
    )


def find_size(facts: Facts, text: str) -> Size | None:
    """The size that a name speaks of: `31b`, `gemma-4-26B-A4B-it`, `E4B`."""
    low = text.lower()
    for size in facts.all(Size):
        if low == size.id or low in size.aliases:
            return size
    for size in facts.all(Size):
        if re.search(rf"(?<![a-z0-9]){re.escape(size.id)}(?![a-z0-9])", low.replace("_", "-")):
            return size
    return None


def _formats(target: Target, text: str, facts: Facts) -> tuple[Option, ...]:
    """The formats of a size that a name speaks of; all when it names none."""
    low = text.lower().replace("_", "-")
    by_hub = tuple(o for o in target.options if o.hub and o.hub.lower() == text.lower())
    if by_hub:
        return by_hub
    rows = {w.id: w for w in facts.all(Weights)}
    hits: list[tuple[int, Option]] = []
    for option in target.options:
        parts = [n.replace("_", "-") for n in rows[option.fact].names]
        longest = max((len(p) for p in parts if p in low), default=0)
        if longest:
            hits.append((longest, option))
    if hits:
        best = max(n for n, _ in hits)
        return tuple(o for n, o in hits if n == best)
    if "/" in text:  # a checkpoint on the hub whose name says nothing is in BF16
        return tuple(o for o in target.options if o.format == "BF16")
    return target.options


def target(facts: Facts, text: str) -> Target:
    """The target behind -m. UsageError for a name nobody knows."""
    from g4spec.advisor import files

    path = Path(text).expanduser()
    if path.exists():
        return files.target(facts, path, text)
    if text.lower().endswith(".gguf"):
        raise InputError(f"{text}: no such file")
    name, _, wanted = text.partition(":")
    size = find_size(facts, name)
    if size is None:
        sizes = ", ".join(s.id for s in facts.all(Size))
        raise UsageError(
            f"-m {text!r}: not a file, and not a Gemma 4 size",
            found=text,
            expected=f"a GGUF file, a checkpoint folder, a known hub id, or one of {sizes}, "
            "with a format if you like, as 31b:q4_k_m",
        )
    whole = named_target(facts, size, text)
    rest = wanted or (name if name.lower() not in (size.id, *size.aliases) else "")
    options = _formats(whole, rest, facts) if rest else whole.options
    if wanted and len(options) == len(whole.options):
        known = ", ".join(o.format for o in whole.options)
        raise UsageError(
            f"-m {text!r}: no size known for format {wanted!r}", expected=f"one of {known}"
        )
    hub = name if "/" in name else size.hub
    if len(options) == 1 and options[0].hub:
        hub = options[0].hub
    notes = (
        ()
        if rest == "" or len(options) < len(whole.options)
        else (f"the name {name} does not say its weight format; every format is considered",)
    )
    return Target(
        whole.title,
        whole.size,
        text,
        options,
        whole.caches,
        whole.context,
        hub,
        whole.active,
        whole.moe,
        notes=notes,
    )


def from_row(row: Draft, given: str) -> DraftModel:
    """A draft as the facts describe it."""
    return DraftModel(
        title=row.name,
        kind=row.kind,
        given=given,
        hub=row.hub,
        ids=(row.id,),
        model=row.model,
        nbytes=int(row.gb * 1e9),
        gguf_bytes=int(row.gguf_gb * 1e9),
        block=row.block,
        vllm_n=row.vllm_n,
        sglang_n=row.sglang_n,
        llamacpp_n=row.llamacpp_n,
        kv_token=row.kv_token,
        kv_fixed=row.kv_fixed,
        head=row.head,
        causal=row.causal,
        accepted=row.accepted,
        maker=row.maker,
        notes=(row.sure,) if row.sure else (),
    )


def _row_of(facts: Facts, text: str, size: str) -> Draft | None:
    low = text.lower()
    rows = [d for d in facts.all(Draft) if d.model == size]
    for row in rows:
        if low in (row.id, row.hub.lower(), row.hub.lower().split("/")[-1], *row.aliases):
            return row
    return next((r for r in rows if r.hub.lower().split("/")[-1] in low), None)


def draft(facts: Facts, text: str, of: Target) -> DraftModel:
    """The draft behind -md for a target. UsageError for a name nobody knows."""
    from g4spec.advisor import files

    path = Path(text).expanduser()
    if path.exists():
        return files.draft(facts, path, text, of)
    if text.lower().endswith(".gguf"):
        raise InputError(f"{text}: no such file")
    row = _row_of(facts, text, of.size)
    if row is not None:
        return from_row(row, text)
    others = [
        d
        for d in facts.all(Draft)
        if text.lower() in (d.id, d.hub.lower(), d.hub.lower().split("/")[-1], *d.aliases)
    ]
    known = ", ".join(d.id for d in facts.all(Draft) if d.model == of.size)
    whose = of.title if of.size == "other" else f"the {of.size}"
    if others:
        raise UsageError(
            f"-md {text!r} is a draft for the {others[0].model}, not for {whose}",
            expected=f"one of {known}" if known else "a file or a folder",
            found=text,
        )
    raise UsageError(
        f"-md {text!r}: not a file, and not a draft known for {whose}",
        expected=f"a GGUF file, a checkpoint folder, or a known hub id or name: {known or 'none'}",
    )
