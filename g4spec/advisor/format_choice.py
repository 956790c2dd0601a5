"""The question put to doctor and recipe, and the choice of a weight format for a machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from g4spec.advisor.layer_split import NO_SPLIT, LayerSplit
from g4spec.advisor.machine import Machine, assume_options
from g4spec.advisor.memory_needs import Calculator, CardMemoryPlan
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat

USUAL_CONTEXT = 8192
"""Default context in tokens of the memory arithmetic."""
LEAST_CONTEXT = 2048
"""Smallest context in tokens that is suggested when the requested one does not fit."""
COMFORTABLE_CONTEXT = 32768
"""Context in tokens that a format should leave room for when none was requested, and that a recipe
then has if it fits."""
FEW_BITS = ("Q3_", "Q2_", "IQ1_")
"""Parts of the names of formats whose weights cost much quality."""


@dataclass(frozen=True, slots=True)
class Question:
    """A target, an optional draft, and how to run them.

    Attributes:
        context: tokens, or None for the default.
        kv: cache type, or None for the engine's default.
        backend: attention backend that the user forces on the target, or None.
        gpus: number of cards to use; None for all.
        batched: vLLM's max_num_batched_tokens.
        split: layers that llama.cpp keeps in RAM; other engines ignore it.
    """

    target: TargetModel
    draft: DraftModel | None = None
    context: int | None = None
    kv: str | None = None
    backend: str | None = None
    gpus: int | None = None
    batched: int = 2048
    split: LayerSplit = NO_SPLIT


def command_options(q: Question, machine: Machine, engine: str) -> str:
    """Return the command-line options that repeat this question for an engine."""
    options = f"-m {shlex.quote(q.target.given or q.target.size)}"
    if q.draft is not None:
        options += f" -md {shlex.quote(q.draft.given)}"
    for name, value in (("-c", q.context), ("--kv", q.kv), ("--gpus", q.gpus)):
        options += f" {name} {value}" if value else ""
    split = q.split.flags if engine == "llama.cpp" else ""
    return options + split + assume_options(machine)


def _plans(
    calc: Calculator, name: str, option: WeightFormat, q: Question, kinds: tuple[str, ...]
) -> tuple[CardMemoryPlan, ...]:
    wanted = q.context or min(USUAL_CONTEXT, q.target.context)
    return tuple(calc.plan(name, option, kv, wanted) for kv in kinds)


Tried = tuple[WeightFormat, tuple[CardMemoryPlan, ...]]
"""A weight format and its plans, one per cache type."""


def _first_fit(
    tried: list[Tried], q: Question, n_usual: int
) -> tuple[WeightFormat, tuple[CardMemoryPlan, ...], CardMemoryPlan] | None:
    """Return the first format that leaves room for a useful context, or else the first that fits.

    Args:
        n_usual: number of cache types that are a reason to choose a format: all but the last, which
            saves most and costs quality.
    """
    wanted = q.context or min(COMFORTABLE_CONTEXT, q.target.context)
    for least in (wanted, q.context or min(USUAL_CONTEXT, q.target.context)):
        for option, plans in tried:
            for plan in plans[:n_usual]:
                if plan.fits and plan.largest >= least:
                    return option, plans, plan
    for option, plans in tried:
        for plan in plans:
            if plan.fits:
                return option, plans, plan
    return None


def choose_format(
    calc: Calculator, name: str, loadable: list[WeightFormat], q: Question, kinds: tuple[str, ...]
) -> tuple[WeightFormat | None, tuple[CardMemoryPlan, ...], CardMemoryPlan | None]:
    """Choose a weight format: the best one that leaves room for a useful context, or else one that
    fits at all, or else the smallest. Formats that are too large for the card's bandwidth rank
    lower; formats without a known checkpoint rank last. Formats of about 3 bits are chosen only if
    no larger one fits.

    Returns the format, its plans (one per cache type), and the plan to use.
    """
    if not loadable:
        return None, (), None
    ordered = sorted(
        loadable, key=lambda o: (not checkpoint_source(name, q.target, o), _slow(o, calc.machine))
    )
    tried = [(o, _plans(calc, name, o, q, kinds)) for o in ordered]
    for few in (False, True):
        group = [t for t in tried if has_few_bits(t[0]) == few]
        found = _first_fit(group, q, max(len(kinds) - 1, 1))
        if found is not None:
            return found
    option, plans = min(
        tried, key=lambda t: (not checkpoint_source(name, q.target, t[0]), t[0].nbytes)
    )
    return option, plans, plans[-1] if plans else None


def checkpoint_source(engine: str, target: TargetModel, option: WeightFormat) -> str:
    """Return the checkpoint or file to pass to the engine for a format; "" if none is known.

    vLLM quantizes the BF16 checkpoint to FP8 while loading. GGUF files exist in several
    repositories, so every format counts as known for llama.cpp.
    """
    if target.is_local:
        return target.given
    if engine not in ("vllm", "sglang"):
        return gguf_repository(target, option) or "target.gguf"
    if option.hub:
        return option.hub
    if "/" in target.given:
        return target.given
    published = option.format == "BF16" or (option.format == "FP8" and engine == "vllm")
    return target.hub if published else ""


def gguf_repository(target: TargetModel, option: WeightFormat | None) -> str:
    """Return `org/name:TYPE` of a GGUF file on the hub that holds a target, as llama.cpp's -hf and
    g4spec take it; "" for local files and for checkpoints that others fine-tuned."""
    if target.gguf_hub or target.is_local:
        return target.gguf_hub
    tuned = "/" in target.given and not target.given.startswith("google/")
    return "" if tuned or option is None else option.gguf


def has_few_bits(option: WeightFormat) -> bool:
    """Return True if a format of about 3 bits or less costs much quality."""
    return any(part in option.format for part in FEW_BITS)


def by_preference(formats: Iterable[WeightFormat], machine: Machine) -> list[WeightFormat]:
    """Return formats by size, the largest first; those too large for the card's bandwidth last."""
    return sorted(formats, key=lambda f: (_slow(f, machine), -f.nbytes))


def _slow(option: WeightFormat, machine: Machine) -> bool:
    """Return True if a format is too large for the card's bandwidth (smaller ones exist)."""
    bandwidth = machine.bandwidth or 0.0
    if option.format in ("BF16", "F16"):
        return bandwidth < 2000
    return option.format in ("FP8", "Q8_0") and bandwidth < 400
