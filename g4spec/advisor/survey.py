"""Overview of a machine without a question: all Gemma 4 sizes, and known problems."""

from __future__ import annotations

from g4spec.advisor import alternatives, engines
from g4spec.advisor.alternatives import mtp_assistant
from g4spec.advisor.conditions import matches
from g4spec.advisor.diagnosis import Diagnosis, Section
from g4spec.advisor.engine_verdict import EngineVerdict, best_verdict, verdicts_asked
from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import Question
from g4spec.advisor.lengths import start_length
from g4spec.advisor.machine import assume_options
from g4spec.advisor.named_models import DraftModel, from_row, named_target
from g4spec.advisor.schema import DraftFact, Mark, ProblemFact, SizeFact
from g4spec.advisor.summary import estimate

URGENT = 5
"""Highest rank of problems that are shown for every engine, not only for the best one."""


def problem_line(s: Section, p: ProblemFact, engine: str, detail: bool) -> None:
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


def survey_sizes(facts: Facts, d: Diagnosis) -> None:
    """Add one line per size: which engines run it with Google's MTP assistant. The mark is that of
    `diagnose` for this size: a size works if one engine runs it."""
    names = ("llama.cpp", "vllm") if d.machine.gpus else ("llama.cpp", "g4spec")
    where = "" if d.machine.gpus else ", on the CPU"
    s = d.section(f"Gemma 4 on this machine{where} (with Google's MTP assistant; computed)")
    runs = ""
    for size in facts.all(SizeFact):
        draft = mtp_assistant(facts, size)
        question = Question(named_target(facts, size), draft)
        verdicts = [engines.judge(facts, d.machine, question, n) for n in engines.NAMES]
        found = {n: next(v for v in verdicts if v.engine.name == n) for n in names}
        mark, why, fix = _mark(verdicts)
        runs = runs or (size.id if mark != "bad" else "")
        text = "; ".join(_fits(v) for v in found.values()) + _pace(facts, d, found, draft)
        if mark == "bad":
            fix = alternatives.fix(facts, d.machine, question, found["llama.cpp"], "g4spec doctor")
        s.add(mark, f"{size.name}: {text}", why, fix, (size.id,))
        _other_drafts(facts, d, s, size)
    if not d.machine.gpus:
        s.add(
            "note",
            "g4spec's own runtime computes in 32-bit floats on a CPU: it is for checking "
            "drafts, not for these sizes",
        )
    again = assume_options(d.machine)
    if runs:
        d.steps.append(f"g4spec doctor -m {runs} -md mtp{again}")
    if not d.machine.gpus and not d.machine.assumed:
        d.steps.append('ask about a GPU: g4spec doctor --assume "RTX 3090"')


def _mark(verdicts: list[EngineVerdict]) -> tuple[Mark, str, str]:
    """Return the mark of a size, its condition and its fix if it has one."""
    requested = verdicts_asked(verdicts)
    best = best_verdict(verdicts, requested)
    if best is None or not best.works or all(v.refused for v in requested):
        return "bad", "", ""
    if not best.open_conditions:
        return "good", "", ""
    first = best.open_conditions[0]
    return "warn", f"condition of {best.engine.title}: {first.title}", first.fix


def _fits(v: EngineVerdict) -> str:
    """Describe briefly how an engine runs a size, or why it cannot."""
    if v.engine.name == "g4spec" and not v.works:
        return "g4spec no"
    if not v.works:
        return f"{v.engine.title} no ({v.blockers[0].title if v.blockers else v.refusal})"
    if v.plan is None:
        return f"{v.engine.title} in 32-bit floats, slowly"
    return (
        f"{v.engine.title} {v.plan.format}, up to {v.plan.largest:,} tokens with {v.plan.kv} cache"
    )


def _pace(
    facts: Facts, d: Diagnosis, found: dict[str, EngineVerdict], draft: DraftModel | None
) -> str:
    """Return plain tokens/s and the initial draft length, for the first engine that works."""
    for v in found.values():
        if not v.works or v.plan is None:
            continue
        target = v.target
        speed = estimate(facts, d.machine, Question(target), v)
        text = f"; {speed.low:.0f} to {speed.high:.0f} tokens/s without a draft" if speed else ""
        if draft is not None:
            n = start_length(facts, draft, v.situation)
            text += f"{',' if speed else ';'} draft length {n} to start with"
        return text
    return ""


def _other_drafts(facts: Facts, d: Diagnosis, s: Section, size: SizeFact) -> None:
    """Add the other published drafts of a size; shown with --verbose."""
    for row in facts.all(DraftFact):
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


def general_problems(facts: Facts, d: Diagnosis) -> None:
    """Add the problems that depend only on the machine."""
    m = d.machine
    if not m.gpus:
        return
    s = d.section("Known problems for this machine and these versions")
    seen: set[str] = set()
    for name in ("vllm", "llama.cpp"):
        version, installed = engines.version_of(facts, m, name)
        base = engines.machine_situation(m, name, version, len(m.gpus))
        for p in sorted(facts.all(ProblemFact), key=lambda p: p.rank):
            if p.id not in seen and matches(p.when, base):
                seen.add(p.id)
                quiet = p.mark == "note" or p.rank > URGENT
                problem_line(s, p, name, quiet or (p.rank >= 16 and not installed))
