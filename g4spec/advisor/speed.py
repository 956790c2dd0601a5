"""Expected tokens/s: what bandwidth allows, and the share of it that people measured.

A step reads the weights that one token needs and the cache. A cycle with a draft gives several
tokens and costs more than a step; how much more is taken from published figures, because it
depends on kernels rather than on bytes. Nothing here is measured on this machine: `g4spec bench`
does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from g4spec.advisor.facts import Facts
from g4spec.advisor.figures import EfficiencyFact, SpeedFact
from g4spec.advisor.machine import Machine
from g4spec.advisor.memory_needs import slot_bytes, token_bytes, window_of
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat
from g4spec.advisor.versions import holds, parse


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens/s by arithmetic.

    Attributes:
        ceiling: bandwidth / bytes; `low`, `high`: with the share that people reach.
        draft_low, draft_high: with the draft, from published accepted tokens a step and cycle
            costs; 0 if none were published. `cycle`: those costs in plain steps.
        basis: the arithmetic in words. `facts`: ids behind it.
        reports: published figures for the same card, size and draft.
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
    """Bytes that one decoding step reads: active weights and the cache at `context`."""
    cache = token_bytes(target.caches, kv) * context
    ring = slot_bytes(target.caches, kv) * min(context, window_of(target.caches))
    return option.nbytes * target.active + cache + ring


def find_efficiency(facts: Facts, moe: bool, bandwidth: float) -> EfficiencyFact:
    """The share of the ceiling for this kind of model and card."""
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
    """Tokens/s with `context` tokens in the cache, or None when the bandwidth is not known.

    Tensor parallelism (`gpus` of vLLM) reads from all cards at once; llama.cpp's layer split
    reads from one after the other, so that `gpus` is 1 for it.
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
        f"{cards}{machine.bandwidth:.0f} GB/s / {need / 1e9:.1f} GB a token = {ceiling:.0f} "
        f"at most; {reach.low:.0%} to {reach.high:.0%} of that is what people reach"
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
