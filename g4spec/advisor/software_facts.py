"""Facts on versions of software: attention backends, Gemma 4 in vLLM, published builds, CUDA."""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.advisor.schema import Fact, Maybe, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFact(Fact):
    """One attention backend of one engine in a range of versions.

    Attributes:
        cc: range of compute capabilities. `heads`: supported sizes among 128, 256, 512.
        noncausal, sliding: support for such layers. `kv`: cache types.
        kv_min: lowest capability of a cache type, as `fp8>=8.9`.
        head_why, noncausal_why: reasons for no support. `fix`: what to do then.
        smem: shared memory in bytes that head size 512 needs, or 0.
    """

    engine: str
    versions: Range = ""
    name: str
    cc: Range = ""
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
    """Gemma 4 support in a range of vLLM versions (a row of the upgrade table)."""

    engine: str
    versions: Range
    target_triton: str
    target_hopper: str
    dflash: Maybe
    dflash_mixed: Maybe
    mtp: Maybe
    dspark: Maybe
    dflash2: Maybe
    draft_kv_key: bool
    draft_backend_key: bool
    transformers: Range
    dflash_backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFact(Fact):
    """The architectures that a published build has machine code (`sass`) or PTX for."""

    package: str
    versions: Range
    sass: tuple[str, ...]
    ptx: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolkitFact(Fact):
    """A rule about CUDA and drivers. `driver`: the oldest that works with `cuda`."""

    cuda: str = ""
    driver: Range = ""
    cc: Range = ""
    fix: str = ""
