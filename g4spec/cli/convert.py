"""`g4spec convert`: write a checkpoint as GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli import _inputs, _types
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import UsageError


def command(
    source: Annotated[
        Path,
        typer.Argument(help="Checkpoint folder, hub id, or GGUF in another program's dialect."),
    ],
    target: Annotated[
        Path | None,
        typer.Option(help="The draft's target (folder, GGUF or hub id); provides the tokenizer."),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="GGUF file to write.")] = None,
    type: _types.Type = "q8_0",
    tensor_type: _types.TensorTypes = None,
    split_max_size: _types.SplitMaxSize = None,
    dry_run: _types.DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert a draft or target to GGUF, for llama.cpp and g4spec.

    The kind is detected from the content. Every tensor is either used once or dropped with a
    reason that is shown; otherwise the conversion stops before it writes anything.
    """
    if out is None:
        if not dry_run:
            raise UsageError("no output file given", expected="-o FILE.gguf, or --dry-run")
        out = Path(f"{source.name.split(':')[0]}-{type}.gguf")
    from g4spec import convert

    output, parts = Output(json, quiet), _types.split_size(split_max_size)
    convert.check_arguments(out, type, dry_run, tensor_type or ())  # before anything is downloaded
    source = _inputs.resolve(source, output)
    if target is not None:
        target = _inputs.resolve(target, output, "tokenizer")
    with output.progress("converting") as progress:
        result = convert.convert(
            source,
            out,
            target=target,
            type=type,
            tensor_types=tensor_type or (),
            split_max_size=parts,
            dry_run=dry_run,
            progress=progress,
        )
    _types.show(result, output)
