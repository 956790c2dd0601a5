"""`g4spec quantize`: a GGUF with its matrices in another type."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4spec.cli import _inputs, _types
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import UsageError

if TYPE_CHECKING:
    from g4spec.validate.loss import Loss


def command(
    source: Annotated[Path, typer.Argument(help="A GGUF file, or hub id of one.")],
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    type: _types.Type = "q8_0",
    allow_requantize: Annotated[
        bool,
        typer.Option("--allow-requantize", help="Accept sources that are quantized already."),
    ] = False,
    tensor_type: _types.TensorTypes = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Importance matrix (`g4spec imatrix`, llama-imatrix): "
            "weighs the errors by how large each column's inputs are.",
        ),
    ] = None,
    split_max_size: _types.SplitMaxSize = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would happen to each tensor.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Show the error of each tensor that changed its type.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a GGUF again with its matrices in another type; all metadata is kept."""
    if report and dry_run:
        raise UsageError("--report needs the written file", fix="leave out --dry-run")
    from g4spec import convert
    from g4spec.gguf import imatrix as importance
    from g4spec.validate import loss

    output, parts = Output(json, quiet), _types.split_size(split_max_size)
    convert.check_arguments(out, type, dry_run, tensor_type or ())  # before anything is downloaded
    weights = importance.read(imatrix) if imatrix else None
    source = _inputs.resolve(source, output, "gguf")
    with output.progress(f"quantizing {source.name}") as progress:
        result = convert.quantize(
            source,
            out,
            type,
            allow_requantize=allow_requantize,
            tensor_types=tensor_type or (),
            importance=weights,
            split_max_size=parts,
            dry_run=dry_run,
            progress=progress,
        )
    if not report:
        _types.show(result, output)
        return
    with output.progress(f"comparing {result.out.name}") as progress:
        found = loss.losses(source, result.out, progress)
    total = loss.total(found)
    _show(found, output)
    if total:
        output.line(
            f"all of them: {total.bits:.2f} bits a weight, relative RMS error "
            f"{total.relative_rms:.3%}, largest error {total.max_abs:.3g}"
        )
    _types.show(
        result,
        output,
        report=[f.json() for f in found],
        report_total=total.json() if total else None,
    )


def _show(found: list[Loss], out: Output) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            f.difference.name,
            f.difference.source,
            f.difference.type,
            f"{f.bits:.2f}",
            f"{f.difference.relative_rms:.3%}",
            f"{f.difference.max_abs:.3g}",
        )
        for f in found
    ]
    columns = ("tensor", "was", "is", "bits a weight", "relative RMS error", "largest error")
    out.table("What it cost", columns, rows)
