"""Generates text with a target, with or without a draft."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4spec.cli import _inputs, _options
from g4spec.cli._spoken import Writer, figures
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import UsageError

if TYPE_CHECKING:
    from g4spec.runtime.tokenizer import Tokenizer


def _prompt(
    tokenizer: Tokenizer,
    text: str | None,
    file: Path | None,
    tokens_file: Path | None,
    chat: bool,
    system: str | None,
) -> list[int]:
    if tokens_file is not None:
        return _inputs.parse_ids(_inputs.read_text(tokens_file), str(tokens_file))
    text = _inputs.read_text(file) if file is not None else text or ""
    if chat:
        return tokenizer.chat([{"role": "user", "content": text}], system=system)
    return tokenizer.encode(text)


def command(
    model: _options.Model,
    draft: _options.DraftModel = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="Prompt from a file; - is stdin.")
    ] = None,
    tokens_file: Annotated[
        Path | None, typer.Option(help="Prompt as token ids (see `tokenize`), taken as they are.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            help="Put the prompt into the file's chat template. Off by default: a prompt then "
            "means the same here as in other tools, and works with models that have no template."
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message for --chat.")] = None,
    ctx_size: _options.ContextSize = None,
    n_predict: _options.NPredict = 256,
    temp: _options.Temperature = 0.0,
    top_k: _options.TopK = 0,
    top_p: _options.TopP = 1.0,
    min_p: _options.MinP = 0.0,
    seed: _options.Seed = 0,
    draft_max: _options.DraftMax = "auto",
    draft_window: _options.DraftWindow = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after stop tokens.")
    ] = False,
    show_draft: Annotated[
        bool, typer.Option("--show-draft", help="Mark drafted, accepted and corrected tokens.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate text; a draft makes it faster and never changes it."""
    if sum(given is not None for given in (prompt, file, tokens_file)) != 1:
        raise UsageError("give the prompt by exactly one of -p, --file and --tokens-file")
    if system is not None and not chat:
        raise UsageError("--system needs --chat")
    out = Output(json, quiet)
    from g4spec.runtime.engine import Engine, Options
    from g4spec.runtime.sampling import Sampler

    options = Options(
        n_predict,
        Sampler(temp, top_k, top_p, min_p, seed),
        _options.draft_max(draft_max),
        tuple(stop or ()),
        ignore_eos,
    )
    draft_file = _inputs.open_draft(draft, model, out)
    engine = Engine.load(model, draft_file, n_ctx=ctx_size, draft_window=draft_window)
    ids = _prompt(engine.tokenizer, prompt, file, tokens_file, chat, system)
    run = engine.generate(ids, options)
    writer = Writer(out, engine.tokenizer, options.stop, show_draft)
    for cycle in run:
        for note in run.notes:
            out.note(note)
        writer.cycle(cycle, run.text)
    writer.finish(run.text)
    out.note(figures(run.stats))
    out.result(
        {"text": run.text, "ids": run.ids, "notes": run.notes, "prompt_ids": ids,
         "stats": asdict(run.stats)}
    )  # fmt: skip
