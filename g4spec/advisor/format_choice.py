"""What is asked, and which weight format answers it best on a machine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from g4spec.advisor.machine import Machine, assume_options
from g4spec.advisor.memory_needs import Calculator, MemoryPlan
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat

USUAL_CONTEXT = 8192
"""Context in tokens that the arithmetic is shown for when none was asked for."""
LEAST_CONTEXT = 2048
"""A context below this is no answer to "does not fit"."""
COMFORTABLE_CONTEXT = 32768
"""Context that a format should allow to be suggested, when none was asked for."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        context: tokens, or None. `kv`: cache type, or None for the engine's choice.
        backend: attention backend forced on the target. `gpus`: cards to use, None for all.
    """

    target: TargetModel
    draft: DraftModel | None = None
    context: int | None = None
    kv: str | None = None
    backend: str | None = None
    gpus: int | None = None
    batched: int = 2048


def command_options(q: Question, machine: Machine) -> str:
    """What asks the same of `doctor` and `recipe` once more."""
    said = f"-m {shlex.quote(q.target.given or q.target.size)}"
    if q.draft is not None:
        said += f" -md {shlex.quote(q.draft.given)}"
    for name, value in (("-c", q.context), ("--kv", q.kv), ("--gpus", q.gpus)):
        said += f" {name} {value}" if value else ""
    return said + assume_options(machine)


def _plans(
    calc: Calculator, name: str, option: WeightFormat, q: Question, kinds: tuple[str, ...]
) -> tuple[MemoryPlan, ...]:
    wanted = q.context or min(USUAL_CONTEXT, q.target.context)
    return tuple(calc.plan(name, option, kv, wanted) for kv in kinds)


def choose_format(
    calc: Calculator, name: str, loadable: list[WeightFormat], q: Question, kinds: tuple[str, ...]
) -> tuple[WeightFormat | None, tuple[MemoryPlan, ...], MemoryPlan | None]:
    """The best format that leaves room for a useful context, else one that fits at all, else the
    smallest one. Formats that would be needlessly slow on the card come late, and those of which
    no checkpoint is known come last."""
    if not loadable:
        return None, (), None
    ordered = sorted(
        loadable, key=lambda o: (not checkpoint_source(name, q.target, o), _slow(o, calc.machine))
    )
    wanted = q.context or min(COMFORTABLE_CONTEXT, q.target.context)
    tried = [(o, _plans(calc, name, o, q, kinds)) for o in ordered]
    for least in (wanted, q.context or min(USUAL_CONTEXT, q.target.context)):
        for option, plans in tried:
            # The last cache type saves most and costs quality; it is not a reason to choose.
            for plan in plans[: max(len(kinds) - 1, 1)]:
                if plan.fits and plan.largest >= least:
                    return option, plans, plan
    for option, plans in tried:
        for plan in plans:
            if plan.fits:
                return option, plans, plan
    option, plans = min(tried, key=lambda t: t[0].nbytes)
    return option, plans, plans[-1] if plans else None


def checkpoint_source(engine: str, target: TargetModel, option: WeightFormat) -> str:
    """The checkpoint or file that holds a format, as the engine is given it; "" if none is known.

    vLLM makes FP8 from the BF16 checkpoint while it loads. GGUF files are in several repositories,
    so that for llama.cpp every format counts as known.
    """
    if target.is_local:
        return target.given
    if engine not in ("vllm", "sglang"):
        return f"{target.size}-{option.format.replace(' ', '-').lower()}.gguf"
    if option.hub:
        return option.hub
    if "/" in target.given:
        return target.given
    made = option.format == "BF16" or (option.format == "FP8" and engine == "vllm")
    return target.hub if made else ""


def _slow(option: WeightFormat, machine: Machine) -> bool:
    """Whether a format is too many bytes for the card's bandwidth when a smaller one exists."""
    bandwidth = machine.bandwidth or 0.0
    if option.format in ("BF16", "F16"):
        return bandwidth < 2000
    return option.format in ("FP8", "Q8_0") and bandwidth < 400
