"""Runs the sweep of `bench`, and writes and shows the results of `bench` and `demo`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4spec.cli import _engine, _signals
from g4spec.cli._output_files import write
from g4spec.cli.render import Output
from g4spec.errors import CheckFailed

if TYPE_CHECKING:
    from g4spec.measure.bench import BenchConfig
    from g4spec.measure.prompts import BenchPrompt
    from g4spec.runtime.engine import Engine


LEGEND = (
    "drafted: draft length, plain without a draft. x plain: speed relative to plain, median of the "
    "repeats. by prompt: lowest and highest tokens/step of a prompt. accepted: percentage of the "
    "drafted tokens. draft ms, step ms: time of a proposal, and of the target's step after it."
)
"""Explanation of the columns of a result."""


def write_files(
    data: Mapping[str, Any], out: Output, save: Path | None, report: Path | None
) -> None:
    """Write the JSON file and the HTML page, each if its path is not None (see `prepare`)."""
    if save is not None:
        write(save, json.dumps(data, indent=1) + "\n", out)
    if report is not None:
        from g4spec.measure import bench_report as page

        write(report, page.page(data), out)


def show(data: Mapping[str, Any], out: Output) -> None:
    """Show the table, the notes and the recommendation."""
    rows = [
        (
            r["category"],
            "plain" if r["length"] == 0 else str(r["length"]),
            f"{r['tokens_per_second']:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['committed']:.2f}",
            f"{r['committed_range'][0]:.2f}-{r['committed_range'][1]:.2f}",
            f"{r['acceptance']:.1%}" if r["length"] else "",
            f"{r['draft_ms']:.1f}",
            f"{r['step_ms']:.1f}",
            f"{r['prefill_tokens_per_second']:.0f}",
        )
        for r in data["rows"]
    ]
    columns = (
        "prompts",
        "drafted",
        "tokens/s",
        "x plain",
        "tokens/step",
        "by prompt",
        "accepted",
        "draft ms",
        "step ms",
        "prefill/s",
    )
    spare = ("accepted", "tokens/step", "step ms", "draft ms", "prefill/s", "by prompt")
    out.table("Draft lengths", columns, rows, spare)
    out.line(LEGEND, "dim")
    for note in data["notes"]:
        out.note(note)
    out.line(data["recommendation"]["words"], style="bold")
    for name in ("tie_words", "auto_words"):
        if data["recommendation"][name]:
            out.line(data["recommendation"][name])


def show_averages(rows: Sequence[Mapping[str, Any]], out: Output) -> None:
    """Show throughput over all prompts with its range, as serving benchmarks report it."""
    for r in (r for r in rows if r["category"] == rows[-1]["category"]):
        name = f"{r['length']} drafted" if r["length"] else "plain"
        low, high = r["prompt_range"]
        text = f"{name}: {r['tokens_per_second']:.2f} tokens/s ({low:.1f} to {high:.1f} by prompt)"
        if r["length"]:
            low, high = r["acceptance_range"]
            text += (
                f", {r['ratio']:.2f} x plain, acceptance {r['acceptance']:.1%} "
                f"({low:.1%} to {high:.1%})"
            )
        out.line(text)


def require_identical(data: Mapping[str, Any]) -> None:
    """Raise CheckFailed if a draft length changed a text."""
    if data["differences"]:
        from g4spec.measure.prompts import title

        d, count = data["differences"][0], len(data["differences"])
        raise CheckFailed(
            f"{count} text{' differs' if count == 1 else 's differ'} from plain decoding; first: "
            f"{title(d['prompt'])}, draft length {d['length']}, token {d['index']}",
            expected=d["plain"],
            found=d["speculative"],
            fix="run `g4spec verify` for details",
        )


def run(
    engine: Engine,
    texts: Sequence[BenchPrompt],
    config: BenchConfig,
    idle: int | None,
    origin: dict[str, Any],
    out: Output,
    save: Path | None,
    report: Path | None,
    with_averages: bool,
) -> None:
    """Measure, write and show; raise CheckFailed if a draft changed a text."""
    from g4spec.measure import bench, recommendation

    with _signals.noted(out, "nothing was measured"), out.progress("measuring") as progress:
        result = bench.sweep(engine, texts, config, idle=idle, progress=progress)
    advice = recommendation.recommend(result.rows, bench.longest_proposal(engine))
    data = result.json(origin, advice.json())
    write_files(data, out, save, report)  # first: showing fails if the reader of stdout has gone
    show(data, out)
    _engine.note_ops_without_kernel(engine, out)
    if with_averages:
        show_averages(data["rows"], out)
    out.result(data)
    raise_failures(data)


def raise_failures(data: Mapping[str, Any]) -> None:
    """Raise CheckFailed if a draft changed a text, KeyboardInterrupt if Ctrl-C ended the run.

    Must be called after the results are shown and written.
    """
    require_identical(data)
    if data["interrupted"]:
        raise KeyboardInterrupt
