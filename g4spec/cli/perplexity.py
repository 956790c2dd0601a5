"""`g4spec perplexity`: measure how well a target predicts a text, and what quantization costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4spec.cli import _engine, _inputs, _options, _signals
from g4spec.cli.render import Json, Output, Quiet

if TYPE_CHECKING:
    from g4spec.measure.perplexity import BaseComparison, ValueWithError


def command(
    model: _options.Model[Path],
    file: Annotated[Path, typer.Argument(help="Text file; - is stdin.")],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="Base to compare with, for example the BF16 file: shows the KL divergence from "
            "it. Both models are in memory at once.",
        ),
    ] = None,
    ctx_size: _options.ChunkSize = 512,
    chunks: _options.Chunks = None,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    threads: _options.Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a target's perplexity, or KL divergence from a base.

    Chunks and figures are those of `llama-perplexity --kl-divergence`. `--cache-type` applies to
    the model only; the base runs with the default.
    """
    output, text = Output(json, quiet), _inputs.read_text(file)
    _inputs.check_exists(model, against)
    with _signals.noted(output, "nothing was measured"):
        from g4spec.measure import perplexity
        from g4spec.measure import text_chunks as chunking

        setups = [_engine.Setup(ctx_size, None, None, device, kind) for kind in (cache_type, None)]
        model = _engine.target_file(model, setups[0], output)
        base = None
        if against is not None:
            against = _engine.target_file(against, setups[1], output)
        engine = _engine.load(model, None, setups[0], output)
        if against is not None:
            base = _engine.load(against, None, setups[1], output)
        parts = chunking.split_text(engine.tokenizer, text, ctx_size, chunks)
        with output.progress(f"reading {file.name}") as progress:
            result = perplexity.measure(engine, parts, base, progress)
    _engine.note_ops_without_kernel(engine, output)
    output.line(
        f"perplexity {_with_error(result.perplexity)}: {result.tokens:,} tokens, the second half "
        f"of each of {result.chunks} chunk{'s' * (result.chunks != 1)} of {result.size}"
    )
    if result.against is not None:
        _show_comparison(result.against, output)
    output.result(result.json())


def _show_comparison(result: BaseComparison, out: Output) -> None:
    rows = [
        ("base's perplexity", _with_error(result.base)),
        ("perplexity over the base's", _with_error(result.ratio, 5)),
        ("mean KL divergence", _with_error(result.divergence, 6)),
        *(
            (
                f"KL divergence, {p} % are below" if p != "100" else "largest KL divergence",
                f"{x:.6f}",
            )
            for p, x in result.divergences.items()
            if float(p) >= 50
        ),
        ("same likeliest token", _with_error(result.same_top, 3, 100)),
        ("RMS change of the token probability", _with_error(result.moved, 3, 100)),
    ]
    out.table("Against the base", ("figure", "value"), rows)


def _with_error(figure: ValueWithError, digits: int = 4, percent: int = 1) -> str:
    unit = " %" if percent == 100 else ""
    return f"{figure.value * percent:.{digits}f} ± {figure.error * percent:.{digits}f}{unit}"
