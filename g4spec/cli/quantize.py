"""`g4spec quantize`: a GGUF with its matrices in another type."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli import _inputs, _types
from g4spec.cli.render import Json, Output, Quiet


def command(
    source: Annotated[Path, typer.Argument(help="A GGUF file, or hub id of one.")],
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    type: _types.Type = "q8_0",
    allow_requantize: Annotated[
        bool,
        typer.Option("--allow-requantize", help="Accept sources that are quantized already."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would happen to each tensor.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a GGUF again with its matrices in another type; all metadata is kept."""
    from g4spec import convert

    said = Output(json, quiet)
    source = _inputs.local(source, said, "gguf")
    with said.progress(f"quantizing {source.name}") as progress:
        result = convert.quantize(source, out, type, allow_requantize=allow_requantize,
                                  dry_run=dry_run, progress=progress)  # fmt: skip
    _types.show(result, said)
