"""Judges whether one engine can run a pair on a machine."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace

from g4spec import __version__
from g4spec.advisor import runtime_support
from g4spec.advisor.cache_sizes import slot_bytes, token_bytes, window_of
from g4spec.advisor.conditions import Situation, matches
from g4spec.advisor.engine_verdict import EngineVerdict
from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import LEAST_CONTEXT, USUAL_CONTEXT, Question, choose_format
from g4spec.advisor.machine import GIB, Machine
from g4spec.advisor.memory_needs import GGUF, NGRAM, Calculator, CardMemoryPlan
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat
from g4spec.advisor.schema import EngineFact, ProblemFact, SizeFact
from g4spec.advisor.versions import holds
from g4spec.core import PROMPT_BLOCK
from g4spec.errors import InputError, Unsupported
from g4spec.models import gemma4
from g4spec.ops.kv_size import capacity, pool_positions
from g4spec.runtime.memory import workspace_bytes

OWN_WORK = 512 << 20
"""Bytes that g4spec's CPU runtime needs beside weights and caches, for a model that it does not
know."""
NAMES = ("vllm", "sglang", "llama.cpp", "g4spec")
OLDEST = (7, 0)
"""Lowest compute capability that g4spec's kernels support."""


def engine_fact(facts: Facts, name: str) -> EngineFact:
    """Return an engine's row. For g4spec, drafts and cache types come from the runtime itself."""
    row = next(e for e in facts.all(EngineFact) if e.name == name)
    if name == "g4spec":
        return replace(
            row,
            newest=__version__,
            drafts=runtime_support.draft_kinds(),
            kv_all=runtime_support.cache_types(),
        )
    return row


def version_of(facts: Facts, machine: Machine, name: str) -> tuple[str, bool]:
    """Return the installed or else newest known version, and whether it is installed."""
    if name == "g4spec":
        return __version__, True
    found = machine.tools.get(name)
    if found and any(c.isdigit() for c in found):
        return found, True
    return engine_fact(facts, name).newest, found is not None


def n_gpus_for(name: str, machine: Machine, asked: int | None) -> int:
    """Return how many cards share the model: a power of two over all nodes for tensor parallelism
    (it must divide the query heads), all cards of one node for llama.cpp's layer split, one for
    g4spec."""
    if name == "g4spec":
        return 1
    total = machine.total_gpus if name in ("vllm", "sglang") else len(machine.gpus)
    if asked is not None:
        total = min(asked, total)
    if name not in ("vllm", "sglang"):
        return max(total, 1)
    n = 1
    while n * 2 <= total:
        n *= 2
    return n


def situation(
    machine: Machine,
    q: Question,
    name: str,
    version: str,
    option: WeightFormat | None,
    kv: str | None,
    context: int | None,
    gpus: int,
) -> Situation:
    """Collect the values that the conditions of facts are matched against."""
    quant = (option.format if option is not None else "") + " " + (option.hub if option else "")
    if name == "vllm" and option is not None and option.format == "FP8" and not q.target.is_local:
        quant += " fp8-runtime"
    return replace(
        machine_situation(machine, name, version, max(gpus // machine.nodes, 1)),
        context=context,
        moe=q.target.moe,
        experts_in_ram=bool(q.split.n_cpu_moe),
        model=q.target.size,
        quant=quant,
        draft=q.draft.kind if q.draft is not None else "none",
        drafts=q.draft.ids if q.draft is not None else (),
        layout=q.draft.layout if q.draft is not None else None,
        kv=kv,
        backend=q.backend,
    )


def machine_situation(machine: Machine, name: str, version: str, gpus: int) -> Situation:
    """Collect the values that do not depend on a question. `gpus`: cards of one node."""
    return Situation(
        engine=name,
        versions=version,
        cc=machine.cc,
        gpus=gpus,
        nodes=machine.nodes,
        memory=machine.memory / GIB if machine.memory is not None else None,
        driver=machine.driver,
        unified=machine.unified if machine.gpus else None,
        wsl=machine.wsl,
        mixed=machine.mixed,
        nvlink=machine.nvlink,
        cards=tuple(g.card for g in machine.gpus if g.card),
        env=machine.env,
        transformers=machine.tools.get("transformers"),
        torch=machine.tools.get("torch"),
    )


def _kv_types(row: EngineFact, machine: Machine, q: Question) -> tuple[str, ...]:
    """Return the cache types to plan for: the requested one, or all that the card supports."""
    if q.kv is not None:
        return (q.kv,)
    cc = machine.cc or (0, 0)
    kinds = row.kv
    if row.name == "vllm" and (cc < (8, 9) or (q.draft is not None and not q.draft.causal)):
        kinds = tuple(k for k in kinds if k != "fp8")
    return kinds


def judge(facts: Facts, machine: Machine, q: Question, name: str) -> EngineVerdict:
    """Return one engine's verdict on a question."""
    if name == "g4spec" and (machine.cc or (0, 0)) < OLDEST:
        return _own(facts, machine, q)
    row = engine_fact(facts, name)
    version, installed = version_of(facts, machine, name)
    gpus = n_gpus_for(name, machine, q.gpus)
    calc = Calculator(facts, machine, q.target, q.draft, gpus, q.batched, q.split)
    kinds = _kv_types(row, machine, q)
    loadable = [
        o for o in q.target.formats if name in o.engines and holds(o.cc, machine.cc or (0,))
    ]
    option, plans, plan = choose_format(calc, name, loadable, q, kinds)
    refusal, fix = _refusal(facts, machine, q, row, plans, plan)
    s = situation(machine, q, name, version, option, plan.kv if plan else kinds[0], q.context, gpus)
    found = [p for p in facts.all(ProblemFact) if matches(p.when, s)]
    found.sort(key=lambda p: p.rank)
    return EngineVerdict(
        row,
        q.target,
        version,
        installed,
        gpus,
        option,
        plan,
        plans,
        tuple(p for p in found if p.mark == "bad"),
        tuple(p for p in found if p.mark == "warn"),
        tuple(p for p in found if p.mark in ("note", "good")),
        refusal,
        fix,
        s,
    )


def _other_source(target: TargetModel, size: SizeFact | None, name: str) -> tuple[str, str]:
    """Return what an engine loads that cannot load this file or folder, and the fix."""
    kind = "GGUF files of the usual types" if name in GGUF else "checkpoint folders and hub ids"
    named = f"as {size.id} or " if size is not None else ""
    fix = f"name the model {named}by one of these"
    if name in GGUF and target.is_gguf:
        kind = "GGUF files that Ollama did not write"
    if name in GGUF and target.is_local and not target.is_gguf:
        source = shlex.quote(target.given or "")
        fix = f"g4spec convert {source} -o target.gguf, then -m target.gguf"
    return f"it loads {kind}", fix


def _unread(draft: DraftModel, name: str) -> tuple[str, str] | None:
    """Return why an engine does not run a draft of a kind that it has, and the fix; None if it
    does."""
    if draft.is_gguf and name not in GGUF:
        why = "it loads drafts from checkpoint folders and hub ids, not from GGUF files"
        return why, "name the folder or hub id that the file was converted from with -md"
    if draft.engines and name not in draft.engines:
        return (
            "it has no code for a property of this draft, and would draft wrong tokens",
            "run it with g4spec; `g4spec validate --upstream DRAFT.gguf` names the property "
            "(after `g4spec convert`)",
        )
    return None


def _refusal(
    facts: Facts,
    machine: Machine,
    q: Question,
    row: EngineFact,
    plans: tuple[CardMemoryPlan, ...],
    plan: CardMemoryPlan | None,
) -> tuple[str, str]:
    """Return why an engine cannot run a question, other than by a known problem, and the fix."""
    name, size = row.name, facts.find(SizeFact, q.target.size)
    why = unsupported_reason(size) if size is not None and name == "g4spec" else ""
    if q.kv is not None and q.kv not in row.kv_all:
        refusal, fix = f"it has no {q.kv} cache", f"--kv with one of {', '.join(row.kv_all)}"
    elif why:
        refusal, fix = why, "convert, validate and quantize work; run it with llama.cpp"
    elif not machine.gpus and name != "llama.cpp":
        refusal, fix = "it needs an NVIDIA GPU here", 'ask about one with --assume "RTX 3090"'
    elif not [o for o in q.target.formats if name in o.engines]:
        refusal, fix = _other_source(q.target, size, name)
    elif machine.gpus and machine.memory is None:
        refusal, fix = "the GPU's memory could not be read", "ask with --assume"
    elif plan is None or not plan.fits:
        refusal, fix = _too_large(machine, plans, plan, q)
    elif plan.ram and machine.ram_free is not None and plan.ram > machine.ram_free:
        refusal = f"{q.split.flags.strip()} needs {plan.ram / GIB:.1f} GiB of RAM, "
        refusal += f"{machine.ram_free / GIB:.1f} are free"
        fix = ""
    elif name == "g4spec" and (odd := _unrun(q)):
        refusal, fix = odd, "llama.cpp, or a file of another type"
    elif q.draft is not None and q.draft.kind not in row.drafts:
        refusal = f"it has no {q.draft.kind} drafts for Gemma 4"
        if q.draft.kind == NGRAM:
            refusal = "nothing is known about its n-gram lookup with Gemma 4"
        fix = f"ask about {' or '.join(_engines_for(facts, q.draft.kind))}"
    elif q.draft is not None and (unread := _unread(q.draft, name)) is not None:
        refusal, fix = unread
    else:
        return "", ""
    return refusal, fix


def _engines_for(facts: Facts, kind: str) -> list[str]:
    """Return the titles of the engines that run a kind of draft."""
    return [e.title for e in facts.all(EngineFact) if kind in engine_fact(facts, e.name).drafts]


def _too_large(
    machine: Machine, plans: tuple[CardMemoryPlan, ...], plan: CardMemoryPlan | None, q: Question
) -> tuple[str, str]:
    """Return what does not fit; with the fix if there is no known size."""
    if plan is None:
        needs = " or ".join(f"{o.format} needs compute capability {o.cc}" for o in q.target.formats)
        return needs, f"name another type, as {q.target.size}:q4_k_m"
    best = max(plans, key=lambda p: p.largest)
    if best.largest >= LEAST_CONTEXT and q.context:
        longest = f"{best.largest:,} with {best.format} and {best.kv} cache"
        return f"{q.context:,} tokens do not fit, at most {longest}", ""
    need, have = plan.total / GIB, plan.available / GIB
    where = "per GPU" if machine.gpus else "of RAM"
    return (
        f"{plan.format} needs {need:.1f} GiB {where} ({plan.context:,} tokens, {plan.kv} cache), "
        f"{have:.1f} are usable",
        "",
    )


# ---- our own runtime


def unsupported_reason(size: SizeFact) -> str:
    """Return why g4spec's own parser rejects a size, or "" if it accepts it."""
    try:
        runtime_support.target_config(size)
    except Unsupported as problem:
        return str(problem).removeprefix("config.json: ")
    except InputError:
        return ""  # about this made-up configuration, not about the size
    return ""


def _unrun(q: Question) -> str:
    """Return why g4spec's runtime cannot run the named files, or ""."""
    if q.target.refusal or q.draft is None:
        return q.target.refusal
    return f"of the draft, {q.draft.refusal}" if q.draft.refusal else ""


def _own_bytes(q: Question, size: SizeFact | None, context: int) -> int:
    """Return the bytes that the CPU reference needs: float32 weights, plus two copies of the
    largest tensor while loading (see `runtime.memory`)."""
    numbers, work = q.target.formats[0].nbytes / 0.56, OWN_WORK
    if size is not None:
        config = runtime_support.target_config(size)
        counts = [math.prod(spec.shape) for spec in gemma4.tensors(config)]
        numbers = sum(counts) + 2 * max(counts)
        work = workspace_bytes(config, context, PROMPT_BLOCK, 1)
    caches = q.target.caches
    rows = capacity(context, window_of(caches), PROMPT_BLOCK)
    cache = token_bytes(caches, "f32") * pool_positions(context) + slot_bytes(caches, "f32") * rows
    draft = 0
    if q.draft is not None:  # a file is mostly Q8_0, a checkpoint in 16 bits
        draft = (4 if q.draft.is_gguf else 2) * q.draft.nbytes
    return int(4 * numbers + cache + draft + work)


def _own(facts: Facts, machine: Machine, q: Question) -> EngineVerdict:
    """Return g4spec's verdict without a supported GPU: the float32 reference on the CPU."""
    row = engine_fact(facts, "g4spec")
    size = facts.find(SizeFact, q.target.size)
    refusal, fix = "", ""
    why = unsupported_reason(size) if size is not None else ""
    need = _own_bytes(q, None if why else size, q.context or USUAL_CONTEXT)
    free = machine.ram_free
    if why:
        refusal, fix = why, "convert, validate and quantize work; run it with llama.cpp"
    elif q.draft is not None and q.draft.kind not in runtime_support.draft_kinds():
        refusal, fix = f"it has no {q.draft.kind} drafts yet", "llama.cpp or vLLM"
    elif q.kv not in (None, "f32"):
        refusal, fix = f"it has no {q.kv} cache on a CPU", "leave out --kv"
    elif free is not None and need > free:
        refusal = (
            f"its reference runtime works in 32-bit floats on the CPU and needs "
            f"{need / GIB:.0f} GiB, {free / GIB:.0f} GiB are free"
        )
        fix = "use it to convert and validate; run with llama.cpp"
    elif machine.assumed and free is None:
        refusal = (
            f"without a GPU from compute capability 7.0 on its reference runtime works on the CPU "
            f"and needs {need / GIB:.0f} GiB of RAM"
        )
        fix = "use it to convert and validate; run with llama.cpp"
    s = situation(machine, q, "g4spec", __version__, None, None, q.context, 1)
    return EngineVerdict(
        row,
        q.target,
        __version__,
        True,
        1,
        None,
        None,
        (),
        tuple(p for p in facts.all(ProblemFact) if p.mark == "bad" and matches(p.when, s)),
        (),
        (),
        refusal,
        fix,
        s,
    )
