"""Generates text with a target, with or without a draft."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from g4spec.cli import _engine, _inputs, _logits, _options
from g4spec.cli._spoken import Writer, figures, greedy_note
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import UsageError

if TYPE_CHECKING:
    from g4spec.runtime.engine import Engine
    from g4spec.runtime.request import Request


def _check_prompt(
    text: str | None, file: Path | None, tokens_file: Path | None, chat: bool, system: str | None
) -> None:
    """Raise UsageError unless the options name one prompt and fit it."""
    if sum(given is not None for given in (text, file, tokens_file)) != 1:
        raise UsageError("give the prompt by exactly one of -p, --file and --tokens-file")
    if system is not None and not chat:
        raise UsageError("--system needs --chat")
    if chat and tokens_file is not None:
        raise UsageError("--chat needs a text: ids are read as they are", fix="leave it out")


def _given(text: str | None, file: Path | None, tokens_file: Path | None) -> str | list[int]:
    """The prompt, read before anything is loaded: a text, or the ids of a list."""
    if tokens_file is not None:
        return _inputs.parse_ids(_inputs.read_text(tokens_file), str(tokens_file))
    return _inputs.read_text(file) if file is not None else text or ""


def _encoded(engine: Engine, text: str | list[int], chat: bool, system: str | None) -> list[int]:
    if isinstance(text, list):
        return text
    if chat:
        message = {"role": "user", "content": text}
        return engine.tokenizer.chat([message], system=system, n_ctx=engine.n_ctx)
    return engine.tokenizer.encode(text, n_ctx=engine.n_ctx)


def command(
    model: _options.Model,
    draft: _options.DraftModel = None,
    prompt: _options.Prompt = None,
    file: _options.PromptFile = None,
    tokens_file: _options.TokensFile = None,
    chat: _options.Chat = False,
    system: _options.System = None,
    ctx_size: _options.ContextSize = None,
    n_predict: _options.NPredict = 256,
    temp: _options.Temperature = 0.0,
    top_k: _options.TopK = 0,
    top_p: _options.TopP = 1.0,
    min_p: _options.MinP = 0.0,
    seed: _options.Seed = 0,
    logit_bias: _logits.LogitBias = None,
    repeat_penalty: _logits.RepeatPenalty = 1.0,
    presence_penalty: _logits.PresencePenalty = 0.0,
    frequency_penalty: _logits.FrequencyPenalty = 0.0,
    draft_max: _options.DraftMax = "auto",
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    stop: _options.Stop = None,
    ignore_eos: _options.IgnoreEos = False,
    show_draft: _options.ShowDraft = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate text; a draft makes it faster and never changes it."""
    _check_prompt(prompt, file, tokens_file, chat, system)
    if show_draft and json:
        raise UsageError("--show-draft does nothing with --json", fix="leave one of them out")
    from g4spec.ops.sampling import Sampler
    from g4spec.runtime.request import Options

    out = Output(json, quiet)
    bias = _logits.logit_bias(logit_bias)
    sampler = Sampler(temp, top_k, top_p, min_p, seed, logit_bias=bias,
                      repetition_penalty=repeat_penalty, presence_penalty=presence_penalty,
                      frequency_penalty=frequency_penalty)  # fmt: skip
    options = Options(n_predict, sampler, _options.draft_max(draft_max), tuple(stop or ()),
                      ignore_eos)  # fmt: skip
    _inputs.needs_draft(draft, draft_max=draft_max not in ("auto", "0"), show_draft=show_draft)
    unread = greedy_note(top_k=top_k, top_p=top_p != 1, min_p=min_p, seed=seed)
    if unread and not temp:
        out.note(unread)
    given = _given(prompt, file, tokens_file)
    setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type)
    model, draft_file = _engine.files(model, draft, setup, out)
    engine = _engine.load(model, draft_file, setup, out)
    ids = _encoded(engine, given, chat, system)
    _write(engine.generate(ids, options), Writer(out, engine.tokenizer, options.stop, show_draft),
           draft is not None and options.draft_max != 0)  # fmt: skip
    _engine.tell(engine, out)


def _write(run: Request, writer: Writer, drafting: bool) -> None:
    out, pressed = writer.out, None
    try:
        for cycle in run:
            writer.cycle(cycle, run.text)
            for note in run.notes:
                out.note(note)
    except KeyboardInterrupt as keys:  # what there is, and how fast it came, is said all the same
        run.stats.stop_reason, pressed = "Ctrl-C", keys
    writer.finish(run.text)
    out.note(figures(run.stats, drafting))
    stats = {**asdict(run.stats), "tokens_per_second": run.stats.tokens_per_second}
    out.result({"text": run.text, "ids": run.ids, "notes": run.notes, "stats": stats})
    if pressed:
        raise pressed
