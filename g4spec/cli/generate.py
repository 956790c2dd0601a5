"""`g4spec generate`: generate text with a target, with or without a draft."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from g4spec.cli import (
    _engine,
    _inputs,
    _logit_options,
    _option_checks,
    _options,
    _prompt,
    _prompt_options,
)
from g4spec.cli._notes import greedy_note, low_acceptance_note, thinking_note
from g4spec.cli._text_stream import Marking, Writer, auto_note, stats_line
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import UsageError

if TYPE_CHECKING:
    from g4spec.runtime.engine import Engine
    from g4spec.runtime.request import Options, Request


def command(
    model: _options.Model[Path],
    draft: _options.DraftModel = None,
    prompt: _prompt_options.Prompt = None,
    file: _prompt_options.File = None,
    tokens_file: _prompt_options.TokensFile = None,
    chat: _prompt_options.Chat = False,
    system: _prompt_options.System = None,
    messages: _prompt_options.Messages = None,
    tools: _prompt_options.Tools = None,
    thinking: _prompt_options.Thinking = False,
    parse_special: _prompt_options.ParseSpecial = None,
    ctx_size: _options.ContextSize = None,
    n_predict: _options.NPredict = 256,
    temp: _options.Temperature = 0.0,
    top_k: _options.TopK[int] = 0,
    top_p: _options.TopP[float] = 1.0,
    min_p: _options.MinP[float] = 0.0,
    top_n_sigma: _options.TopNSigma[float] = 0.0,
    seed: _options.Seed = 0,
    logit_bias: _logit_options.LogitBias = None,
    repeat_penalty: _logit_options.RepeatPenalty = 1.0,
    presence_penalty: _logit_options.PresencePenalty = 0.0,
    frequency_penalty: _logit_options.FrequencyPenalty = 0.0,
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
    prompt_options = _prompt.PromptOptions(
        prompt, file, tokens_file, messages, chat, system, tools, thinking, parse_special
    )
    marking: Marking = "all" if show_rejected else "first" if show_draft else ""
    if marking and json:
        option = "--show-rejected" if show_rejected else "--show-draft"
        raise UsageError(f"{option} has no effect with --json", fix="leave one of them out")
    _option_checks.require_draft(
        draft,
        draft_max=draft_max not in ("auto", "0"),
        show_draft=show_draft,
        show_rejected=show_rejected,
    )
    out, bias = Output(json, quiet), _logit_options.logit_bias(logit_bias)
    prompt_input = prompt_options.read()
    _inputs.check_exists(model, draft)
    from g4spec.ops.sampling import Sampler
    from g4spec.runtime.request import Options

    sampler = Sampler(
        temp,
        top_k,
        top_p,
        min_p,
        seed,
        logit_bias=bias,
        repetition_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        top_n_sigma=top_n_sigma,
    )
    options = Options(
        1 if n_predict == -1 else n_predict,
        sampler,
        _options.draft_max(draft_max),
        tuple(stop or ()),
        ignore_eos,
    )
    out.note(greedy_note(sampler))
    setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type)
    engine = _engine.load(*_engine.files(model, draft, setup, out), setup, out)
    _run(engine, prompt_input, options, n_predict == -1, marking, out)


def _run(
    engine: Engine,
    prompt: _prompt.Prompt,
    options: Options,
    endless: bool,
    marking: Marking,
    out: Output,
) -> None:
    """Generate and show a text. `endless`: until the context is full."""
    ids = prompt.encode(engine.tokenizer, engine.n_ctx)
    out.note(prompt.chat_note(engine.tokenizer, ids))
    if prompt.options.thinking:
        out.note(thinking_note(engine.tokenizer))
    if endless:
        options = replace(options, n_predict=engine.n_ctx)
    drafting = engine.draft is not None and options.draft_max != 0
    run = engine.generate(ids, options)
    _write(engine, run, Writer(out, engine.tokenizer, options.stop, marking), drafting)
    _engine.note_ops_without_kernel(engine, out)


def _write(engine: Engine, run: Request, writer: Writer, drafting: bool) -> None:
    out, pressed = writer.out, None
    try:
        for cycle in run:
            writer.cycle(cycle, run.text)
            for note in run.notes:
                out.note(note)
    except KeyboardInterrupt as keys:  # show the text so far and its speed
        run.stats.stop_reason, pressed = "Ctrl-C", keys
    writer.finish(run.text)
    out.note(stats_line(run.stats, drafting))
    auto = drafting and run.options.draft_max == "auto"
    first = run.stats.drafted_by_position[0], run.stats.accepted_by_position[0]
    low = low_acceptance_note(*first, auto)
    out.note(low or (auto_note(run.stats) if auto else None))
    stats = {**asdict(run.stats), "tokens_per_second": run.stats.tokens_per_second}
    data = {"text": run.text, "ids": run.ids, "notes": run.notes, "stats": stats}
    out.result(data | {"ops_without_kernel": sorted(engine.target.ops.without_kernel)})
    if pressed:
        raise pressed
