"""Finds alternatives for a model that does not fit on the card: layers in RAM with llama.cpp, or a
smaller model."""

from __future__ import annotations

from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import Question, choose_format
from g4spec.advisor.layer_split import LayerSplit, layer_sizes
from g4spec.advisor.machine import GIB, Machine
from g4spec.advisor.memory_needs import Calculator, CardMemoryPlan
from g4spec.advisor.named_models import (
    DraftModel,
    WeightFormat,
    from_row,
    named_target,
)
from g4spec.advisor.schema import DraftFact, EngineFact, SizeFact
from g4spec.advisor.versions import holds


def smallest_split(
    facts: Facts, machine: Machine, q: Question, option: WeightFormat, plan: CardMemoryPlan
) -> tuple[LayerSplit, CardMemoryPlan] | None:
    """Find the options of llama.cpp that move as little as necessary of a model to RAM, and the
    plan with them, which has the cache type and context of `plan`. None if no split fits."""
    sizes = layer_sizes(facts, q.target, option)
    if sizes is None or plan.fits:
        return None
    splits = [LayerSplit(n_cpu_moe=n) for n in range(1, sizes.layers + 1) if q.target.moe]
    splits += [LayerSplit(n_gpu_layers=n) for n in range(sizes.layers, 0, -1)]
    gpus = len(machine.gpus) if q.gpus is None else min(q.gpus, len(machine.gpus))
    for split in splits:
        calc = Calculator(facts, machine, q.target, q.draft, gpus, q.batched, split)
        if calc.fits("llama.cpp", option, plan.kv, plan.context):
            return split, calc.plan("llama.cpp", option, plan.kv, plan.context)
    return None


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


def split_text(
    facts: Facts, machine: Machine, q: Question, option: WeightFormat, plan: CardMemoryPlan
) -> list[str]:
    """Describe the smallest split between card and RAM, as one text; none if no split fits."""
    found = smallest_split(facts, machine, q, option, plan)
    sizes = layer_sizes(facts, q.target, option)
    if found is None or sizes is None:
        return []
    split, fits = found
    n = split.n_cpu_moe or split.layers_in_ram(sizes.layers)
    what = "the experts of " if split.n_cpu_moe else ""
    enough = machine.ram_free is None or machine.ram_free > fits.ram
    return [
        f"{split.flags.strip()} moves {what}{n} of {sizes.layers} layers, "
        f"{fits.ram / GIB:.1f} GiB, to RAM, slower; the card then needs {fits.total / GIB:.1f} GiB"
        + ("" if enough else f" (only {(machine.ram_free or 0) / GIB:.1f} GiB of RAM are free)")
    ]


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
    on_card = row.name == "llama.cpp" and machine.gpus and not machine.unified
    if on_card and option is not None and not q.split:
        parts += split_text(facts, machine, q, option, plan)
    less = smaller_size(facts, machine, q, row)
    if less is not None:
        size, fits = less
        short = f"{size.id}:{fits.format.lower().replace(' ', '-')}"
        parts.append(f"the {size.name} fits: {short}, up to {fits.largest:,} tokens")
    return "; or ".join(parts) or "a smaller size or format, or more cards"
