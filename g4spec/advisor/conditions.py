"""Matches the conditions of facts against a situation."""

from __future__ import annotations

from dataclasses import dataclass, field

from g4spec.advisor.schema import Conditions
from g4spec.advisor.versions import holds, parse


@dataclass(frozen=True, slots=True)
class Situation:
    """The values of the conditions of the same names (see `schema.Conditions`); None where unknown.

    Attributes:
        engine, versions: as `vllm`, `0.33.0`.
        memory: GiB of the smallest card. `quant`: weight format.
        drafts: ids of the draft's row; `draft` is its kind. `layout`: as `DraftModel.layout`.
        env: names of environment variables that are set.
    """

    engine: str | None = None
    versions: str | None = None
    cc: tuple[int, ...] | None = None
    gpus: int | None = None
    nodes: int = 1
    memory: float | None = None
    model: str | None = None
    draft: str | None = None
    drafts: tuple[str, ...] = ()
    layout: str | None = None
    kv: str | None = None
    cards: tuple[str, ...] = ()
    transformers: str | None = None
    driver: str | None = None
    torch: str | None = None
    context: int | None = None
    unified: bool | None = None
    wsl: bool | None = None
    mixed: bool | None = None
    nvlink: bool | None = None
    moe: bool | None = None
    experts_in_ram: bool | None = None
    quant: str | None = None
    backend: str | None = None
    env: frozenset[str] = field(default_factory=frozenset)


def _in_range(text: str, value: str | float | int | tuple[int, ...] | None) -> bool:
    if value is None or value == "":
        return False
    if isinstance(value, float):
        value = f"{value:.2f}"
    return holds(text, value if isinstance(value, tuple) else parse(str(value)))


def _holds(name: str, wanted: str | bool | tuple[str, ...], s: Situation) -> bool:
    found = getattr(s, name)
    if isinstance(wanted, bool):
        return found is wanted
    if isinstance(wanted, str):
        return _in_range(wanted, found)
    if name == "quant":
        return any(part in (found or "").lower() for part in wanted)
    return found in wanted if isinstance(found, str) else not set(wanted).isdisjoint(found or ())


def matches(when: Conditions, s: Situation) -> bool:
    """Return True if every condition of `when` holds. An unknown value matches no condition."""
    return all(_holds(name, wanted, s) for name, wanted in when.stated())
