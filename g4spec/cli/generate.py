"""Generates text with a target, with or without a draft."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from g4spec.cli import _engine, _inputs, _logits, _options, _prompting, _prompts
from g4spec.cli._remarks import greedy_note, strange_draft
from g4spec.cli._spoken import Colours, Writer, figures
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import UsageError

if TYPE_CHECKING:
    from g4spec.runtime.engine import Engine
    from g4spec.runtime.request import Options, Request


def command(
    model: _options.Model,
    draft: _options.DraftModel = None,
    prompt: _prompts.Prompt = None,
    file: _prompts.File = None,
    tokens_file: _prompts.TokensFile = None,
    chat: _prompts.Chat = False,
    system: _prompts.System = None,
    messages: _prompts.Messages = None,
    tools: _prompts.Tools = None,
    thinking: _prompts.Thinking = False,
    parse_special: _prompts.ParseSpecial = None,
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
    threads: _options.Threads = None,
    stop: _options.Stop = None,
    ignore_eos: _options.IgnoreEos = False,
    show_draft: _options.ShowDraft = False,
    show_rejected: _options.ShowRejected = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate text; a draft makes it faster and never changes it."""
    asked = _prompting.Asked(
        prompt, file, tokens_file, messages, chat, system, tools, thinking, parse_special
    )
    colours: Colours = "all" if show_rejected else "first" if show_draft else ""
    if colours and json:
        raise UsageError("--show-draft does nothing with --json", fix="leave one of them out")
    from g4spec.ops.sampling import Sampler
    from g4spec.runtime.request import Options

    out = Output(json, quiet)
    sampler = Sampler(
        temp,
        top_k,
        top_p,
        min_p,
        seed,
        logit_bias=_logits.logit_bias(logit_bias),
        repetition_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    options = Options(
        1 if n_predict == -1 else n_predict,
        sampler,
        _options.draft_max(draft_max),
        tuple(stop or ()),
        ignore_eos,
    )
    _inputs.needs_draft(
        draft,
        draft_max=draft_max not in ("auto", "0"),
        show_draft=show_draft,
        show_rejected=show_rejected,
    )
    if not temp:
        out.note(greedy_note(top_k=top_k, top_p=top_p != 1, min_p=min_p, seed=seed))
    given = asked.read()
    setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type)
    model, draft_file = _engine.files(model, draft, setup, out)
    engine = _engine.load(model, draft_file, setup, out)
    _run(engine, given, options, n_predict == -1, colours, out)


def _run(
    engine: Engine,
    prompt: _prompting.Prompt,
    options: Options,
    endless: bool,
    colours: Colours,
    out: Output,
) -> None:
    """Generate and show. `endless`: until the context is full."""
    ids = prompt.encode(engine.tokenizer, engine.n_ctx)
    out.note(prompt.advice(engine.tokenizer, ids))
    if endless:
        options = replace(options, n_predict=engine.n_ctx)
    drafting = engine.draft is not None and options.draft_max != 0
    run = engine.generate(ids, options)
    _write(run, Writer(out, engine.tokenizer, options.stop, colours), drafting)
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
    first = run.stats.drafted_by_position[0], run.stats.accepted_by_position[0]
    out.note(strange_draft(*first))
    stats = {**asdict(run.stats), "tokens_per_second": run.stats.tokens_per_second}
    out.result({"text": run.text, "ids": run.ids, "notes": run.notes, "stats": stats})
    if pressed:
        raise pressed
