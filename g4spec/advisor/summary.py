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
SPILLED = "speed-46"
"""Id of the row with reported speeds of models larger than the card's memory."""


def gpus_at_once(v: EngineVerdict) -> int:
    """Return the number of cards that a step reads in parallel: all of them with tensor
    parallelism, one with llama.cpp's layer split."""
    return v.gpus if v.engine.name in ("vllm", "sglang") else 1


def estimate(facts: Facts, machine: Machine, q: Question, v: EngineVerdict) -> Estimate | None:
    """Estimate tokens/s; None without a memory plan or a known bandwidth."""
    if v.plan is None or v.option is None or not v.on_gpu:
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
    said = f"{v.engine.title} {v.version}"
    if not v.installed:
        said += " (newest known, not installed)"
    if not works and not newer:
        why = v.blockers[0].title if v.blockers else v.refusal or v.unknown
        fix = v.blockers[0].fix if v.blockers else v.fix
        rows = [("instead", fix)] if fix else []
        if "-ngl" in fix or "-ncmoe" in fix:
            row = facts.get(SpeedFact, SPILLED)
            rows.append(("reported", f"{row.hardware}: {row.says}"))
        less = offload.smaller_size(facts, machine, q, v.engine) if v.refusal else None
        pair = f" -md {q.draft.given}" if q.draft is not None and q.draft.given == "mtp" else ""
        command = f"g4spec doctor -m {less[0].id}{pair}{assume_options(machine)}" if less else ""
        return Brief("bad", f"{said}: {why}", tuple(rows), command)
    n = sum(not p.cured for p in v.conditions)
    if n:
        said += f", with {n} condition{'s' * (n != 1)} (below)"
    if newer:
        said = f"not with the installed version; after an upgrade: {said}"
    lines = [*_plan(v), ("speed", _speed(estimate(facts, machine, q, v)))]
    then = upgraded(machine, v.engine.name) if newer else machine
    command = f"g4spec recipe {v.engine.name} {format_choice.command_options(q, then)}"
    mark: Mark = "bad" if newer else "warn" if n else "good"
    return Brief(mark, said, tuple(lines), command)


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
    return [("type", f"{plan.format}, {size}{cards}"), ("context", text)]


def _speed(made: Estimate | None) -> str:
    """Format the expected tokens/s."""
    if made is None:
        return NO_SPEED
    text = f"{made.low:.0f} to {made.high:.0f} tokens/s"
    if made.draft_high:
        text += f", {made.draft_low:.0f} to {made.draft_high:.0f} with the draft"
    return f"{text} (computed, not measured)"
