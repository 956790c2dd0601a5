"""Options of `bench`, and the check which of them can be combined."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4spec.cli import _options
from g4spec.cli._output_files import prepare
from g4spec.errors import UsageError

if TYPE_CHECKING:
    from g4spec.measure.prompts import BenchPrompt

MT_BENCH = "mt-bench"

Lengths = Annotated[
    str | None,
    _options.draft_max_option(
        "Draft lengths to measure. Default: sweep.", metavar="sweep|auto|N|N,N,..."
    ),
]
Number = Annotated[
    int | None,
    typer.Option(
        "-n", "--n-predict", min=1, help="New tokens per prompt. Default: 128; with --preset 2048."
    ),
]
Names = Annotated[
    str | None, typer.Option(help="Prompt categories, separated by commas. Default: all.")
]
Count = Annotated[int | None, typer.Option("--prompts", help="Prompts per category. Default: all.")]
Repeats = Annotated[int, typer.Option(help="Number of timed runs per prompt.")]
LongTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Length of the long prompts in tokens. Default: what fits, at most 2048."
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar=MT_BENCH,
        help="Measure as published: 80 questions, one at a time, 2048 tokens, temperature 0.",
    ),
]
Dataset = Annotated[
    Path | None, typer.Option(help="File with the questions of --preset (question.jsonl).")
]
Save = Annotated[Path | None, typer.Option("-o", "--out", help="Write the result as JSON.")]
Report = Annotated[Path | None, typer.Option(help="Write an HTML page with charts.")]


def require_target(
    model: Path | None, preset: str | None, dataset: Path | None, fixed: bool, *writes: Path | None
) -> Path:
    """Return the target; raise UsageError for options that cannot be combined.

    `writes`: files to write (see `prepare`).
    """
    if model is None:
        raise UsageError("no target given", fix="pass a GGUF file with -m")
    if preset not in (None, MT_BENCH):
        raise UsageError("--preset", expected=MT_BENCH, found=preset)
    if dataset is not None and not preset:
        raise UsageError("--dataset needs --preset", fix=f"pass --preset {MT_BENCH} too")
    if preset and fixed:
        raise UsageError(
            "--preset fixes the prompts and temperature 0", fix="leave out --temp and --categories"
        )
    prepare(*writes)
    return model


def read_questions(
    dataset: Path | None, categories: str | None, count: int | None, preset: bool, thinking: bool
) -> tuple[Sequence[str], list[BenchPrompt]]:
    """Return the categories (see `_option_checks.check`), and the prompts of the preset ([] without
    one). Raises InputError for a missing or malformed file of the preset."""
    from g4spec.measure import prompts

    names = prompts.parse_categories(categories)
    if preset:
        path = dataset or Path("question.jsonl")
        return names, prompts.mt_bench(path, count, thinking=thinking)
    return names, []
