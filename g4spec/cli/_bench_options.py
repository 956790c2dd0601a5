"""Options of `bench`, and which of them mean something together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli._output_files import prepare
from g4spec.errors import UsageError

MT_BENCH = "mt-bench"

Model = Annotated[Path | None, typer.Option("-m", "--model", help="Target: a GGUF file.")]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--draft-max",
        "--spec-draft-n-max",
        metavar="sweep|auto|N|N,N,...",
        help="Draft lengths to measure. Default: sweep.",
    ),
]
Number = Annotated[int | None, typer.Option("-n", "--n-predict", min=1, help="New tokens. [128]")]
Names = Annotated[str | None, typer.Option(help="Prompt categories, with commas. Default: all.")]
Count = Annotated[int | None, typer.Option("--prompts", help="Prompts a category. Default: all.")]
Repeats = Annotated[int, typer.Option(help="How often each prompt is timed.")]
LongTokens = Annotated[int | None, typer.Option(min=1, help="Of long prompts. [at most 2048]")]
Preset = Annotated[
    str | None,
    typer.Option(metavar=MT_BENCH, help="80 questions, one stream, 2048 tokens, temperature 0."),
]
Dataset = Annotated[Path | None, typer.Option(help="The preset's questions: question.jsonl.")]
Save = Annotated[Path | None, typer.Option("-o", "--out", help="Keep the result as JSON.")]
Report = Annotated[Path | None, typer.Option(help="Write a page with charts (HTML).")]


def require_target(
    model: Path | None, preset: str | None, dataset: Path | None, fixed: bool, *writes: Path | None
) -> Path:
    """The target, if the options mean something together. `writes`: see `prepare`."""
    if model is None:
        raise UsageError("-m is missing: pass the target, a GGUF file")
    if preset not in (None, MT_BENCH):
        raise UsageError("--preset", expected=MT_BENCH, found=preset)
    if dataset is not None and not preset:
        raise UsageError("--dataset is for --preset", fix=f"pass --preset {MT_BENCH} too")
    if preset and fixed:
        raise UsageError(
            "--preset fixes the prompts and temperature 0", fix="leave out --temp and --categories"
        )
    prepare(*writes)
    return model
