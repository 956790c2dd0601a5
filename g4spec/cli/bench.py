"""`g4spec bench`: measure every draft length and recommend one; compare two results."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import typer

from g4spec.cli import (
    _bench_compare,
    _bench_options,
    _bench_parallel,
    _bench_results,
    _bench_synthetic,
    _command_classes,
    _engine,
    _inputs,
    _measured_prompt,
    _option_checks,
    _options,
    _prompt_options,
    _signals,
)
from g4spec.cli._notes import thinking_note
from g4spec.cli.render import Json, Output, Quiet

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    model: _options.Model[Path | None] = None,
    draft: _options.DraftModel = None,
    ctx_size: _options.ContextSize = None,
    draft_max: _bench_options.Lengths = None,
    n_predict: _bench_options.Number = None,
    prompt: _prompt_options.Prompt = None,
    file: _prompt_options.File = None,
    tokens_file: _prompt_options.TokensFile = None,
    chat: _prompt_options.Chat = False,
    system: _prompt_options.System = None,
    messages: _prompt_options.Messages = None,
    tools: _prompt_options.Tools = None,
    thinking: _prompt_options.MeasuredThinking = False,
    parse_special: _prompt_options.ParseSpecial = None,
    categories: _bench_options.Names = None,
    count: _bench_options.Count = None,
    repeats: _bench_options.Repeats = 3,
    long_tokens: _bench_options.LongTokens = None,
    preset: _bench_options.Preset = None,
    dataset: _bench_options.Dataset = None,
    temp: _options.Temperature = 0.0,
    top_k: _options.TopK[int] = 0,
    top_p: _options.TopP[float] = 1.0,
    min_p: _options.MinP[float] = 0.0,
    top_n_sigma: _options.TopNSigma[float] = 0.0,
    seed: _options.Seed = 0,
    ignore_eos: _options.IgnoreEos = False,
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    parallel: _bench_parallel.Parallel = 1,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    threads: _options.Threads = None,
    save: _bench_options.Save = None,
    report: _bench_options.Report = None,
    synthetic: _bench_synthetic.Size = None,
    mix: _bench_synthetic.Type = "q4_k_m",
    accepted: _bench_synthetic.Accepted = 6,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure draft lengths per prompt category, or on one prompt of your own; recommend one.

    Speed is compared with plain decoding, without a draft: `x plain` is the ratio. `g4spec bench
    compare` compares two results.
    """
    if context.invoked_subcommand is not None:
        return _bench_compare.reject_bench_options(context)
    out = Output(json, quiet)
    setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type, parallel)
    if size := _bench_synthetic.check_options(context, synthetic):
        return _bench_synthetic.run(size, mix, draft, accepted, setup, out, save)
    _bench_parallel.check(parallel, report)
    _option_checks.require_draft(draft, draft_max=draft_max not in (None, "0"))
    model = _bench_options.require_target(
        model, preset, dataset, bool(temp or categories), save, report
    )
    prompt_options = _measured_prompt.MeasuredPromptOptions(
        prompt, file, tokens_file, messages, chat, system, tools, thinking, parse_special
    )
    own = prompt_options.read_own(
        preset=preset, categories=categories, prompts=count, long_tokens=long_tokens
    )
    names, questions = _bench_options.read_questions(
        dataset, categories, count, preset is not None, thinking
    )
    _inputs.check_exists(model, draft)
    with _signals.noted(out, "nothing was measured"):
        from g4spec.measure import bench, draft_lengths, prompts, run_record
        from g4spec.ops.sampling import Sampler

        wanted = ("8" if preset else "sweep") if draft_max is None else draft_max
        most = n_predict or (2048 if preset else 128)
        sampler = Sampler(temp, top_k, top_p, min_p, seed, top_n_sigma=top_n_sigma)
        config = bench.BenchConfig(
            draft_lengths.parse_lengths(wanted, 15), most, repeats, sampler, ignore_eos
        )
        model, draft_file = _engine.files(model, draft, setup, out)
        idle = bench.memory_in_use()
        engine = _engine.load(model, draft_file, setup, out)
        config = replace(
            config, lengths=draft_lengths.parse_lengths(wanted, bench.longest_proposal(engine))
        )
        if own is not None:
            texts = [_measured_prompt.bench_prompt(own, engine, out)]
        elif not (texts := questions):
            room = prompts.long_prompt_tokens(long_tokens, engine.n_ctx, config.n_predict, 2048)
            texts = prompts.prompts(engine.tokenizer, names, count, room, thinking=thinking)
        if thinking:
            out.note(thinking_note(engine.tokenizer))
        origin = run_record.describe(model, draft_file, engine.backend, ["g4spec", *sys.argv[1:]])
    if parallel > 1:
        return _bench_parallel.run(engine, texts, config, parallel, origin, out, save)
    _bench_results.run(engine, texts, config, idle, origin, out, save, report, preset is not None)


app.command(cls=_command_classes.Command)(_bench_compare.compare)
