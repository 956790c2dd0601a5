"""What a fact looks like: one class a kind of row, one field a TOML key.

A row is a line of data in `data/*.toml`: `[[card]]` makes a :class:`Card`, and so on. Every row
says where it comes from (`source`: keys of `sources.toml` or links) and when that was true
(`date`). `ref` names the rows of the collection of facts it was made from, so that a test can show
that none was lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mark = Literal["good", "warn", "bad", "note"]
Maybe = Literal["yes", "no", "condition", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Where a row applies. A condition that is not given holds everywhere; one about something
    that is not known of a machine does not hold.

    Attributes:
        versions, transformers, driver, torch, nvcc: version ranges; `versions` is the engine's.
        cc: range of compute capability of the weakest card; `gpus` of cards on one node.
        memory: range of GiB per card. `context`: range of tokens. `streams`: concurrent requests.
        cards: ids of cards. `mixed`: cards of several capabilities.
        model: sizes (`31b`). `quant`: parts of weight formats. `draft`: kinds; `drafts`: ids.
        kv: cache types. `backend`: attention backend that the user forced on the target.
        env: environment variables of which one is set.
        tools: engines or packages of which one is installed, with any version.
    """

    engine: tuple[str, ...] = ()
    versions: str = ""
    cc: str = ""
    gpus: str = ""
    nodes: str = ""
    memory: str = ""
    context: str = ""
    streams: str = ""
    driver: str = ""
    torch: str = ""
    transformers: str = ""
    nvcc: str = ""
    unified: bool | None = None
    wsl: bool | None = None
    mixed: bool | None = None
    nvlink: bool | None = None
    moe: bool | None = None
    cards: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    quant: tuple[str, ...] = ()
    draft: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    backend: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What every kind has.

    Attributes:
        source: keys of `sources.toml`, or links. `date`: ISO date, or year and month.
        says: the statement in plain words.
        sure: what weakens the statement, if anything.
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
    """A statement that no rule evaluates; shown by `--why` and in docs."""

    topic: str
    fix: str = ""
    versions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFact(Fact):
    """One product. `memory` lists its sizes in GB; `bandwidth` is GB/s, one for each size or one
    for all; `visible` is GiB that programs see where that differs. `ceiling_*`: published tokens/s
    that bandwidth allows for the 31B and the 26B in Q4_K_M, one for each bandwidth."""

    name: str
    aliases: tuple[str, ...] = ()
    cc: str
    memory: tuple[int, ...]
    bandwidth: tuple[float, ...]
    unified: bool = False
    visible: float = 0.0
    nvlink: str = ""
    ceiling_31b: tuple[float, ...] = ()
    ceiling_26b: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherGpuFact(Fact):
    """A kind of machine whose GPU is not an NVIDIA card that engines here are asked about.

    Attributes:
        pattern: regular expression that is searched in a lower-case name.
        vendor: PCI vendor of its display controllers, as 0x1002, or "".
        fix: what to do there; `says` what runs.
    """

    name: str
    pattern: str
    vendor: str = ""
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityFact(Fact):
    """Limits of one compute capability. Shared memory in KiB."""

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
    """What one engine does on one capability."""

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
    """One Gemma 4 size. Layers counted are those that keep keys and values of their own.

    Attributes:
        params, active: billions; `active` are read for one token.
        sliding, full: layers of each kind in all; `own_*`: with their own cache.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFact(Fact):
    """How many bytes one size takes in one format. `gb` is 10^9 bytes.

    Attributes:
        engines: which engines load it. `exact`: the size of a published file.
        names: parts of a hub id or file name by which it is recognised.
        rank: best quality first among the formats of one size.
    """

    model: str
    format: str
    gb: float
    engines: tuple[str, ...]
    hub: str = ""
    names: tuple[str, ...] = ()
    exact: bool = False
    rank: int = 50
    cc: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFact(Fact):
    """One published draft, or a kind of draft for one size.

    Attributes:
        kind: mtp, dflash, dspark, dflash2, eagle3. `maker`: whose layout it has.
        block: rows of a block, anchor included; 0 for chains.
        vllm_n: `num_speculative_tokens`; sglang_n: `--speculative-num-draft-tokens`;
            llamacpp_n: `--spec-draft-n-max`; 0 where the engine cannot run it.
        gb: weights as vLLM loads them; `gguf_gb` as a Q8_0 file, 0 when there is none.
        kv_token: bytes a token of its own cache in 16 bits; `kv_fixed`: bytes independent of the
            context. `head`: head size. `causal`: whether all layers are causal.
        accepted: published tokens a step, bonus included: lowest and highest.
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
class BackendFact(Fact):
    """One attention backend of one engine in a range of versions.

    Attributes:
        cc: range of capabilities. `heads`: head sizes among 128, 256, 512 that it takes.
        noncausal, sliding: whether it takes such layers. `kv`: cache types.
        kv_min: cache type -> lowest capability, as `fp8>=8.9`.
        head_why, noncausal_why: the reason where the answer is no. `fix`: what to do then.
    """

    engine: str
    versions: str = ""
    name: str
    cc: str = ""
    heads: tuple[int, ...]
    noncausal: Maybe
    sliding: Maybe
    kv: tuple[str, ...] = ()
    kv_min: tuple[str, ...] = ()
    head_why: str = ""
    noncausal_why: str = ""
    fix: str = ""
    smem: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFact(Fact):
    """What a range of vLLM versions does with Gemma 4 (the upgrade table)."""

    engine: str
    versions: str
    target_triton: str
    target_hopper: str
    dflash: Maybe
    dflash_mixed: Maybe
    mtp: Maybe
    dspark: Maybe
    dflash2: Maybe
    draft_kv_key: bool
    draft_backend_key: bool
    transformers: str
    dflash_backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFact(Fact):
    """A known problem, condition or advice, matched to a machine and its versions by `when`.

    Attributes:
        mark: bad = the run cannot work; warn = works with a condition or badly; note = advice.
        unknown: nobody published whether it works at all.
        fix: what to do, complete. `cured`: recipe flags that do it, so that a recipe which has
            one of them need not say it again.
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
    """A text that appears in logs.

    Attributes:
        key: a literal piece in lower case that every match contains; searched first.
        pattern: regular expression, matched against one line.
        sample: a line as it appears in a log. `harmless`: nothing needs to be done.
        versions: where it was seen, in words.
    """

    key: str
    pattern: str
    cause: str
    fix: str
    versions: str
    sample: str
    harmless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFact(Fact):
    """Which architectures a published build holds machine code (`sass`) or PTX for."""

    package: str
    versions: str
    sass: tuple[str, ...]
    ptx: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolkitFact(Fact):
    """A rule about CUDA and drivers: `driver` is the oldest that works with `cuda`."""

    cuda: str = ""
    driver: str = ""
    cc: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFact(Fact):
    """An engine that people run Gemma 4 with. `newest`: the newest version that the facts know,
    taken where none is installed. `drafts`: kinds it is known to run with Gemma 4. `kv`: cache
    types worth comparing; `kv_all`: every type it knows."""

    name: str
    title: str
    newest: str
    drafts: tuple[str, ...]
    kv: tuple[str, ...]
    kv_all: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagFact(Fact):
    """One piece of a recipe.

    Attributes:
        engine: whose. `part`: arg, env, spec (a key of vLLM's speculative config) or step.
        text: what is typed, with {model}, {draft}, {n}, {ctx}, {tp}, {nodes}, {kv}, ...
        reason: why. `versions` inside `when` says where it holds; `order` sorts.
    """

    engine: str
    part: Literal["arg", "env", "spec", "prepare", "note", "bench", "image"]
    text: str
    reason: str
    order: int = 50
    when: Conditions = Conditions()
