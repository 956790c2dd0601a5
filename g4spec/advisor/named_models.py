"""What stands behind -m and -md: a file, a folder, a hub id or a short name.

Files and folders are measured (`files`). For names the facts know sizes and shapes, so that a
question can be asked before anything is downloaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from g4spec.advisor import runtime_support
from g4spec.advisor.facts import Facts
from g4spec.advisor.schema import DraftFact, SizeFact, WeightsFact
from g4spec.core import CacheShape

HEAD_SLIDING, HEAD_FULL = 256, 512
"""Head sizes of every Gemma 4 target."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One weight format of a target. `nbytes`: of the weights; `fact`: the row it is from; `own`:
    bytes that our runtime takes of a GPU for them, or 0: as many."""

    format: str
    nbytes: int
    engines: tuple[str, ...]
    hub: str = ""
    fact: str = ""
    cc: str = ""
    own: int = 0


@dataclass(frozen=True, slots=True)
class TargetModel:
    """A Gemma 4 target.

    Attributes:
        given: as typed; empty for a size that doctor goes through by itself.
        formats: weight formats to choose from, best first; one if a file or format was named.
        caches: shape of every layer that keeps keys and values. `context`: trained tokens.
        active: share of the weights that is read for one token.
        notes: what is odd about the files.
        refusal: why g4spec's own runtime cannot run the file, or empty.
        gguf_hub: `org/name:TYPE` of a GGUF repository on the hub, as llama.cpp's -hf takes it.
    """

    title: str
    size: str
    given: str
    formats: tuple[WeightFormat, ...]
    caches: tuple[CacheShape, ...]
    context: int
    hub: str
    active: float = 1.0
    moe: bool = False
    is_gguf: bool = False
    is_local: bool = False
    notes: tuple[str, ...] = ()
    refusal: str = ""
    gguf_hub: str = ""


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
        refusal: why g4spec's own runtime cannot run the file, or empty.
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
    refusal: str = ""

    def own_cache(self, context: int) -> int:
        """Bytes of its own keys and values at `context` tokens, in 16 bits."""
        return self.kv_token * context + self.kv_fixed


def caches_of(size: SizeFact) -> tuple[CacheShape, ...]:
    """Cache shapes of a size from its row."""
    sliding = CacheShape(size.kv_sliding, HEAD_SLIDING, size.window)
    full = CacheShape(size.kv_full, HEAD_FULL, None)
    return (sliding,) * size.own_sliding + (full,) * size.own_full


def formats_of(facts: Facts, size: SizeFact) -> tuple[WeightFormat, ...]:
    """Every weight format known for a size, best quality first."""
    found = [w for w in facts.all(WeightsFact) if w.model == size.id and w.rank < 90]
    found.sort(key=lambda w: (w.rank, -w.gb))
    return tuple(
        WeightFormat(
            w.format,
            int(w.gb * 1e9),
            w.engines,
            w.hub,
            w.id,
            w.cc,
            runtime_support.gpu_bytes(w.format, int(w.gb * 1e9)),
        )
        for w in found
    )


def named_target(facts: Facts, size: SizeFact, given: str = "") -> TargetModel:
    """A size from the facts with all its formats."""
    return TargetModel(
        title=f"Gemma 4 {size.name}",
        size=size.id,
        given=given,
        formats=formats_of(facts, size),
        caches=caches_of(size),
        context=size.context,
        hub=size.hub,
        active=size.active / size.params,
        moe=size.moe,
    )


def find_size(facts: Facts, text: str) -> SizeFact | None:
    """The size that a name speaks of: `31b`, `gemma-4-26B-A4B-it`, `E4B`."""
    low = text.lower()
    for size in facts.all(SizeFact):
        if low == size.id or low in size.aliases:
            return size
    for size in facts.all(SizeFact):
        if re.search(rf"(?<![a-z0-9]){re.escape(size.id)}(?![a-z0-9])", low.replace("_", "-")):
            return size
    return None


def from_row(row: DraftFact, given: str) -> DraftModel:
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
