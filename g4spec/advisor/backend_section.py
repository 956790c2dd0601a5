"""The section of a diagnosis about attention backends."""

from __future__ import annotations

from g4spec.advisor import backends
from g4spec.advisor.diagnosis import Diagnosis
from g4spec.advisor.engine_verdict import EngineVerdict
from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import Question
from g4spec.advisor.schema import Mark


def backend_section(
    facts: Facts,
    d: Diagnosis,
    q: Question,
    asked: list[EngineVerdict],
    best: EngineVerdict | None,
) -> None:
    """Add the table of attention backends: vLLM's if it was asked about, else that of `best`."""
    cc = d.machine.cc
    v = next((a for a in asked if a.engine.name == "vllm"), best)
    if v is None or cc is None:
        return
    name = v.engine.name
    asks = q.draft is not None and not q.draft.causal
    s = d.section(
        f"Attention backends: {v.engine.title} {v.version}, capability {cc[0]}.{cc[1]} (the target "
        "needs head sizes 256 and 512 and sliding windows"
        + (", the draft non-causal attention)" if asks else ")")
    )
    rows = backends.judge_backends(facts, name, v.version, cc)
    if not rows:
        s.add("note", "nothing is known for this version and GPU")
        return
    for row in rows:
        heads = "/".join(str(h) for h in row.heads) or "none"
        draft = {True: "yes", False: "no", None: "unknown"}[row.draft]
        text = (
            f"{row.name}: head sizes {heads}, non-causal {draft}, sliding {row.sliding}, "
            f"cache {', '.join(row.kv) or 'none'}"
        )
        whole = row.target and (row.draft is True or not asks)
        half = row.target or (row.draft is True and asks)
        mark: Mark = "good" if whole else "warn" if half else "bad"
        use = (
            ""
            if whole or not asks
            else " (target only)"
            if row.target
            else " (draft only)"
            if half
            else ""
        )
        # Unsuitable backends are shown if the run fails, or with --verbose.
        s.add(mark, text + use, row.why, row.fix, (row.fact,), not half and d.works)
    if name == "vllm":
        target, draft_backend = backends.default_backends(facts, v.version, cc, q.draft)
        if target and not any(p.when.cc and p.rank <= 2 for p in v.blockers):
            # If the card is unsupported, vLLM does not get to choose a backend.
            text = f"default choice: target {target}"
            if q.draft is not None:
                text += f", draft {draft_backend or 'none that can (it inherits the target)'}"
            s.add("note", text, facts=("vllm-selection", "vllm-needs"))
