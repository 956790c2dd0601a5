"""Builds the five-line summary of a diagnosis: verdict, type, context, speed, command."""

from __future__ import annotations

from g4spec.advisor import format_choice, offload, speed
from g4spec.advisor.diagnosis import Brief
from g4spec.advisor.engines import EngineVerdict
from g4spec.advisor.facts import Facts
from g4spec.advisor.figures import SpeedFact
from g4spec.advisor.format_choice import Question
from g4spec.advisor.machine import GIB, Machine, assume_options, upgraded
from g4spec.advisor.schema import Mark
from g4spec.advisor.speed import Estimate

NO_SPEED = (
    "unknown, as the memory bandwidth is unknown: measure it (the recipe ends with the command)"
)
NO_SPEED_IN_RAM = (
    "unknown: layers in RAM wait for RAM and CPU; measure it (the recipe ends with the command)"
)
SPILLED = ("speed-46", "speed-46-31b")
"""Ids of rows with reported speeds of models larger than the card's memory."""


def gpus_at_once(v: EngineVerdict) -> int:
    """Return the number of cards that a step reads in parallel: all of them with tensor
    parallelism, one with llama.cpp's layer split."""
    return v.gpus if v.engine.name in ("vllm", "sglang") else 1


def estimate(facts: Facts, machine: Machine, q: Question, v: EngineVerdict) -> Estimate | None:
    """Estimate tokens/s; None without a memory plan, for layers in RAM, or without a known
    bandwidth."""
    if v.plan is None or v.option is None or not v.on_gpu or v.plan.ram:
        return None
    return speed.estimate(
        facts, machine, q.target, q.draft, v.option, v.plan.kv, v.plan.context, gpus_at_once(v)
    )


def summarize(
    facts: Facts, machine: Machine, q: Question, v: EngineVerdict, works: bool, newer: bool
) -> Brief:
    """Summarize the verdict that is shown in detail.

    Args:
        works: True if the requested run can work as installed.
        newer: True if `v` is the verdict after an upgrade.
    """
    headline = f"{v.engine.title} {v.version}"
    if not v.installed:
        headline += " (newest known, not installed)"
    if not works and not newer:
        why = v.blockers[0].title if v.blockers else v.refusal or v.unknown
        fix = v.blockers[0].fix if v.blockers else v.fix
        rows = [("instead", fix)] if fix else []
        if "-ngl" in fix or "-ncmoe" in fix:
            rows += _reported_with_layers_in_ram(facts, machine, q)
        less = offload.smaller_size(facts, machine, q, v.engine) if v.refusal else None
        pair = f" -md {q.draft.given}" if q.draft is not None and q.draft.given == "mtp" else ""
        command = f"g4spec doctor -m {less[0].id}{pair}{assume_options(machine)}" if less else ""
        return Brief("bad", f"{headline}: {why}", tuple(rows), command)
    n = len(v.open_conditions)
    if n:
        headline += f", with {n} condition{'s' * (n != 1)} (below)"
    if newer:
        headline = f"not with the installed version; after an upgrade: {headline}"
    speed = _speed(estimate(facts, machine, q, v), v.plan is not None and v.plan.ram > 0)
    lines = [*_plan(v), ("speed", speed)]
    then, engine = upgraded(machine, v.engine.name) if newer else machine, v.engine.name
    command = f"g4spec recipe {engine} {format_choice.command_options(q, then, engine)}"
    mark: Mark = "bad" if newer else "warn" if n else "good"
    return Brief(mark, headline, tuple(lines), command)


def _plan(v: EngineVerdict) -> list[tuple[str, str]]:
    """Return the summary's rows on weight type and context."""
    plan, option = v.plan, v.option
    if plan is None or option is None:
        return [("type", "the file's type, computed in float32 on the CPU")]
    cards = f" on {v.gpus} cards" if v.gpus > 1 else "" if v.on_gpu else " on the CPU"
    text = f"up to {plan.largest:,} tokens with {plan.kv} cache; {plan.context:,} take "
    text += f"{plan.total / GIB:.1f} of {plan.available / GIB:.1f} GiB"
    if v.uncounted:
        text += " (without the draft, whose size is not known)"
    gb = option.nbytes / 1e9
    size = f"{gb:.1f} GB" if gb > 0.1 else f"{1000 * gb:.1f} MB"
    if plan.ram:
        size += f", {plan.ram / GIB:.1f} GiB of weights and cache in RAM"
    return [("type", f"{plan.format}, {size}{cards}"), ("context", text)]


def _reported_with_layers_in_ram(
    facts: Facts, machine: Machine, q: Question
) -> list[tuple[str, str]]:
    """Return published speeds of this size with layers in RAM: on this card, or else on another
    card, which the row says."""
    rows = [facts.get(SpeedFact, id) for id in SPILLED]
    rows = [row for row in rows if row.model == q.target.size]
    cards = {gpu.card for gpu in machine.gpus}
    own = [row for row in rows if cards & set(row.cards)]
    text = [("reported", f"{row.hardware}: {row.says}") for row in own]
    return text or [
        ("reported", f"nothing for this card; on another one, {row.hardware}: {row.says}")
        for row in rows
    ]


def _speed(made: Estimate | None, in_ram: bool) -> str:
    """Format the expected tokens/s."""
    if made is None:
        return NO_SPEED_IN_RAM if in_ram else NO_SPEED
    text = f"{made.low:.0f} to {made.high:.0f} tokens/s"
    if made.draft_high:
        text += f", {made.draft_low:.0f} to {made.draft_high:.0f} with the draft"
    return f"{text} (computed, not measured)"
