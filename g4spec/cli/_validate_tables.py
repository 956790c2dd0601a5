"""Tables of `validate`: rules, how upstream handles a file, errors against the source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from g4spec.cli.render import Output

if TYPE_CHECKING:
    from g4spec.validate import Report


def show_rules(out: Output) -> None:
    """Show all rules."""
    from g4spec.validate import all_rules

    rows = [
        (r.id, str(r.severity), ", ".join(r.on) or "all", r.title) for r in all_rules().values()
    ]
    out.table("Rules", ("id", "severity", "applies to", "requirement"), rows)
    out.result(
        {"rules": [dict(zip(("id", "severity", "on", "title"), row, strict=True)) for row in rows]}
    )


def show_upstream(out: Output, path: Path) -> None:
    """Show how upstream llama.cpp handles a file."""
    from g4spec.validate import upstream

    verdict = upstream.of(path)
    rows = [(limit.case, limit.what, limit.does) for limit in verdict.reasons]
    out.table(
        f"Upstream llama.cpp: {upstream.headline(verdict)}",
        ("case", "this draft has", "upstream"),
        rows,
    )
    out.result(
        {
            "case": verdict.case,
            "reasons": [dict(zip(("case", "what", "does"), row, strict=True)) for row in rows],
        }
    )


def show_errors(out: Output, report: Report) -> None:
    """Show the tensors with the largest errors against the source."""
    worst = sorted(report.tensors, key=lambda t: -t["relative_rms"])[:10]
    columns = ("tensor", "type", "largest error", "relative RMS", "usual RMS")
    rows = [
        (t["name"], t["type"], *(_figure(t[k]) for k in ("max_abs", "relative_rms", "usual_rms")))
        for t in worst
    ]
    out.table("Largest errors against the source", columns, rows)
    out.line("usual RMS: that of normally distributed weights in this type", "dim")


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
