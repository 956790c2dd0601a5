"""Defines an engine's verdict on a question, and chooses the verdict to show."""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.advisor.conditions import Situation
from g4spec.advisor.memory_needs import UNKNOWN_SIZE, CardMemoryPlan
from g4spec.advisor.named_models import TargetModel, WeightFormat
from g4spec.advisor.schema import EngineFact, ProblemFact


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """One engine's verdict on a question.

    Attributes:
        version: the installed version, or the newest known one if `installed` is False.
        gpus: number of cards that share the model.
        option: chosen weight format; None if the engine can load none.
        plans: one memory plan per cache type; `plan` is the chosen one.
        blockers, conditions, advice: matching problems marked bad, warn, and note or good.
        refusal: any other reason why it cannot run, or ""; `fix`: what to do about it, "" if it
            does not fit into memory (see `alternatives`).
        situation: what the problems were matched against.
    """

    engine: EngineFact
    target: TargetModel
    version: str
    installed: bool
    gpus: int
    option: WeightFormat | None
    plan: CardMemoryPlan | None
    plans: tuple[CardMemoryPlan, ...]
    blockers: tuple[ProblemFact, ...]
    conditions: tuple[ProblemFact, ...]
    advice: tuple[ProblemFact, ...]
    refusal: str
    fix: str
    situation: Situation

    @property
    def title(self) -> str:
        """Title and version of the engine."""
        newest = "" if self.installed else " (newest known, not installed)"
        return f"{self.engine.title} {self.version}{newest}"

    @property
    def on_gpu(self) -> bool:
        return self.situation.unified is not None

    @property
    def unknown(self) -> str:
        """Title of a problem that leaves open whether it runs (nothing is published), or ""."""
        return next((p.title for p in self.conditions if p.unknown), "")

    @property
    def works(self) -> bool:
        return not self.blockers and not self.refusal and not self.unknown

    @property
    def uncounted(self) -> bool:
        """True if the draft's size is unknown and missing from the memory plan."""
        return self.plan is not None and any(s.how == UNKNOWN_SIZE for s in self.plan.items)

    @property
    def too_large(self) -> bool:
        """True if it does not fit into memory."""
        return bool(self.refusal) and not self.fix

    @property
    def refused(self) -> bool:
        return bool(self.blockers or self.refusal)

    @property
    def open_conditions(self) -> tuple[ProblemFact, ...]:
        """The conditions that a recipe does not meet by itself."""
        return tuple(p for p in self.conditions if not p.cured)


def verdicts_asked(verdicts: list[EngineVerdict], engine: str | None = None) -> list[EngineVerdict]:
    """Return the verdicts that decide whether the run can work."""
    if engine:
        return verdicts
    installed = [v for v in verdicts if v.installed and v.engine.name != "g4spec"]
    return installed or verdicts


ORDER = ("vllm", "llama.cpp", "sglang", "g4spec")
"""Engines by how much is known about them: the first that works is shown in detail."""
FAILING = ("llama.cpp", "g4spec", "vllm", "sglang")
"""Engines by how much they can run: the first is shown in detail if none works."""


def best_verdict(verdicts: list[EngineVerdict], asked: list[EngineVerdict]) -> EngineVerdict | None:
    """Return the verdict to show in detail: one that works, preferably one in `asked`. vLLM comes
    first, unless it would fill the card."""
    order = ORDER if any(v.works for v in verdicts) else FAILING

    def rank(v: EngineVerdict) -> tuple[object, ...]:
        name = v.engine.name
        loads = any(name in o.engines for o in v.target.formats)
        full = name == "vllm" and v.plan is not None and _fills(v.plans, v.plan)
        return not v.works, v not in asked, not loads, v.plan is None, full, order.index(name)

    return min(verdicts, key=rank, default=None)


def _fills(plans: tuple[CardMemoryPlan, ...], plan: CardMemoryPlan) -> bool:
    """Return True if a plan takes more than 95 % of the memory, or needs a smaller cache type."""
    return plan.kv != plans[0].kv or plan.total > 0.95 * plan.available
