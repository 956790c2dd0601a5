"""Find what runs where a model does not fit on the card: layers in the system's memory with
llama.cpp, or a size that fits."""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import Question, choose_format
from g4spec.advisor.machine import GIB, Machine
from g4spec.advisor.memory_needs import Calculator, MemoryPlan
from g4spec.advisor.named_models import (
    DraftModel,
    TargetModel,
    WeightFormat,
    from_row,
    named_target,
)
from g4spec.advisor.schema import DraftFact, EngineFact, SizeFact
from g4spec.advisor.versions import holds

EXPERTS_USED = 8 / 128
"""Share of the experts of the 26B-A4B that one token reads."""
LAYERED = ("weights", "global cache", "sliding cache")
"""Steps of the arithmetic that lie where their layer lies."""


@dataclass(frozen=True, slots=True)
class Offload:
    """How llama.cpp splits a model that a card cannot hold.

    Attributes:
        flag: `-ngl N`: layers on the card; `-ncmoe N`: layers whose experts are not.
        on_card, layers: layers that lie on the card in whole, and all of them.
        ram: bytes of the system's memory that the rest takes.
    """

    flag: str
    on_card: int
    layers: int
    ram: int


def split_layers(
    facts: Facts, target: TargetModel, option: WeightFormat, plan: MemoryPlan
) -> Offload | None:
    """Split `option` so that a card with `plan.available` bytes holds its part; None where not even
    one layer fits, or the number of layers is not known. An estimate: layers count as equal."""
    size = next((s for s in facts.all(SizeFact) if s.id == target.size), None)
    if size is None or plan.fits:
        return None
    layers = size.sliding + size.full
    missing = plan.total - plan.available
    if target.moe:
        experts = option.nbytes * (1 - target.active) / (1 - EXPERTS_USED)
        out = -int(-missing // (experts / layers))
        if out <= layers:
            return Offload(f"-ncmoe {out}", layers - out, layers, int(experts / layers * out))
    layer = sum(s.nbytes for s in plan.items if s.name in LAYERED) / (layers + 1)
    out = -int(-missing // layer)
    if out >= layers:
        return None
    return Offload(f"-ngl {layers + 1 - out}", layers + 1 - out, layers, int(layer * out))


def mtp_assistant(facts: Facts, size: SizeFact) -> DraftModel | None:
    """Find the MTP assistant that Google publishes for a size."""
    row = next((r for r in facts.all(DraftFact) if r.model == size.id and r.kind == "mtp"), None)
    return from_row(row, "mtp") if row is not None else None


def smaller_size(
    facts: Facts, machine: Machine, q: Question, row: EngineFact
) -> tuple[SizeFact, MemoryPlan] | None:
    """Find the largest size below the one asked about that an engine runs on the machine, with its
    assistant where a draft was asked for."""
    sizes = facts.all(SizeFact)
    names = [s.id for s in sizes]
    for size in sizes[names.index(q.target.size) + 1 if q.target.size in names else 0 :]:
        target = named_target(facts, size)
        loadable = [
            o for o in target.formats if row.name in o.engines and holds(o.cc, machine.cc or (0,))
        ]
        draft = mtp_assistant(facts, size) if q.draft is not None else None
        calc = Calculator(facts, machine, target, draft, 1, q.batched)
        _, _, plan = choose_format(
            calc, row.name, loadable, Question(target, draft, q.context), row.kv
        )
        if plan is not None and plan.fits:
            return size, plan
    return None


def advice_text(
    facts: Facts,
    machine: Machine,
    q: Question,
    row: EngineFact,
    option: WeightFormat | None,
    plan: MemoryPlan,
) -> str:
    """Say what runs where `plan` does not fit: llama.cpp with layers in memory, a smaller size."""
    parts = []
    split = split_layers(facts, q.target, option, plan) if option is not None else None
    if split is not None and row.name == "llama.cpp" and machine.gpus and not machine.unified:
        what = "experts of the other layers" if "moe" in split.flag else "the rest"
        enough = machine.ram_free is None or machine.ram_free > split.ram
        parts.append(
            f"{split.flag} keeps {split.on_card} of {split.layers} layers on the card and "
            f"{what}, {split.ram / GIB:.1f} GiB, in RAM, slower"
            + ("" if enough else f" (only {(machine.ram_free or 0) / GIB:.1f} GiB are free)")
        )
    less = smaller_size(facts, machine, q, row)
    if less is not None:
        size, fits = less
        short = f"{size.id}:{fits.format.lower().replace(' ', '-')}"
        parts.append(f"the {size.name} fits: {short}, up to {fits.largest:,} tokens")
    return "; or ".join(parts) or "a smaller size or format, or more cards"
