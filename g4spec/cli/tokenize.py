"""`g4spec tokenize`: convert text to token ids, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli import _inputs, _option_checks, _options
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import UsageError


def command(
    model: _options.Model[Path],
    text: Annotated[
        str | None, typer.Argument(help="Text, or token ids with --ids-to-text.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="Read the text or ids from a file; - is stdin."),
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Separate ids by commas, not spaces.")] = False,
    ids_to_text: Annotated[bool, typer.Option("--ids-to-text", help="Decode ids to text.")] = False,
    bos: Annotated[bool, typer.Option(help="Begin with the BOS token.")] = True,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert a text to the target's token ids, or ids to text."""
    if (text is None) == (file is None):
        raise UsageError("expected either TEXT or --file", fix="give exactly one of them")
    fix = "leave one of them out"
    if ids_to_text:
        _option_checks.refuse("has no effect with --ids-to-text", fix, csv=csv, no_bos=not bos)
    if json:
        _option_checks.refuse("has no effect with --json", fix, csv=csv)
    content = text if file is None else _inputs.read_text(file)
    from g4spec.gguf import GGUF
    from g4spec.runtime.tokenizer import Tokenizer

    out = Output(json, quiet)
    with GGUF(_inputs.resolve(model, out, "gguf")) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    assert content is not None
    if ids_to_text:
        ids = _inputs.parse_ids(content, "TEXT" if file is None else str(file))
        content = tokenizer.decode(ids, special=True)
        out.stream(content + "\n")
    else:
        ids = tokenizer.encode(content, bos=bos)
        out.stream(("," if csv else " ").join(map(str, ids)) + "\n")
    out.result({"ids": ids, "text": content})
