"""Builds the five-line summary of a diagnosis: verdict, type, context, speed, command."""

from __future__ import annotations

from g4spec.advisor import format_choice, speed
from g4spec.advisor.diagnosis import Alternative, Brief
from g4spec.advisor.engine_verdict import EngineVerdict
from g4spec.advisor.facts import Facts
from g4spec.advisor.figures import SpeedFact
from g4spec.advisor.format_choice import Question
from g4spec.advisor.machine import GIB, Machine, upgraded
from g4spec.advisor.named_models import DraftModel
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
    facts: Facts,
    machine: Machine,
    q: Question,
    v: EngineVerdict,
    works: bool,
    newer: bool,
    reason: str = "",
    alternatives: tuple[Alternative, ...] = (),
) -> Brief:
    """Summarize the verdict that is shown in detail.

    Args:
        works: True if the requested run can work as installed.
        newer: True if `v` is the verdict after an upgrade.
        reason: why this engine is shown and not another one that works, or "".
        alternatives: other runs that fit.
    """
    headline = v.title
    if not v.works:
        why = v.blockers[0].title if v.blockers else v.refusal or v.unknown
        fix = v.blockers[0].fix if v.blockers else v.fix
        rows = []
        if fix and (v.blockers or not alternatives):
            rows = [("or" if alternatives else "instead", fix)]
        if any(a.kind == "split" for a in alternatives):
            rows += _reported_with_layers_in_ram(facts, machine, q)
        command = alternatives[0].command if alternatives else ""
        return Brief("bad", f"{headline}: {why}", tuple(rows), command, alternatives)
    n = len(v.open_conditions)
    if n:
        headline += f", with {n} condition{'s' * (n != 1)} (below)"
    if not works and not newer:
        headline = f"not with what is installed, but with {headline}"
    if newer:
        headline = f"not with the installed version; after an upgrade: {headline}"
    made = estimate(facts, machine, q, v)
    in_ram = v.plan is not None and v.plan.ram > 0
    unknown = NO_SPEED_IN_RAM if in_ram else NO_SPEED
    expected = f"{speed_text(made, q.draft)} ({made.source})" if made else unknown
    lines = [*([("why", reason)] if reason else []), *_plan(v), ("speed", expected)]
    then, engine = upgraded(machine, v.engine.name) if newer else machine, v.engine.name
    command = f"g4spec recipe {engine} {format_choice.command_options(q, then, engine)}"
    mark: Mark = "bad" if newer or not works else "warn" if n else "good"
    return Brief(mark, headline, tuple(lines), command, alternatives)


def _plan(v: EngineVerdict) -> list[tuple[str, str]]:
    """Return the summary's rows on weight type and context."""
    plan, option = v.plan, v.option
    if plan is None or option is None:
        return [("type", "the file's type, computed in float32 on the CPU")]
    cards = f" on {v.gpus} GPUs" if v.gpus > 1 else "" if v.on_gpu else " on the CPU"
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
        ("reported", f"nothing for this GPU; on another one, {row.hardware}: {row.says}")
        for row in rows
    ]


def speed_text(made: Estimate, draft: DraftModel | None) -> str:
    """Format the expected tokens/s: without the draft, and with it if that is known."""
    text = f"{made.low:.0f} to {made.high:.0f} tokens/s"
    if draft is None:
        return text
    if made.draft_high:
        return f"{text}, {made.draft_low:.0f} to {made.draft_high:.0f} with the draft"
    return f"{text} without the draft"
