"""Estimates tokens/s from memory bandwidth and published efficiencies.

A step reads the active weights and the cache. A cycle with a draft commits several tokens and
costs more than a plain step; its cost comes from published figures, because it depends on kernels
rather than on bytes. Nothing is measured on this machine: use `g4spec bench` for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from g4spec.advisor.cache_sizes import slot_bytes, token_bytes, window_of
from g4spec.advisor.facts import Facts
from g4spec.advisor.figures import EfficiencyFact, SpeedFact
from g4spec.advisor.machine import Machine
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat
from g4spec.advisor.versions import holds, parse


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated tokens/s.

    Attributes:
        ceiling: bandwidth / bytes per step. `low`, `high`: times the published efficiencies.
        draft_low, draft_high: tokens/s with the draft, from published tokens per step and cycle
            costs; 0 if none are published. `cycle`: lowest and highest cycle cost in plain steps.
        basis: the arithmetic as text. `facts`: ids of the facts it uses.
        reports: published speeds for the same card, size and draft.
    """

    ceiling: float
    low: float
    high: float
    draft_low: float
    draft_high: float
    cycle: tuple[float, float]
    basis: str
    facts: tuple[str, ...]
    reports: tuple[SpeedFact, ...]


def step_bytes(target: TargetModel, option: WeightFormat, kv: str, context: int) -> float:
    """Return the bytes that one decode step reads: active weights and the cache at `context`."""
    cache = token_bytes(target.caches, kv) * context
    ring = slot_bytes(target.caches, kv) * min(context, window_of(target.caches))
    return option.nbytes * target.active + cache + ring


def find_efficiency(facts: Facts, moe: bool, bandwidth: float) -> EfficiencyFact:
    """Return the published efficiency for this kind of model and bandwidth (GB/s)."""
    rows = [e for e in facts.all(EfficiencyFact) if e.moe == moe]
    return next(e for e in rows if holds(e.bandwidth, parse(f"{bandwidth:.0f}")))


def estimate(
    facts: Facts,
    machine: Machine,
    target: TargetModel,
    draft: DraftModel | None,
    option: WeightFormat,
    kv: str,
    context: int,
    gpus: int,
) -> Estimate | None:
    """Estimate tokens/s with `context` tokens in the cache; None if the bandwidth is unknown.

    Args:
        gpus: cards that are read in parallel: all with tensor parallelism, 1 with llama.cpp's
            layer split, which reads them one after the other.
    """
    if not machine.bandwidth:
        return None
    speed = machine.bandwidth * 1e9 * gpus
    need = step_bytes(target, option, kv, context)
    reach = find_efficiency(facts, target.moe, machine.bandwidth)
    ceiling = speed / need
    low = high = 0.0
    if draft is not None and draft.accepted and reach.cycle_low:
        low = ceiling * reach.low * min(draft.accepted) / reach.cycle_high
        high = ceiling * reach.high * max(draft.accepted) / reach.cycle_low
    cards = f"{gpus} x " if gpus > 1 else ""
    basis = (
        f"{cards}{machine.bandwidth:.0f} GB/s / {need / 1e9:.1f} GB per token = {ceiling:.0f} "
        f"at most; published speeds reach {reach.low:.0%} to {reach.high:.0%} of that"
    )
    reports = tuple(_reports(facts, machine, target, draft))
    return Estimate(
        ceiling,
        ceiling * reach.low,
        ceiling * reach.high,
        low,
        high,
        (reach.cycle_low, reach.cycle_high),
        basis,
        (reach.id,),
        reports,
    )


def _reports(
    facts: Facts, machine: Machine, target: TargetModel, draft: DraftModel | None
) -> Sequence[SpeedFact]:
    cards = {g.card for g in machine.gpus}
    ids = draft.ids if draft is not None else ()
    return [
        row
        for row in facts.all(SpeedFact)
        if cards & set(row.cards)
        and row.gpus == machine.total_gpus
        and row.model == target.size
        and row.draft in ids
    ]
