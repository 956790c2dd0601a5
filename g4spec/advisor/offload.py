"""Finds alternatives for a model that does not fit on the card: layers in RAM with llama.cpp, or a
smaller model."""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import Question, choose_format
from g4spec.advisor.machine import GIB, Machine
from g4spec.advisor.memory_needs import Calculator, CardMemoryPlan
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
"""Fraction of the experts of the 26B-A4B that one token reads."""
LAYERED = ("weights", "global cache", "sliding cache")
"""Names of the memory items that move to RAM together with their layer."""


@dataclass(frozen=True, slots=True)
class Offload:
    """llama.cpp's split of a model between card and RAM.

    Attributes:
        flag: `-ngl N`: number of layers on the card; `-ncmoe N`: layers with experts in RAM.
        on_card, layers: number of layers entirely on the card, and of all layers.
        ram: bytes of RAM that the rest needs.
    """

    flag: str
    on_card: int
    layers: int
    ram: int


def split_layers(
    facts: Facts, target: TargetModel, option: WeightFormat, plan: CardMemoryPlan
) -> Offload | None:
    """Split a model so that its part on the card fits into `plan.available` bytes. None if no layer
    fits or the number of layers is unknown. An estimate: all layers count as equally large."""
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
    """Return the MTP assistant that Google publishes for a size, or None."""
    row = next((r for r in facts.all(DraftFact) if r.model == size.id and r.kind == "mtp"), None)
    return from_row(row, "mtp") if row is not None else None


def smaller_size(
    facts: Facts, machine: Machine, q: Question, row: EngineFact
) -> tuple[SizeFact, CardMemoryPlan] | None:
    """Find the largest smaller model that an engine runs on the machine, with its MTP assistant if
    the question has a draft."""
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
    plan: CardMemoryPlan,
) -> str:
    """Describe alternatives to a plan that does not fit: layers in RAM, a smaller size."""
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
