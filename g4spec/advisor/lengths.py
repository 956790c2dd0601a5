"""Recommended draft lengths, in each engine's own counting."""

from __future__ import annotations

from g4spec.advisor.conditions import Situation
from g4spec.advisor.facts import Facts
from g4spec.advisor.figures import DraftLengthFact
from g4spec.advisor.named_models import DraftModel
from g4spec.advisor.versions import holds

OPTIONS = {
    "vllm": "num_speculative_tokens",
    "sglang": "--speculative-num-draft-tokens",
    "llama.cpp": "--spec-draft-n-max",
}


def find_advice(facts: Facts, draft: DraftModel, when: Situation) -> DraftLengthFact | None:
    """Return the first published recommendation for the draft, or None.

    Args:
        when: its engine, compute capability, weight format and experts in RAM count.
    """
    engine, cc = when.engine or "", when.cc
    for found in facts.all(DraftLengthFact):
        if (
            found.model == draft.model
            and found.quant in (when.quant or "").lower()
            and (when.experts_in_ram or not found.experts_in_ram)
            and found.kind == draft.kind
            and found.maker in ("", draft.maker)
            and (not found.engine or engine in found.engine)
            and (not found.cc or (cc is not None and holds(found.cc, cc)))
        ):
            return found
    return None


def full_length(draft: DraftModel, engine: str) -> int:
    """Return the draft's maximum length in this engine's counting; 0 if unknown."""
    return {"vllm": draft.vllm_n, "sglang": draft.sglang_n, "llama.cpp": draft.llamacpp_n}[engine]


def start_length(facts: Facts, draft: DraftModel, when: Situation) -> int:
    """Return the draft length to start with; 0 if unknown. Arguments as `find_advice`.

    SGLang counts the anchor. For a block draft it is the block size: no recommendation is
    published for it.
    """
    engine = when.engine or ""
    most, found = full_length(draft, engine), find_advice(facts, draft, when)
    if _whole_block(draft, engine) or found is None:
        return most
    n = found.code + (engine == "sglang")
    return min(n, most) if most else n


def _whole_block(draft: DraftModel, engine: str) -> bool:
    """Return True if the engine is given the draft's block size."""
    return engine == "sglang" and draft.kind != "mtp"


def advice_text(facts: Facts, draft: DraftModel, when: Situation) -> tuple[str, tuple[str, ...]]:
    """Return the recommendation as text, and the ids of the facts it is based on. Arguments as
    `find_advice`."""
    engine = when.engine or ""
    most, found = full_length(draft, engine), find_advice(facts, draft, when)
    option = OPTIONS[engine]
    if _whole_block(draft, engine):
        if not most:
            return "unknown how it counts this draft; keep its default", ("sglang-dflash",)
        return f"{option} {most}, the block with its anchor", ("sglang-dflash",)
    if found is None:
        text = (
            f"{option} {most} is the draft's maximum; no recommendation is published"
            if most
            else "unknown"
        )
        return text, draft.ids
    anchor = int(engine == "sglang")
    top = most or found.code + anchor
    advised = (found.code, found.chat, found.streams)
    code, chat, streams = (min(n + anchor, top) for n in advised)
    limit = f" (at most {most})" if most and most > code else ""
    return (
        f"{option} {code} for code, {chat} for chat, {streams} with 4 to 8 requests{limit}",
        (found.id, "length-rule"),
    )
