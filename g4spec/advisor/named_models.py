"""Target and draft of a question, and their sizes and shapes as the facts describe them.

Sizes come from the facts for names and hub ids, so that nothing needs to be downloaded, and from
the files themselves for local models (`model_files`).
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
    """One weight format of a target.

    Attributes:
        nbytes: size of the weights in bytes. `own`: their bytes in g4spec's GPU memory; 0 if equal.
        engines: engines that load it. `hub`: hub id of a checkpoint, or "".
        gguf: hub id of a GGUF file, as `org/name:TYPE`, or "".
        fact: id of its row, or "". `cc`: range of compute capabilities that can run it.
    """

    format: str
    nbytes: int
    engines: tuple[str, ...]
    hub: str = ""
    fact: str = ""
    cc: str = ""
    own: int = 0
    gguf: str = ""


@dataclass(frozen=True, slots=True)
class TargetModel:
    """A Gemma 4 target.

    Attributes:
        given: the text after -m; empty for the sizes that doctor surveys.
        formats: candidate weight formats, best first; one if a file or format was named.
        caches: cache shape of every layer that has a cache. `context`: training context.
        active: fraction of the weights that one token reads.
        notes: warnings about the files.
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
    """A draft. Sizes are in bytes; 0 if unknown.

    Attributes:
        kind: mtp, dflash, dspark, dflash2, eagle3. `ids`: ids of the rows that describe it.
        block: rows of a block, anchor included; 0 for chains.
        vllm_n, sglang_n, llamacpp_n: its maximum length as each engine counts; 0 if unknown.
        kv_token: bytes per token of its own 16-bit cache. `kv_fixed`: constant bytes of it.
        head: head size; 0 if unknown. `accepted`: lowest and highest published tokens per step.
        engines: the only engines that compute it correctly; empty if not restricted.
        layout: of its config.json: `speculators`, or `own` for the keys of the model alone; empty
            without one.
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
    layout: str = ""
    notes: tuple[str, ...] = field(default=())
    refusal: str = ""

    def own_cache(self, context: int) -> int:
        """Return the bytes of its own 16-bit cache at `context` tokens."""
        return self.kv_token * context + self.kv_fixed


def caches_of(size: SizeFact) -> tuple[CacheShape, ...]:
    """Return the cache shapes of a size."""
    sliding = CacheShape(size.kv_sliding, HEAD_SLIDING, size.window)
    full = CacheShape(size.kv_full, HEAD_FULL, None)
    return (sliding,) * size.own_sliding + (full,) * size.own_full


def formats_of(facts: Facts, size: SizeFact) -> tuple[WeightFormat, ...]:
    """Return the known weight formats of a size, best quality first."""
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
            w.gguf,
        )
        for w in found
    )


def named_target(facts: Facts, size: SizeFact, given: str = "") -> TargetModel:
    """Return a size of the facts as a target, with all its formats."""
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
    """Find the size that a name contains: `31b`, `gemma-4-26B-A4B-it`, `E4B`; or None."""
    low = text.lower()
    for size in facts.all(SizeFact):
        if low == size.id or low in size.aliases:
            return size
    for size in facts.all(SizeFact):
        if re.search(rf"(?<![a-z0-9]){re.escape(size.id)}(?![a-z0-9])", low.replace("_", "-")):
            return size
    return None


def from_row(row: DraftFact, given: str) -> DraftModel:
    """Return a draft of the facts."""
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
        layout="speculators" if row.maker == "redhat" else "own",
        notes=(row.sure,) if row.sure else (),
    )
