"""`bench --synthetic`: speed at a published shape, with random weights and no download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from g4spec.cli import _measured
from g4spec.cli.render import Output
from g4spec.errors import UsageError

Size = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Time random weights at a published shape on the GPU "
                 "instead of a file: 31b, 26b-a4b, 12b, e4b or e2b."),
]
Type = Annotated[str, typer.Option("--type", help="Of the synthetic weights.")]
Accepted = Annotated[int, typer.Option("--accept-length", help="Tokens a synthetic cycle commits.")]


def run(
    name: str,
    type: str,
    accept_length: int,
    n_ctx: int | None,
    device: str,
    cache_type: str | None,
    out: Output,
    save: Path | None,
) -> None:
    """Measure and show; `n_ctx` adds a context to those that are timed."""
    from g4spec.runtime import devices, steps

    if device == "cpu":
        raise UsageError("--synthetic measures a GPU", fix="leave out --device cpu")
    contexts = tuple(sorted({*steps.CONTEXTS, *([n_ctx] if n_ctx else [])}))
    protocol = steps.Protocol(type=type, contexts=contexts, accept_length=accept_length)
    steps.check(name, type)
    _measured.prepare(save)
    ops: Any = devices.select("cuda" if device == "auto" else device, cache_type)[0]
    data = steps.measure(name, ops, protocol)
    _measured.keep(data, out, save, None)
    _show(data, out)
    out.result(data)


def _show(data: dict[str, Any], out: Output) -> None:
    out.line(f"SYNTHETIC: {data['label']}", "bold")
    columns = ("context", "prefill/s", "1 row ms", "4 rows", "8 rows", "16 rows", "draft ms",
               "cycle ms", "sustained", "tokens/s")  # fmt: skip
    keys = ("context", "prefill_tokens_per_second", "step_1_ms", "step_4_ms", "step_8_ms",
            "step_16_ms", "draft_ms", "cycle_ms", "sustained_ms", "tokens_per_second")  # fmt: skip
    rows = [tuple("" if row[key] is None else f"{row[key]:g}" for key in keys)
            for row in data["rows"]]  # fmt: skip
    out.table(f"{data['model']}, {data['type']}, on {data['device']}", columns, rows)
    read = data["read_bytes_per_second"]
    out.line(f"Weights: {data['weight_bytes'] / 1e9:.2f} GB, of which a row reads "
             f"{data['step_bytes'] / 1e9:.2f}, at {data['fraction_of_bandwidth']:.0%} of the "
             f"{read / 1e12:.2f} TB/s measured here.")
    out.line("Timed after a rest; \"sustained\", from which tokens/s follow: after a second of "
             "cycles (without a draft, of single rows), when power may limit the clock.")
    if data["accept_length"]:
        out.line(f"A cycle commits {data['accept_length']} tokens because it was told to.")
    for name in data["ops_without_kernel"]:
        out.note(f"ran as torch on the GPU: {name}")
