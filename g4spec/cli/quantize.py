"""`g4spec quantize`: write a GGUF with its matrices in another quant type."""

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
    source: Annotated[Path, typer.Argument(help="GGUF file, or the hub id of one.")],
    out: Annotated[Path, typer.Argument(help="GGUF file to write.")],
    type: _types.Type = "q8_0",
    allow_requantize: Annotated[
        bool,
        typer.Option("--allow-requantize", help="Accept a source that is already quantized."),
    ] = False,
    tensor_type: _types.TensorTypes = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Importance matrix (from `g4spec imatrix` or llama-imatrix): weighs quantization "
            "errors by the mean squared input of each column.",
        ),
    ] = None,
    split_max_size: _types.SplitMaxSize = None,
    dry_run: _types.DryRun = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Show the quantization error of each tensor whose type changed."
        ),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Change the quant type of a GGUF's matrices; keep its metadata."""
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
            f"all tensors: {total.bits:.2f} bits per weight, relative RMS error "
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
    columns = ("tensor", "from", "to", "bits per weight", "relative RMS error", "largest error")
    out.table("Quantization errors", columns, rows)
