"""The schema of the facts: one class per kind of row, one field per TOML key.

A row is a table in `data/*.toml`: `[[card]]` becomes a `CardFact`, and so on. Every row has a
`source` (ids of `sources.toml`, or links) and the `date` when it was true.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

Mark = Literal["good", "warn", "bad", "note"]
Maybe = Literal["yes", "no", "condition", "unknown"]
Range = Annotated[str, "a range"]
"""Versions or numbers, as `versions.holds` takes them; `facts.make` checks the form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions under which a row applies. An omitted condition always holds; a condition on a
    value that is unknown for a machine does not hold. `conditions.Situation` has the values, by the
    same names; the type of a condition says how they are compared.

    Attributes:
        versions, transformers, driver, torch: version ranges; `versions` is the engine's.
        cc: range of compute capability of the weakest card; `gpus` of cards on one node.
        memory: range of GiB per card. `context`: range of tokens.
        model: sizes (`31b`). `quant`: parts of weight formats. `draft`: kinds; `drafts`: ids.
        layout: formats of drafts' configurations, as in `DraftModel`.
        kv: cache types. `backend`: attention backend that the user forced on the target.
        cards: ids of cards. `mixed`: cards of several capabilities.
        experts_in_ram: llama.cpp's -ncmoe is given.
        env: environment variables of which one is set.
    """

    engine: tuple[str, ...] = ()  # first, because most facts are about one engine
    versions: Range = ""
    cc: Range = ""
    gpus: Range = ""
    nodes: Range = ""
    memory: Range = ""
    model: tuple[str, ...] = ()
    draft: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()
    transformers: Range = ""
    driver: Range = ""
    torch: Range = ""
    context: Range = ""
    unified: bool | None = None
    wsl: bool | None = None
    mixed: bool | None = None
    nvlink: bool | None = None
    moe: bool | None = None
    experts_in_ram: bool | None = None
    quant: tuple[str, ...] = ()
    backend: tuple[str, ...] = ()
    env: tuple[str, ...] = ()

    def stated(self) -> Iterator[tuple[str, str | bool | tuple[str, ...]]]:
        """Yield name and value of each condition that is not omitted."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value not in ("", (), None):
                yield name, value

    def texts(self) -> Iterator[str]:
        """Yield a description of each condition that is not omitted."""
        for name, value in self.stated():
            if isinstance(value, bool):
                yield name if value else f"not {name}"
            else:
                yield f"{name} {' or '.join(value) if isinstance(value, tuple) else value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Base class of all rows.

    Attributes:
        source: ids of `sources.toml`, or links. `date`: ISO date, or year and month.
        says: the statement. `sure`: a caveat, or "".
    """

    id: str
    source: tuple[str, ...]
    date: str
    says: str = ""
    sure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFact(Fact):
    """A document that rows cite by `id`."""

    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteFact(Fact):
    """A statement without conditions; shown by `--why` and in the docs."""

    topic: str
    fix: str = ""
    versions: Range = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFact(Fact):
    """One NVIDIA card.

    Attributes:
        memory: its memory sizes in GB. `bandwidth`: GB/s, one per size or one for all.
        visible: memory in GiB that programs see, where it differs from `memory`; else 0.
        ceiling_31b, ceiling_26b: published bandwidth-limited tokens/s of the 31B and the 26B in
            Q4_K_M, one per bandwidth.
    """

    name: str
    aliases: tuple[str, ...] = ()
    cc: Range
    memory: tuple[int, ...]
    bandwidth: tuple[float, ...]
    unified: bool = False
    visible: float = 0.0
    nvlink: str = ""
    ceiling_31b: tuple[float, ...] = ()
    ceiling_26b: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherGpuFact(Fact):
    """A kind of machine whose GPU is not a supported NVIDIA card.

    Attributes:
        pattern: regular expression searched for in a lower-case name.
        vendor: PCI vendor id of its display controllers, as 0x1002, or "".
        fix: what to do on it. `says`: what runs on it.
    """

    name: str
    pattern: str
    vendor: str = ""
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityFact(Fact):
    """Limits of a compute capability. `smem_block`, `smem_sm`: shared memory in KiB."""

    cc: tuple[str, ...]
    generation: str
    smem_block: int
    smem_sm: int
    warps: int
    fp16: bool
    bf16: bool
    int8: bool
    fp8: bool
    fp4: bool
    mma: str
    copy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportFact(Fact):
    """The features that engines support on a compute capability."""

    cc: tuple[str, ...]
    vllm: Maybe
    sglang: Maybe
    llamacpp: Maybe
    vllm_why: str
    sglang_why: str
    llamacpp_why: str
    kv: tuple[str, ...]
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFact(Fact):
    """One Gemma 4 size.

    Attributes:
        params: parameters in billions. `active`: those that one token reads.
        sliding, full: number of layers of each kind; `own_*`: those with a cache of their own.
        kv_sliding, kv_full: KV heads of each kind of layer.
        double_wide: True if layers without a cache of their own have twice the feed-forward width.
    """

    name: str
    aliases: tuple[str, ...]
    hub: str
    params: float
    active: float
    hidden: int
    ff: int
    heads: int
    sliding: int
    full: int
    own_sliding: int
    own_full: int
    kv_sliding: int
    kv_full: int
    window: int
    context: int
    moe: bool = False
    double_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFact(Fact):
    """The size of one Gemma 4 model in one weight format. `gb`: 10^9 bytes.

    Attributes:
        engines: engines that load it. `exact`: True if `gb` is the size of a published file.
        hub: hub id of a checkpoint. `gguf`: hub id of a GGUF file, as `org/name:TYPE`.
        names: parts of a hub id or file name that identify it.
        rank: order among the formats of one size, best quality first.
    """

    model: str
    format: str
    gb: float
    engines: tuple[str, ...]
    hub: str = ""
    gguf: str = ""
    names: tuple[str, ...] = ()
    exact: bool = False
    rank: int = 50
    cc: Range = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFact(Fact):
    """One published draft, or a kind of draft for one size.

    Attributes:
        kind: mtp, dflash, dspark, dflash2, eagle3. `maker`: the publisher whose layout it has.
        block: rows of a block, anchor included; 0 for chains.
        vllm_n: `num_speculative_tokens`; sglang_n: `--speculative-num-draft-tokens`;
            llamacpp_n: `--spec-draft-n-max`; 0 where the engine cannot run it.
        gb: weights as vLLM loads them; `gguf_gb` as a Q8_0 file, 0 when there is none.
        kv_token: bytes per token of its own 16-bit cache; `kv_fixed`: bytes independent of the
            context. `head`: head size. `causal`: True if all layers are causal.
        accepted: lowest and highest published tokens per step, bonus included.
    """

    name: str
    aliases: tuple[str, ...] = ()
    hub: str
    model: str
    kind: str
    maker: str
    block: int = 0
    vllm_n: int = 0
    sglang_n: int = 0
    llamacpp_n: int = 0
    gb: float
    gguf_gb: float = 0.0
    kv_token: int = 0
    kv_fixed: int = 0
    head: int
    causal: bool
    sliding: bool = False
    accepted: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFact(Fact):
    """A known problem, condition or advice, matched to a machine and its versions by `when`.

    Attributes:
        mark: bad: the run cannot work; warn: it works badly, or under a condition; note: advice.
        unknown: True if nothing is published about whether it works.
        fix: complete instructions. `cured`: ids of recipe flags that apply the fix; a recipe
            with one of them does not list the problem as a condition.
    """

    title: str
    mark: Mark
    unknown: bool = False
    fix: str = ""
    cured: tuple[str, ...] = ()
    when: Conditions = Conditions()
    rank: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFact(Fact):
    """An error message that appears in logs.

    Attributes:
        key: a lower-case substring of every match; searched for first.
        pattern: regular expression, matched against one line.
        sample: a line of a real log. `harmless`: True if no action is needed.
        versions: versions in which it was seen, as prose.
    """

    key: str
    pattern: str
    cause: str
    fix: str
    versions: str
    sample: str
    harmless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFact(Fact):
    """An inference engine.

    Attributes:
        newest: newest version that the facts cover; assumed where none is installed.
        drafts: kinds of drafts that it runs with Gemma 4.
        kv: cache types to compare. `kv_all`: all cache types it supports.
    """

    name: str
    title: str
    newest: str
    drafts: tuple[str, ...]
    kv: tuple[str, ...]
    kv_all: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagFact(Fact):
    """One part of a recipe.

    Attributes:
        part: arg (argument), env (variable), spec (key of vLLM's speculative config), prepare or
            bench (a command before or after), image (container image), note.
        text: the text, with placeholders {model}, {draft}, {n}, {ctx}, {tp}, {nodes}, {kv}, ...
        order: position in the command, lowest first.
        holds: versions of the engine that it was read or reported for, as a range: from the first
            one to the newest that the facts know, if it has no end. "any": it does not depend on
            the engine; "unknown": no source says. Left out if `when` has a range, outside of which
            the flag is not needed.
    """

    engine: str
    part: Literal["arg", "env", "spec", "prepare", "note", "bench", "image"]
    text: str
    reason: str
    order: int = 50
    when: Conditions = Conditions()
    holds: str = ""

    @property
    def versions(self) -> str:
        """The versions of the engine that it holds for: a range, "any" or "unknown"."""
        return self.when.versions or self.holds
