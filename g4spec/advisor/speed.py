"""Estimates tokens/s from memory bandwidth and published efficiencies.

A step reads the active weights and the cache. A cycle with a draft commits several tokens and
costs more than a plain step; its cost comes from published figures, because it depends on kernels
rather than on bytes. The bandwidth is the one that the self-test measured on this machine, or else
the nominal one. No model runs: use `g4spec bench` for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from g4spec.advisor import measured
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
        ceiling: bandwidth / bytes per step. `low`, `high`: times the published efficiencies,
            which differ for measured and for nominal bandwidth.
        draft_low, draft_high: tokens/s with the draft, from published tokens per step and cycle
            costs; 0 if none are published. `cycle`: lowest and highest cycle cost in plain steps.
        basis: the arithmetic as text. `facts`: ids of the facts it uses.
        measured: date on which the bandwidth was measured here, or "" if it is the nominal one.
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
    measured: str = ""

    @property
    def source(self) -> str:
        """Say where the bandwidth is from, as text in brackets."""
        if self.measured:
            return f"computed from the bandwidth measured here, {self.measured}"
        return "computed, not measured"


def step_bytes(target: TargetModel, option: WeightFormat, kv: str, context: int) -> float:
    """Return the bytes that one decode step reads: active weights and the cache at `context`."""
    cache = token_bytes(target.caches, kv) * context
    ring = slot_bytes(target.caches, kv) * min(context, window_of(target.caches))
    return option.nbytes * target.active + cache + ring


def find_efficiency(facts: Facts, moe: bool, bandwidth: float) -> EfficiencyFact:
    """Return the published efficiency for this kind of model and nominal bandwidth (GB/s)."""
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
    here = machine.measured
    bandwidth = here.read if here is not None else machine.bandwidth
    if not bandwidth:
        return None
    need = step_bytes(target, option, kv, context)
    reach = find_efficiency(facts, target.moe, machine.bandwidth or bandwidth)
    share = reach.read if here is not None else 1.0
    ceiling = bandwidth * 1e9 * gpus / need
    least, most = reach.low / share, reach.high / share
    low = high = 0.0
    if draft is not None and draft.accepted and reach.cycle_low:
        low = ceiling * least * min(draft.accepted) / reach.cycle_high
        high = ceiling * most * max(draft.accepted) / reach.cycle_low
    cards = f"{gpus} x " if gpus > 1 else ""
    source = "nominal" if here is None else f"measured here ({here.date}),"
    basis = (
        f"{source} {cards}{bandwidth:.0f} GB/s / {need / 1e9:.1f} GB per token = {ceiling:.0f} "
        f"at most; published speeds reach {least:.0%} to {most:.0%} of that"
    )
    if here is not None:
        basis += f" ({reach.low:.0%} to {reach.high:.0%} of nominal, of which {share:.0%} are read)"
    return Estimate(
        ceiling,
        ceiling * least,
        ceiling * most,
        low,
        high,
        (reach.cycle_low, reach.cycle_high),
        basis,
        (reach.id, *([measured.ID] if here is not None else [])),
        tuple(_reports(facts, machine, target, draft)),
        here.date if here is not None else "",
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
