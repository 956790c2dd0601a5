"""Finds runs that fit, in place of one that does not: another cache type, a shorter context, no
draft, n-gram lookup, another file type, layers in RAM with llama.cpp, or a smaller size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from g4spec.advisor import engines, lookup, summary
from g4spec.advisor.diagnosis import Alternative
from g4spec.advisor.engine_verdict import EngineVerdict
from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import (
    LEAST_CONTEXT,
    Question,
    checkpoint_source,
    command_options,
)
from g4spec.advisor.layer_split import NO_SPLIT, LayerSplit, layer_sizes
from g4spec.advisor.machine import GIB, Machine
from g4spec.advisor.memory_needs import GGUF, NGRAM, Calculator, CardMemoryPlan
from g4spec.advisor.named_models import (
    DraftModel,
    TargetModel,
    WeightFormat,
    from_row,
    named_target,
)
from g4spec.advisor.schema import DraftFact, SizeFact
from g4spec.advisor.versions import holds

NO_ALTERNATIVE = "a GPU with more memory, or several"
MUCH_IN_RAM = 0.25
"""Fraction of a dense model's weights in RAM above which a smaller size is the better choice: every
token reads them."""


def find(
    facts: Facts, machine: Machine, q: Question, engine: str, command: str
) -> Iterator[Alternative]:
    """Yield runs with the same engine that fit, at most one for each kind of change, best first.

    What changes least comes first: a shorter context, the cache type, no draft or n-gram lookup
    (the same text), a smaller file type, layers in RAM (slower), a smaller size. Much of a dense
    model in RAM comes last.

    Args:
        command: the command that repeats the run, as "g4spec doctor"; options are appended.
    """
    seen = set[str]()
    for kind, other in _candidates(facts, machine, q, engine):
        if kind in seen:
            continue
        v = engines.judge(facts, machine, other, engine)
        if v.works and v.option is not None:
            seen.add(kind)
            named = replace(other, target=_with_type(other.target, v.option))
            options = command_options(named, machine, engine)
            text = _text(facts, machine, q, other, v)
            dropped = q.draft is not None and other.draft is None
            yield Alternative(kind, text, f"{command} {options}", dropped)


def fix(facts: Facts, machine: Machine, q: Question, v: EngineVerdict, command: str) -> str:
    """Return the fix of a refused verdict: if it does not fit, that of the best alternative."""
    if not v.too_large:
        return v.fix
    found = next(find(facts, machine, q, v.engine.name, command), None)
    return found.fix if found is not None else NO_ALTERNATIVE


def _candidates(
    facts: Facts, machine: Machine, q: Question, engine: str
) -> Iterator[tuple[str, Question]]:
    """Yield (kind of change, run) in the order of `find`; not all of them fit."""
    v = engines.judge(facts, machine, q, engine)
    if v.option is None:  # it loads none of the named types
        whole = _whole(facts, q, engine)
        if whole is not None:
            every = replace(q, target=whole)
            yield "type", every
            if engines.judge(facts, machine, every, engine).refused:
                yield from _candidates(facts, machine, every, engine)
        return
    if v.plan is None:
        return
    longest = max(p.largest for p in v.plans)
    pinned = _with_type(q.target, v.option)
    if longest >= LEAST_CONTEXT:
        yield "context", replace(q, context=longest, target=pinned)
    if q.kv is not None:
        yield "cache", replace(q, kv=None, target=pinned)
    if q.draft is not None:
        yield "draft", replace(q, draft=None)
        yield "ngram", replace(q, draft=lookup.ngram_lookup(q.target))
    types = _smaller_types(facts, machine, q, engine)
    for target in types:
        yield "type", replace(q, target=target)
    for target in types if q.draft is not None else ():
        yield "type", replace(q, target=target, draft=None)
    split = None
    if engine == "llama.cpp" and machine.gpus and not machine.unified:
        split = smallest_split(facts, machine, q, v.option, v.plan)
    in_ram = split[1].ram / v.option.nbytes if split is not None else 0.0
    splits = [("split", replace(q, split=split[0], target=pinned))] if split is not None else []
    sizes = [("size", other) for other in _smaller_sizes(facts, q)]
    slow = not q.target.moe and in_ram > MUCH_IN_RAM
    yield from (*sizes, *splits) if slow else (*splits, *sizes)


def _with_type(target: TargetModel, option: WeightFormat) -> TargetModel:
    """Return the target with one file type, which its name contains."""
    if target.is_local or len(target.formats) == 1:
        return target
    name = target.given.partition(":")[0] or target.size
    given = f"{name}:{option.format.lower().replace(' ', '-')}"
    return replace(target, given=given, formats=(option,))


def _whole(facts: Facts, q: Question, engine: str) -> TargetModel | None:
    """Return the target's size with all file types, if the engine loads some of them."""
    size = facts.find(SizeFact, q.target.size)
    if size is None or q.target.is_local:
        return None
    whole = named_target(facts, size, size.id)
    loads = any(engine in o.engines for o in whole.formats)
    return whole if loads and len(whole.formats) > len(q.target.formats) else None


def _smaller_types(facts: Facts, machine: Machine, q: Question, engine: str) -> list[TargetModel]:
    """Return the published file types that are smaller than those of the question, best quality
    first."""
    size = facts.find(SizeFact, q.target.size)
    if size is None or q.target.is_local:
        return []
    given = q.target.given.partition(":")[0]
    checkpoint = engine in GGUF and "/" in given and "gguf" not in given.lower()
    whole = named_target(facts, size, given if checkpoint else size.id)
    least = min(o.nbytes for o in q.target.formats)
    return [
        _with_type(whole, o)
        for o in whole.formats
        if o.nbytes < least
        and engine in o.engines
        and holds(o.cc, machine.cc or (0,))
        and checkpoint_source(engine, whole, o)
    ]


def _smaller_sizes(facts: Facts, q: Question) -> Iterator[Question]:
    """Yield the question for each smaller size, with its MTP assistant if there is a draft."""
    sizes = facts.all(SizeFact)
    names = [s.id for s in sizes]
    for size in sizes[names.index(q.target.size) + 1 if q.target.size in names else 0 :]:
        target = named_target(facts, size, size.id)
        draft = mtp_assistant(facts, size) if q.draft is not None else None
        context = min(q.context, size.context) if q.context else None
        yield replace(q, target=target, draft=draft, context=context, split=NO_SPLIT)


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


def _text(facts: Facts, machine: Machine, asked: Question, q: Question, v: EngineVerdict) -> str:
    """Describe a run that fits in place of `asked`: model, draft, context, speed."""
    assert v.plan is not None and v.option is not None
    size = facts.find(SizeFact, q.target.size)
    name = size.name if size else q.target.title
    text = f"{name} in {v.plan.format}, {v.option.nbytes / 1e9:.1f} GB"
    if q.draft is not None:
        text += f", with {q.draft.given}{' (needs no file)' * (q.draft.kind == NGRAM)}"
    elif asked.draft is not None:
        text += ", without the draft"
    if q.split:
        text += f", {_split_text(facts, q, v)}"
    text += f": up to {v.plan.largest:,} tokens with {v.plan.kv} cache"
    made = summary.estimate(facts, machine, q, v)
    return f"{text}, {summary.speed_text(made, q.draft) if made else 'speed not known'}"


def _split_text(facts: Facts, q: Question, v: EngineVerdict) -> str:
    """Describe which layers a split keeps in RAM."""
    assert v.plan is not None and v.option is not None
    sizes = layer_sizes(facts, q.target, v.option)
    assert sizes is not None, "a split was found"
    n = q.split.n_cpu_moe or q.split.layers_in_ram(sizes.layers)
    experts = "the experts of " if q.split.n_cpu_moe else ""
    return (
        f"{experts}{n} of {sizes.layers} layers ({v.plan.ram / GIB:.1f} GiB) in RAM, slower "
        f"({q.split.flags.strip()})"
    )
