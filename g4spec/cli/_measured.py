"""What `bench` and `demo` do with a finished sweep: keep it, draw it, say it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4spec.cli.render import Output
from g4spec.errors import CheckFailed, EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from g4spec.runtime.bench import Result

MT_BENCH = "mt-bench"


def keep(data: Mapping[str, Any], out: Output, save: Path | None, report: Path | None) -> None:
    """Write the JSON file and the HTML page, as far as they were asked for (see `prepare`)."""
    if save is not None:
        save.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        out.note(f"wrote {save}")
    if report is not None:
        from g4spec.runtime import report as page

        page.write(data, report)
        out.note(f"wrote {report}")


def show(data: Mapping[str, Any], out: Output) -> None:
    """The table, the notes and the recommendation."""
    rows = [
        (r["category"], "plain" if r["length"] == 0 else str(r["length"]),
         f"{r['tokens_per_second']:.1f}", f"{r['ratio']:.2f}", f"{r['committed']:.2f}",
         f"{r['committed_range'][0]:.2f}-{r['committed_range'][1]:.2f}",
         f"{r['acceptance']:.1%}" if r["length"] else "", f"{r['draft_ms']:.1f}",
         f"{r['step_ms']:.1f}", f"{r['prefill_tokens_per_second']:.0f}")
        for r in data["rows"]
    ]  # fmt: skip
    columns = ("prompts", "drafted", "tokens/s", "x plain", "tokens/cycle", "by prompt",
               "accepted", "draft ms", "step ms", "prefill/s")  # fmt: skip
    out.table("Draft lengths", columns, rows)
    for note in data["notes"]:
        out.note(note)
    out.line(data["recommendation"]["words"], style="bold")
    if data["recommendation"]["auto_words"]:
        out.line(data["recommendation"]["auto_words"])


def averages(rows: Sequence[Mapping[str, Any]], out: Output) -> None:
    """Throughput over all prompts with its range, the way serving benchmarks report it."""
    for r in (r for r in rows if r["category"] == rows[-1]["category"]):
        name = f"{r['length']} drafted" if r["length"] else "plain"
        low, high = r["prompt_range"]
        text = f"{name}: {r['tokens_per_second']:.2f} tokens/s ({low:.1f} to {high:.1f} by prompt)"
        if r["length"]:
            low, high = r["acceptance_range"]
            text += (f", {r['ratio']:.2f} x plain, acceptance {r['acceptance']:.1%} "
                     f"({low:.1%} to {high:.1%})")  # fmt: skip
        out.line(text)


def require_identical(data: Mapping[str, Any]) -> None:
    """Raises CheckFailed when a draft length changed a text."""
    if data["differences"]:
        d = data["differences"][0]
        raise CheckFailed(
            f"{len(data['differences'])} texts differ from plain decoding; first: prompt "
            f"{d['prompt']}, draft length {d['length']}, token {d['index']}",
            expected=d["plain"], found=d["speculative"], fix="run `g4spec verify` for details",
        )  # fmt: skip


def finish(
    result: Result,
    origin: dict[str, Any],
    out: Output,
    save: Path | None,
    report: Path | None,
    averages_too: bool,
) -> None:
    """Keep and show a result; CheckFailed if a draft changed a text."""
    from g4spec.runtime import recommendation

    data = result.json(origin, recommendation.recommend(result.rows).json())
    keep(data, out, save, report)
    show(data, out)
    if names := data["provenance"]["ops_without_kernel"]:
        out.note(f"ran as torch on the GPU, slower than a kernel: {', '.join(names)}")
    if averages_too:
        averages(data["rows"], out)
    out.result(data)
    require_identical(data)


def prepare(*paths: Path | None) -> None:
    """Make the folders of what will be written: after hours of measuring it is too late to find
    out that it cannot be."""
    for path in paths:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise UsageError(f"{path} is a folder", expected="the name of a file to write")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise EnvironmentProblem(f"cannot write {path}: permission denied")


def checked(model: Path | None, preset: str | None, fixed: bool, *writes: Path | None) -> Path:
    """The target, if the options mean something together. `writes`: see `prepare`."""
    if model is None:
        raise UsageError("-m is missing: pass the target, a GGUF file")
    if preset not in (None, MT_BENCH):
        raise UsageError("--preset", expected=MT_BENCH, found=preset)
    if preset and fixed:
        raise UsageError("--preset fixes the prompts and temperature 0",
                         fix="leave out --temp and --categories")  # fmt: skip
    prepare(*writes)
    return model
