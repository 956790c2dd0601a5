"""Matches the conditions of facts against a situation."""

from __future__ import annotations

from dataclasses import dataclass, field

from g4spec.advisor.schema import Conditions
from g4spec.advisor.versions import holds, parse


@dataclass(frozen=True, slots=True)
class Situation:
    """The values that conditions are matched against; None where unknown.

    Attributes:
        engine, version: as `vllm`, `0.33.0`.
        cc: compute capability of the weakest card. `gpus`: cards on one node.
        memory: GiB of the smallest card. `quant`: weight format in lower case.
        drafts: ids of the draft's row; `draft` is its kind. `layout`: as `DraftModel.layout`.
        env: names of environment variables that are set.
        versions: package -> version, for transformers, torch and others.
    """

    engine: str | None = None
    version: str | None = None
    cc: tuple[int, ...] | None = None
    gpus: int | None = None
    nodes: int = 1
    memory: float | None = None
    context: int | None = None
    streams: int | None = None
    driver: str | None = None
    unified: bool | None = None
    wsl: bool | None = None
    mixed: bool | None = None
    nvlink: bool | None = None
    moe: bool | None = None
    experts_in_ram: bool | None = None
    cards: tuple[str, ...] = ()
    model: str | None = None
    quant: str | None = None
    draft: str | None = None
    drafts: tuple[str, ...] = ()
    layout: str | None = None
    kv: str | None = None
    backend: str | None = None
    env: frozenset[str] = field(default_factory=frozenset)
    versions: dict[str, str] = field(default_factory=dict)


def _in_range(text: str, value: str | float | int | tuple[int, ...] | None) -> bool:
    if not text:
        return True
    if value is None or value == "":
        return False
    if isinstance(value, float):
        value = f"{value:.2f}"
    return holds(text, value if isinstance(value, tuple) else parse(str(value)))


def _same(wanted: bool | None, found: bool | None) -> bool:
    return wanted is None or wanted is found


def _among(wanted: tuple[str, ...], found: str | None) -> bool:
    return not wanted or found in wanted


def matches(when: Conditions, s: Situation) -> bool:
    """Return True if every condition of `when` holds. An unknown value matches no condition."""
    if not _among(when.engine, s.engine):  # most facts are about one engine
        return False
    ranges = (
        (when.versions, s.version),
        (when.cc, s.cc),
        (when.gpus, s.gpus),
        (when.nodes, s.nodes),
        (when.memory, s.memory),
        (when.context, s.context),
        (when.streams, s.streams),
        (when.driver, s.driver),
        (when.torch, s.versions.get("torch")),
        (when.transformers, s.versions.get("transformers")),
        (when.nvcc, s.versions.get("nvcc")),
    )
    flags = (
        (when.unified, s.unified),
        (when.wsl, s.wsl),
        (when.mixed, s.mixed),
        (when.nvlink, s.nvlink),
        (when.moe, s.moe),
        (when.experts_in_ram, s.experts_in_ram),
    )
    words = (
        (when.model, s.model),
        (when.draft, s.draft),
        (when.layout, s.layout),
        (when.kv, s.kv),
        (when.backend, s.backend),
    )
    quant = (s.quant or "").lower()
    return (
        all(_in_range(text, value) for text, value in ranges)
        and all(_same(wanted, found) for wanted, found in flags)
        and all(_among(wanted, found) for wanted, found in words)
        and (not when.cards or bool(set(when.cards) & set(s.cards)))
        and (not when.drafts or bool(set(when.drafts) & set(s.drafts)))
        and (not when.quant or any(part in quant for part in when.quant))
        and (not when.env or bool(set(when.env) & s.env))
        and (not when.tools or bool(set(when.tools) & set(s.versions)))
    )
