"""The values of the placeholders in rows of `data/recipes.toml`, and the reasons for them."""

from __future__ import annotations

import shlex

from g4spec.advisor import backends, format_choice, lengths
from g4spec.advisor.engine_verdict import EngineVerdict
from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import Question
from g4spec.advisor.machine import Machine
from g4spec.advisor.memory_needs import GGUF, NGRAM
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat
from g4spec.advisor.schema import SizeFact
from g4spec.quant import policy

PORTS = {"vllm": 8000, "sglang": 30000, "llama.cpp": 8080, "g4spec": 8080}
HEAD = "HEAD_IP"
"""Placeholder for the address of the first node."""


def _model(v: EngineVerdict, target: TargetModel) -> str:
    """Return the target as passed to the engine."""
    name, option = v.engine.name, weight_format(v, target)
    if name in GGUF and target.is_local:
        return target.given if target.is_gguf else "target.gguf"
    if option is None:
        return "target.gguf"
    made_up = f"YOUR_{target.size}_{option.format.replace(' ', '_')}_CHECKPOINT".upper()
    return format_choice.checkpoint_source(name, target, option) or made_up


def weight_format(v: EngineVerdict, target: TargetModel) -> WeightFormat | None:
    """Return the weight format of a recipe. g4spec's CPU runtime takes any: the smallest."""
    published = [o for o in target.formats if o.gguf]
    return v.option or min(published, key=lambda o: o.nbytes, default=None)


def recipe_values(facts: Facts, machine: Machine, q: Question, v: EngineVerdict) -> dict[str, str]:
    """Return the values of the {placeholders} in rows."""
    target, draft = q.target, q.draft
    plan = v.plan
    gguf = v.engine.name in GGUF
    model = _model(v, target)
    option = weight_format(v, target)
    hub = format_choice.gguf_repository(target, option) if gguf else ""
    mix = option.format.lower() if option is not None else ""
    most = plan.largest if plan is not None else target.context
    usual = format_choice.COMFORTABLE_CONTEXT if plan is not None else format_choice.USUAL_CONTEXT
    ctx = q.context or min(usual, most, target.context)
    n, n_reason = 0, ""
    if draft is not None and v.engine.name in lengths.OPTIONS:
        n = lengths.start_length(facts, draft, v.situation)
        advice, _ = lengths.advice_text(facts, draft, v.situation)
        n_reason = advice.removeprefix(f"{lengths.OPTIONS[v.engine.name]} ")
    drafted = _drafted(draft, gguf)
    cc = machine.cc or (0, 0)
    arch = f"{cc[0]}{cc[1]}" + ("a" if cc >= (12, 0) else "")
    chosen, _ = (
        backends.default_backends(facts, v.version, cc, draft)
        if v.engine.name == "vllm"
        else ("", "")
    )
    return {
        "model": shlex.quote(model),
        "named": f"-hf {shlex.quote(hub)}" if hub else f"-m {shlex.quote(model)}",
        "draft": drafted,
        "n": str(n),
        "steps": str(n - 1),
        "n_reason": n_reason,
        "ctx": str(ctx),
        "tp": str(v.gpus),
        "nodes": str(machine.nodes),
        "head": HEAD,
        "version": v.version,
        "batched": str(q.batched),
        "util": "0.80" if machine.unified else "0.92",
        "arch": arch,
        "target_backend": chosen or "a backend that takes head size 512",
        "build_note": (
            "with CUDA 12.9 or older: CUDA 13 compiles nothing for this GPU"
            if cc < (7, 5)
            else "nvcc 13.2.0 and 13.2.1 miscompile"
        ),
        "draft_hub": draft.hub if draft is not None else "",
        "draft_word": shlex.quote(drafted),
        "with_draft": f" -md {shlex.quote(drafted)}" if drafted else "",
        "cached": " --cache-type q8_0" if plan is not None and plan.kv == "q8_0" else "",
        "target_source": shlex.quote(target.given or ""),
        "target_hub": target.given if target.is_local else target.hub,
        "tokenizer": shlex.quote(target.hub if hub else model),
        "type": mix if mix in policy.names() else "q8_0",
        "draft_source": shlex.quote(draft.given if draft and draft.is_local else "draft"),
        "port": str(PORTS[v.engine.name]),
        "served": shlex.quote((gguf and target.hub) or model),
        **_cache_values(q, v, ctx),
        **_split_values(facts, q),
    }


def _drafted(draft: DraftModel | None, gguf: bool) -> str:
    """Return the draft as passed to an engine; "" without one. `gguf`: it loads GGUF files."""
    if draft is None:
        return ""
    if draft.kind == NGRAM or draft.is_gguf:
        return draft.given
    if gguf:
        return "draft.gguf"
    return draft.given if draft.is_local else draft.hub


def _cache_values(q: Question, v: EngineVerdict, ctx: int) -> dict[str, str]:
    """Return the values for context and cache type, with their reasons."""
    plan = v.plan
    return {
        "ctx_reason": _context_reason(q, v, ctx),
        "kv": plan.kv if plan is not None else "f16",
        "kv_vllm": "int8_per_token_head" if q.kv == "int8" else plan.kv if plan else "auto",
        "kv_reason": _cache_reason(q, v),
    }


def _split_values(facts: Facts, q: Question) -> dict[str, str]:
    """Return the values for llama.cpp's split between GPU and RAM."""
    size = facts.find(SizeFact, q.target.size)
    layers = size.sliding + size.full if size is not None else q.split.n_gpu_layers or 0
    return {
        "ngl": str(q.split.n_gpu_layers or 99),
        "ngl_reason": (
            "the layers on the GPU, output included; the first others stay in RAM"
            if q.split.layers_in_ram(layers)
            else "all layers on the GPU"
        ),
        "ncmoe": str(q.split.n_cpu_moe or 0),
    }


def _context_reason(q: Question, v: EngineVerdict, ctx: int) -> str:
    """Return where the context of a recipe comes from."""
    plan = v.plan
    if q.context:
        return "the context of -c"
    if ctx == q.target.context:
        return "the model's whole context"
    if plan is None:
        return "g4spec's default for a CPU"
    if ctx == plan.largest:
        return f"the largest context that fits with {plan.kv} cache"
    return (
        f"g4spec's default for recipes, which -c changes: up to {plan.largest:,} tokens fit with "
        f"{plan.kv} cache"
    )


def _cache_reason(q: Question, v: EngineVerdict) -> str:
    """Return why a recipe has its cache type."""
    plan = v.plan
    if q.kv is not None:
        return "the cache type of --kv"
    if plan is None:
        return "the engine's default"
    first = v.plans[0]
    if plan.kv == first.kv:
        return f"{plan.largest:,} tokens fit with {plan.kv}, so no smaller cache type is needed"
    before = f"{first.largest:,} tokens" if first.largest else "none"
    return f"with {first.kv} {before} would fit, with {plan.kv} {plan.largest:,} tokens"
