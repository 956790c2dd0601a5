"""`bench --parallel N`: measure several streams at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4spec.cli import _bench_results, _engine, _signals
from g4spec.cli._output_files import write
from g4spec.cli.render import Output
from g4spec.errors import UsageError

if TYPE_CHECKING:
    from g4spec.measure.bench import BenchConfig
    from g4spec.measure.prompts import BenchPrompt
    from g4spec.runtime.engine import Engine

LEGEND = (
    "drafted: draft length, plain without a draft. total tokens/s: of all streams. x plain: speed "
    "relative to plain, median of the repeats. first token ms: time from a request to its first "
    "token. between tokens ms: time since the previous step of the text, divided by its tokens. "
    "Both are medians, and p95 beside each is what 95% of them do not exceed. tokens/step: of one "
    "text. accepted: percentage of the drafted tokens."
)
"""Explanation of the columns of a result."""

Parallel = Annotated[
    int, typer.Option("-np", "--parallel", metavar="N", help="Number of texts generated at once.")
]


def check(streams: int, report: Path | None = None) -> None:
    """Raise UsageError for --report with more than one stream."""
    if streams > 1 and report is not None:
        raise UsageError("--report shows one stream only", fix="leave out --report or --parallel")


def run(
    engine: Engine,
    texts: Sequence[BenchPrompt],
    config: BenchConfig,
    streams: int,
    origin: dict[str, Any],
    out: Output,
    save: Path | None,
) -> None:
    """Measure, write and show; raise CheckFailed if a draft changed a text."""
    from g4spec.measure import bench_streams

    with _signals.noted(out, "nothing was measured"), out.progress("measuring") as progress:
        result = bench_streams.sweep(engine, texts, config, streams, progress=progress)
    data = result.json(origin)
    if save is not None:  # first: showing fails if the reader of stdout has gone
        write(save, json.dumps(data, indent=1) + "\n", out)
    show(data, out)
    _engine.note_ops_without_kernel(engine, out)
    out.result(data)
    _bench_results.raise_failures(data)


def show(data: Mapping[str, Any], out: Output) -> None:
    """Show the table and the notes."""
    rows = [
        (
            "plain" if r["length"] == 0 else str(r["length"]),
            f"{r['tokens_per_second']:.1f}",
            f"{r['ratio']:.2f}",
            *(
                f"{1000 * r[key]:.1f}"
                for key in (
                    "first_token_median",
                    "first_token_p95",
                    "between_tokens_median",
                    "between_tokens_p95",
                )
            ),
            f"{r['committed']:.2f}",
            f"{r['acceptance']:.1%}" if r["length"] else "",
        )
        for r in data["rows"]
    ]
    columns = (
        "drafted",
        "total tokens/s",
        "x plain",
        "first token ms",
        "p95",
        "between tokens ms",
        "p95",
        "tokens/step",
        "accepted",
    )
    out.table(f"{data['rows'][0]['streams']} streams at once", columns, rows)
    out.line(LEGEND, "dim")
    for note in data["notes"]:
        out.note(note)
