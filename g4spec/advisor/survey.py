"""A machine without a question: every Gemma 4 size, and what is known about the machine."""

from __future__ import annotations

from g4spec.advisor import engines
from g4spec.advisor.choice import Question
from g4spec.advisor.engines import EngineVerdict
from g4spec.advisor.facts import Facts
from g4spec.advisor.lengths import start
from g4spec.advisor.machine import GIB
from g4spec.advisor.schema import Draft, Mark, Problem, Size
from g4spec.advisor.speed import estimate
from g4spec.advisor.subjects import DraftModel, from_row, named_target
from g4spec.advisor.verdict import Diagnosis, Section
from g4spec.advisor.when import Situation, matches


def problem_line(s: Section, p: Problem, engine: str, detail: bool) -> None:
    prefix = (
        f"{engine}: "
        if engine and engine.split(" ", maxsplit=1)[0].lower() not in p.title.lower()
        else ""
    )
    s.add(
        p.mark,
        prefix + p.title,
        p.says + (f" ({p.sure})" if p.sure else ""),
        p.fix,
        (p.id,),
        detail,
    )


def sizes(facts: Facts, d: Diagnosis) -> None:
    """One line a size: what runs, with the assistant that Google publishes for it."""
    s = d.section("Gemma 4 on this machine (with Google's MTP assistant; computed)")
    if not d.machine.gpus:
        _without_gpu(facts, d, s)
        return
    for size in facts.all(Size):
        target = named_target(facts, size)
        draft = _assistant(facts, size)
        found = {
            name: engines.judge(facts, d.machine, Question(target, draft), name)
            for name in ("llama.cpp", "vllm")
        }
        parts = []
        for v in found.values():
            if not v.works or v.plan is None:
                why = v.blockers[0].title if v.blockers else v.refusal
                parts.append(f"{v.engine.title} no ({why})")
            else:
                parts.append(
                    f"{v.engine.title} {v.plan.format}, {v.plan.kv} cache to {v.plan.largest:,}"
                )
        ok = [v.works for v in found.values()]
        mark: Mark = "good" if all(ok) else "warn" if any(ok) else "bad"
        s.add(
            mark,
            f"{size.name}: " + "; ".join(parts) + _pace(facts, d, found, draft),
            facts=(size.id,),
        )
        _other_drafts(facts, d, s, size)


def _pace(
    facts: Facts, d: Diagnosis, found: dict[str, EngineVerdict], draft: DraftModel | None
) -> str:
    """Tokens/s without a draft and the length to start with, by the first engine that works."""
    for name, v in found.items():
        if not v.works or v.plan is None or v.option is None:
            continue
        target = v.target
        gpus = v.gpus if name == "vllm" else 1
        made = estimate(facts, d.machine, target, None, v.option, v.plan.kv, v.plan.context, gpus)
        text = f"; {made.low:.0f} to {made.high:.0f} tokens/s without a draft" if made else ""
        if draft is not None:
            text += f", start with {start(facts, draft, name, d.machine.cc)} drafted"
        return text
    return ""


def _other_drafts(facts: Facts, d: Diagnosis, s: Section, size: Size) -> None:
    """The other published drafts of a size; shown when everything is asked for."""
    for row in facts.all(Draft):
        if row.model != size.id or row.kind == "mtp":
            continue
        question = Question(named_target(facts, size), from_row(row, row.id))
        words = []
        for name in ("llama.cpp", "vllm"):
            v = engines.judge(facts, d.machine, question, name)
            words.append(f"{v.engine.title} {_short(v)}")
        text = f"{size.name} with {row.id}: {'; '.join(words)}"
        s.add("note", text, facts=(row.id,), detail=True)


def _short(v: EngineVerdict) -> str:
    if v.refused or v.plan is None:
        return "no"
    if v.unknown:
        return "unknown"
    if v.uncounted:
        return "yes, memory unknown"
    return f"to {v.plan.largest:,} tokens"


def _without_gpu(facts: Facts, d: Diagnosis, s: Section) -> None:
    for size in facts.all(Size):
        v = engines.judge(facts, d.machine, Question(named_target(facts, size)), "g4spec")
        mark: Mark = "warn" if v.works else "bad"
        s.add(
            mark,
            f"{size.name}: {v.refusal or 'runs on the CPU, slowly (32-bit reference)'}",
            facts=(size.id,),
        )
    d.steps.append('ask about a card: g4spec doctor --assume "RTX 3090" -m 31b -md mtp')
    d.steps.append("convert, quantize and validate need no GPU")


def _assistant(facts: Facts, size: Size) -> DraftModel | None:
    row = next((r for r in facts.all(Draft) if r.model == size.id and r.kind == "mtp"), None)
    return from_row(row, "mtp") if row is not None else None


def general(facts: Facts, d: Diagnosis) -> None:
    """Problems that depend on the machine alone."""
    m = d.machine
    if not m.gpus:
        return
    s = d.section("Known problems for this machine and these versions")
    seen: set[str] = set()
    for name in ("vllm", "llama.cpp"):
        version, installed = engines.version_of(facts, m, name)
        base = Situation(
            engine=name,
            version=version,
            cc=m.cc,
            gpus=len(m.gpus),
            nodes=m.nodes,
            memory=m.memory / GIB if m.memory else None,
            driver=m.driver,
            unified=m.unified,
            wsl=m.wsl,
            mixed=m.mixed,
            nvlink=m.nvlink,
            env=m.env,
            versions=dict(m.tools),
            cards=tuple(g.card for g in m.gpus if g.card),
        )
        for p in sorted(facts.all(Problem), key=lambda p: p.rank):
            if p.id not in seen and matches(p.when, base):
                seen.add(p.id)
                problem_line(s, p, name, p.mark == "note" or (p.rank >= 16 and not installed))
    d.steps.append("ask about a pair: g4spec doctor -m 31b -md mtp -c 32768")
