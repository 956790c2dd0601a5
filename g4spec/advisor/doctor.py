"""Builds a diagnosis from facts, machine and question: what runs, what does not, and the fix."""

from __future__ import annotations

from collections.abc import Mapping

from g4spec.advisor import alternatives, engines, summary
from g4spec.advisor.backend_section import backend_section
from g4spec.advisor.diagnosis import Alternative, Diagnosis, split_step
from g4spec.advisor.engine_verdict import EngineVerdict, best_verdict, verdicts_asked
from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import Question, has_few_bits
from g4spec.advisor.lengths import advice_text
from g4spec.advisor.machine import GIB, Machine, upgraded
from g4spec.advisor.memory_needs import GGUF, NGRAM, UNKNOWN_SIZE
from g4spec.advisor.schema import Mark
from g4spec.advisor.survey import URGENT, general_problems, problem_line, survey_sizes


def diagnose(
    facts: Facts, machine: Machine, question: Question | None, engine: str | None = None
) -> Diagnosis:
    """Return the diagnosis of a question; without a question, an overview of all Gemma 4 sizes.

    Args:
        engine: the engine to check; None checks all. The run then counts as possible if an
            installed engine can do it, or any engine if none is installed.
    """
    from g4spec.advisor.doctor_report import machine_section

    title = f"{machine.title}{' (assumed)' if machine.assumed else ''}"
    d = Diagnosis(machine, title)
    machine_section(facts, d)
    if question is None:
        survey_sizes(facts, d)
        general_problems(facts, d)
        return d
    draft = question.draft
    d.question = f"{question.target.title}{' with ' + draft.title if draft else ''} on {title}"
    verdicts = [
        engines.judge(facts, machine, question, name)
        for name in ([engine] if engine else engines.NAMES)
    ]
    requested = verdicts_asked(verdicts, engine)
    d.asked, d.works = True, any(v.works for v in requested)
    best = best_verdict(verdicts, requested)
    after = None
    if not d.works:
        after = _upgraded(facts, machine, question, requested)
        best = after or best
    fixes = {
        v.engine.name: alternatives.fix(
            facts, machine, question, v, _command(question, v, engine or v not in requested)
        )
        for v in verdicts
        if v.refusal
    }
    others = _others(facts, machine, question, verdicts, requested, best, engine)
    if best is not None and others and best.refusal:
        fixes[best.engine.name] = others[0].fix
    _engines(d, verdicts, best, after, fixes)
    if best is not None:
        works = d.works and best.works
        asked = engine or after is not None or not d.works
        reason = "" if asked else _reason(facts, machine, question, verdicts, best)
        d.brief = summary.summarize(
            facts, machine, question, best, works, after is not None, reason, others
        )
        if best.plan is not None and (best.works or machine.gpus):
            _memory(d, best)
        if best.works and best.plan is not None:
            _speed(facts, d, question, best)
    _lengths(facts, d, question, verdicts)
    backend_section(facts, d, question, requested, best)
    _problems(d, verdicts, best)
    _notes(d, question, best)
    _conditions(d, best)
    _steps(d, requested, best, engine, fixes)
    return d


def _command(q: Question, v: EngineVerdict, named: object) -> str:
    """Return the beginning of a command that asks about an engine again. `named`: it must be named
    for that."""
    command = "g4spec doctor" + (f" --engine {v.engine.name}" if named else "")
    return command + (f" --attention-backend {q.backend}" if q.backend else "")


def _reason(
    facts: Facts, machine: Machine, q: Question, verdicts: list[EngineVerdict], best: EngineVerdict
) -> str:
    """Return why an engine that is not installed is shown and not another one that works, or ""."""
    other = next(
        (
            v
            for v in verdicts
            if v.works and v is not best and v.engine.name in ("vllm", "llama.cpp")
        ),
        None,
    )
    if best.installed or not best.works or other is None or other.plan is None:
        return ""
    plan = other.plan
    if best.engine.name == "vllm":
        made = summary.estimate(facts, machine, q, other)
        speed = f", {summary.speed_text(made, q.draft)}" if made else ""
        use = "serves many requests at once. For one at a time, llama.cpp runs it too"
        if best.gpus > 1:
            use = "reads all GPUs at once. llama.cpp runs it too, on one GPU after the other"
        return (
            f"vLLM {use}: {plan.format}, up to {plan.largest:,} tokens with {plan.kv} cache{speed}"
        )
    return (
        f"{other.engine.title} would fill {plan.total / GIB:.1f} of {plan.available / GIB:.1f} GiB "
        f"({plan.format}, {plan.kv} cache, {plan.context:,} tokens)"
    )


def _others(
    facts: Facts,
    machine: Machine,
    q: Question,
    verdicts: list[EngineVerdict],
    requested: list[EngineVerdict],
    best: EngineVerdict | None,
    engine: str | None,
) -> tuple[Alternative, ...]:
    """Return runs that fit if the best verdict does not: with its engine, or else with llama.cpp.
    If it fits only with few bits per weight, return the runs without the draft's file that have
    more."""
    if best is None:
        return ()

    def find(v: EngineVerdict) -> tuple[Alternative, ...]:
        command = _command(q, v, engine or v not in requested)
        return tuple(alternatives.find(facts, machine, q, v.engine.name, command))

    if best.refused:
        llama = [v for v in verdicts if v.engine.name == "llama.cpp" and v is not best]
        return (best.refusal and find(best)) or tuple(a for v in llama for a in find(v))
    if best.works and best.option is not None and q.draft and has_few_bits(best.option):
        other = best.option.format
        return tuple(a for a in find(best) if a.kind in ("draft", "ngram") and other not in a.text)
    return ()


def _upgraded(
    facts: Facts, machine: Machine, q: Question, asked: list[EngineVerdict]
) -> EngineVerdict | None:
    """Return the first verdict in `asked` that would work with the engine's newest version."""
    for v in asked:
        if v.engine.name not in machine.tools:
            continue
        newer = engines.judge(facts, upgraded(machine, v.engine.name), q, v.engine.name)
        if newer.works:
            return newer
    return None


def _engines(
    d: Diagnosis,
    verdicts: list[EngineVerdict],
    best: EngineVerdict | None,
    after: EngineVerdict | None,
    fixes: Mapping[str, str],
) -> None:
    s = d.section("Engines")
    for v in verdicts:
        for i, p in enumerate(v.blockers):
            name = v.title if i == 0 else v.engine.title
            s.add("bad", f"{name}: {p.title}", p.says, p.fix, (p.id,))
        if v.blockers:
            continue
        if v.refusal:
            mark: Mark = "note" if v.engine.name == "g4spec" or "loads" in v.refusal else "bad"
            s.add(mark, f"{v.title}: {v.refusal}", fix=fixes[v.engine.name])
        elif v.unknown:
            p = next(c for c in v.conditions if c.unknown)
            s.add("warn", f"{v.title}: {p.title}", p.says, p.fix, (p.id,))
        else:
            n = len(v.open_conditions)
            more = ""
            if n:
                where = "below" if v is best else "--verbose"
                more = f", with {n} condition{'s' * (n != 1)} ({where})"
            s.add(
                "warn" if n else "good",
                f"{v.title}: {_runs(v)}{more}",
                facts=tuple(p.id for p in v.conditions),
            )
    if after is not None:
        s.add("good", f"after an upgrade, {after.title}: {_runs(after)}")


def _runs(v: EngineVerdict) -> str:
    if v.plan is None:
        return "runs, on the CPU, slowly (32-bit reference)"
    cards = f"{v.gpus} GPUs, " if v.gpus > 1 else ""
    if not v.on_gpu:
        cards = "on the CPU, "
    text = f"runs {v.plan.format}, {cards}{v.plan.kv} cache up to {v.plan.largest:,} tokens"
    return text + (" (without the draft, whose size is not known)" if v.uncounted else "")


def _memory(d: Diagnosis, v: EngineVerdict) -> None:
    assert v.plan is not None
    plan = v.plan
    d.plans.extend(v.plans)
    per_card = " per GPU" if v.gpus > 1 else ""
    like = " with vLLM's figures, an estimate" if v.engine.name == "sglang" else ""
    s = d.section(
        f"Memory{per_card}: {v.engine.title}, {plan.format}, {plan.kv} cache, "
        f"{plan.context:,} tokens (computed{like}; change with -c)"
    )
    for step in plan.items:
        if step.nbytes or step.how == UNKNOWN_SIZE:
            s.add("note", f"{step.nbytes / GIB:7.2f} GiB  {step.name}: {step.how}")
    sign: Mark = "good" if plan.fits else "bad"
    s.add(
        sign,
        f"{plan.total / GIB:7.2f} GiB  of {plan.available / GIB:.2f} GiB usable",
        facts=("memory-formula",),
    )
    limits = ", ".join(
        f"{p.kv} {p.largest:,}" if p.largest >= 256 else f"{p.kv} none" for p in v.plans
    )
    s.add("note", f"largest context by cache type: {limits}", facts=("cache-slots",))


def _speed(facts: Facts, d: Diagnosis, q: Question, v: EngineVerdict) -> None:
    assert v.plan is not None
    estimate = summary.estimate(facts, d.machine, q, v)
    source = f" ({estimate.source})" if estimate is not None else ""
    s = d.section(f"Speed at {v.plan.context:,} tokens, one request{source}")
    if estimate is None:
        s.add("note", summary.NO_SPEED_IN_RAM if v.plan.ram else summary.NO_SPEED)
        return
    s.add(
        "note",
        f"{estimate.low:.0f} to {estimate.high:.0f} tokens/s without a draft: {estimate.basis}",
        facts=estimate.facts,
    )
    if q.draft is not None:
        if estimate.draft_high:
            low, high = estimate.cycle
            cost = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            s.add(
                "note",
                f"{estimate.draft_low:.0f} to {estimate.draft_high:.0f} tokens/s with the draft: "
                f"{min(q.draft.accepted):g} to {max(q.draft.accepted):g} tokens per step are "
                f"published, and a cycle costs {cost} plain steps",
                facts=(*q.draft.ids, *estimate.facts),
            )
        else:
            s.add(
                "note",
                "with the draft: unknown, no acceptance is published for this pair"
                if not q.target.moe
                else "with the draft: unknown, as a longer step reads more experts; measure it",
                facts=q.draft.ids,
            )
    for report in estimate.reports:
        best = " to ".join(f"{x:g}" for x in report.best)
        base = f"{report.base:g} without, " if report.base else ""
        s.add(
            "note",
            f"reported by others ({report.date}): {base}{best} tokens/s with this draft, "
            f"{report.engine}",
            facts=(report.id,),
        )


def _lengths(facts: Facts, d: Diagnosis, q: Question, verdicts: list[EngineVerdict]) -> None:
    if q.draft is None or q.draft.kind == NGRAM:
        return
    s = d.section("Draft length to start with")
    for v in verdicts:
        if v.engine.name == "g4spec":
            continue
        text, ids = advice_text(facts, q.draft, v.situation)
        s.add("note", f"{v.engine.title}: {text}", facts=ids, detail=not v.works)


def _problems(d: Diagnosis, verdicts: list[EngineVerdict], best: EngineVerdict | None) -> None:
    s = d.section("Known problems for this machine and these versions")
    seen: set[str] = set()
    for v in verdicts:
        main = v is best
        for p in (*v.conditions, *v.advice):
            if p.id in seen:
                continue
            seen.add(p.id)
            detail = p.mark == "note" or p.unknown or (not main and p.rank > URGENT)
            problem_line(s, p, v.engine.title if p.when.engine else "", detail)


def _notes(d: Diagnosis, q: Question, best: EngineVerdict | None) -> None:
    notes = [*q.target.notes, *(q.draft.notes if q.draft is not None else ())]
    disk, option = d.machine.disk_free, best.option if best is not None else None
    if disk is not None and option is not None and not q.target.is_local and disk < option.nbytes:
        notes.append(
            f"{option.format} is a download of {option.nbytes / 1e9:.0f} GB, and "
            f"{disk / 1e9:.0f} GB are free on this disk"
        )
    if notes:
        s = d.section("About the files")
        for note in notes:
            s.add("warn", note)


def _conditions(d: Diagnosis, best: EngineVerdict | None) -> None:
    """Add the conditions of the engine shown in detail, and whether the recipe meets them."""
    if best is None or not best.works:
        return
    s = d.section("Conditions", brief=True)
    for p in best.conditions:
        cured = " (the recipe does it)" if p.cured else ""
        s.add("warn", f"{p.title}{cured}", "", p.fix, (p.id,), detail=bool(p.cured))


def _steps(
    d: Diagnosis,
    asked: list[EngineVerdict],
    best: EngineVerdict | None,
    engine: str | None,
    fixes: Mapping[str, str],
) -> None:
    """Add the next steps in order: fix what blocks the requested run, then measure."""
    for v in asked:
        if v.refused and (engine or (v.installed and v.engine.name != "g4spec")):
            fix = fixes.get(v.engine.name)
            for text in dict.fromkeys([p.fix for p in v.blockers] + ([fix] if fix else [])):
                d.steps.append(_step(v, text))
    if d.brief is not None and d.brief.command and d.brief.step not in d.steps:
        d.steps.append(d.brief.step)
        if "recipe" in d.brief.command:
            d.steps.append("measure with and without the draft (the recipe ends with the command)")
    if not d.steps and best is not None:
        shown = [best, *(v for v in asked if v is not best)]
        possible = [v for v in shown if v.on_gpu or v.engine.name in GGUF]
        for v in possible:
            reasons = [*v.blockers, *(p for p in v.conditions if p.unknown)]
            how = reasons[0].fix if reasons else fixes.get(v.engine.name)
            if how:
                d.steps.append(_step(v, how))


def _step(v: EngineVerdict, fix: str) -> str:
    """Return the fix of an engine as a step, which names the engine unless it has a command."""
    if fix.lower().startswith(tuple(name for name in engines.NAMES if name != v.engine.name)):
        return f"{fix} instead of {v.engine.title}"
    return fix if split_step(fix)[1] else f"{v.engine.title}: {fix}"
