"""`g4spec imatrix`: mean squared inputs of a model's matrices, for `quantize --imatrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli import _engine, _inputs, _options, _signals
from g4spec.cli.render import Json, Output, Quiet


def command(
    model: _options.Model[Path],
    file: Annotated[
        Path, typer.Argument(help="Text file similar to what the model is used for; - is stdin.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("imatrix.gguf"),
    ctx_size: _options.ChunkSize = 512,
    chunks: _options.Chunks = None,
    threads: _options.Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Collect an importance matrix from a text, for `quantize`.

    Writes llama.cpp's GGUF format. Runs on the CPU.
    """
    output, text = Output(json, quiet), _inputs.read_text(file)
    _inputs.check_exists(model)
    with _signals.noted(output, f"{out} was not written"):
        from g4spec.gguf import imatrix
        from g4spec.measure import importance
        from g4spec.measure import text_chunks as chunking

        imatrix.check_output(out)
        setup = _engine.Setup(ctx_size, None, None, "cpu", None)
        model = _engine.target_file(model, setup, output)
        engine = _engine.load(model, None, setup, output)
        parts = chunking.split_text(engine.tokenizer, text, ctx_size, chunks)
        with output.progress(f"reading {file.name}") as progress:
            matrix = importance.collect(engine, parts, file.name, progress)
        imatrix.save(out, matrix)
    unused_experts = sum(int((e.counts == 0).sum()) for e in matrix.entries.values())
    if unused_experts:
        output.note(
            f"{unused_experts} experts were never chosen and get equal weights: use a longer text"
        )
    output.line(
        f"wrote {out}: {len(matrix.entries)} matrices, {matrix.chunks} "
        f"chunk{'s' * (matrix.chunks != 1)} of {matrix.chunk_size} tokens"
    )
    output.result(
        {
            "out": str(out),
            "matrices": len(matrix.entries),
            "chunks": matrix.chunks,
            "chunk_size": matrix.chunk_size,
            "experts_never_chosen": unused_experts,
        }
    )
