"""`bench compare`: find what became slower or worse between two results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4spec.cli import _option_checks
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from g4spec.measure.bench_compare import BenchComparison


def reject_bench_options(context: typer.Context) -> None:
    """Raise UsageError for options of `bench` before `compare`, which has its own options."""
    for flag in _option_checks.given_flags(context).values():
        raise UsageError(
            f"{flag} has no effect before `compare`",
            fix="leave it out; options of `compare` come after it",
        )


def compare(
    old: Annotated[Path, typer.Argument(help="Earlier result (from `bench -o`).")],
    new: Annotated[Path, typer.Argument(help="Later result.")],
    tolerance: Annotated[str, typer.Option(help="Largest slowdown that is accepted.")] = "5%",
    force: Annotated[bool, typer.Option(help="Compare even if settings differ.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two results; exit with 1 if something became worse."""
    from g4spec.measure import bench_compare as comparing

    out = Output(json, quiet)
    comparison = comparing.compare(
        comparing.read_result(old),
        comparing.read_result(new),
        comparing.tolerance(tolerance),
        force=force,
    )
    _show(comparison, out)
    out.result(comparison.json())
    if comparison.regressions:
        count = len(comparison.regressions)
        raise CheckFailed(
            f"{count} regression{'s' * (count != 1)}", found=comparison.regressions[0]
        )


def _show(comparison: BenchComparison, out: Output) -> None:
    """Show the table of ratios, the warnings and the regressions."""
    rows = [
        (
            c.category,
            "plain" if c.length == 0 else str(c.length),
            f"{c.old_speed:.1f}",
            f"{c.new_speed:.1f}",
            f"{c.speed:.3f}",
            f"{c.old_acceptance:.1%}",
            f"{c.new_acceptance:.1%}",
            c.worse or "",
        )
        for c in comparison.changes
    ]
    columns = (
        "prompts",
        "drafted",
        "old tokens/s",
        "new tokens/s",
        "new/old",
        "old accepted",
        "new accepted",
        "worse",
    )
    out.table("New against old", columns, rows)
    for warning in comparison.warnings:
        out.note(warning)
    for regression in comparison.regressions:
        out.line(regression, style="bad")
    if not comparison.regressions:
        out.line("Nothing became worse.", style="good")
