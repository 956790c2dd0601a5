"""`g4spec verify`: check that a draft does not change the text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4spec.cli import (
    _bench_parallel,
    _engine,
    _inputs,
    _measured_prompt,
    _option_checks,
    _options,
    _prompt_options,
    _signals,
)
from g4spec.cli._notes import low_acceptance_note, thinking_note
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from g4spec.measure.verify import VerifyResult

Temperature = Annotated[
    float | None, typer.Option("--temp", help="Test only this temperature. Default: several.")
]
DraftMax = Annotated[
    str | None,
    _options.draft_max_option(
        "Test only this draft length. Default: nine lengths from 1 to 15, and auto."
    ),
]
Cases = Annotated[
    int, typer.Option("--cases", help="Number of comparisons (prompts x lengths x samplers).")
]
Number = Annotated[int, typer.Option("-n", "--n-predict", min=1, help="Tokens per text.")]
LongTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Length of the long prompts in tokens. Default: what fits, at most 1024."
    ),
]


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
    thinking: _prompt_options.MeasuredThinking = False,
    parse_special: _prompt_options.ParseSpecial = None,
    temp: Temperature = None,
    draft_max: DraftMax = None,
    cases: Cases = 48,
    n_predict: Number = 64,
    ctx_size: _options.ContextSize = None,
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    parallel: _bench_parallel.Parallel = 1,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    long_tokens: LongTokens = None,
    seed: _options.Seed = 0,
    threads: _options.Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a draft does not change any generated text.

    Generates texts without and with the draft, over draft lengths, seeds, temperatures and the
    built-in prompts, or for one prompt of your own.
    With --parallel, the texts with the draft are generated several at once; without a draft,
    it checks that a batch changes no text. Exits with 1 at the
    first token that differs. Ctrl-C ends the run and shows the result so far.
    """
    if draft is None and parallel == 1:
        fix = "pass one with -md, or --parallel 2 to compare texts alone and in a batch"
        raise UsageError("no draft given: there is nothing to verify", fix=fix)
    _option_checks.require_draft(draft, draft_max=draft_max)
    prompt_options = _measured_prompt.MeasuredPromptOptions(
        prompt, file, tokens_file, messages, chat, system, tools, thinking, parse_special
    )
    own = prompt_options.read_own(long_tokens=long_tokens)
    length = None if draft_max is None else _options.draft_max(draft_max)
    if length == 0:
        raise UsageError("--draft-max 0 drafts no tokens to verify", fix="pass 1 or more, or auto")
    _inputs.check_exists(model, draft)
    out = Output(json, quiet)
    with _signals.noted(out, "nothing was compared"):
        from g4spec.measure import prompts, verify

        setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type, parallel)
        model, draft_file = _engine.files(model, draft, setup, out)
        engine = _engine.load(model, draft_file, setup, out)
        if own is not None:
            texts = [_measured_prompt.bench_prompt(own, engine, out)]
        else:
            room = prompts.long_prompt_tokens(long_tokens, engine.n_ctx, n_predict, 1024)
            texts = prompts.prompts(engine.tokenizer, long_tokens=room, thinking=thinking)
        if thinking:
            out.note(thinking_note(engine.tokenizer))
        most = engine.draft.max_tokens if engine.draft is not None else 0
        cases_to_run = verify.cases(texts, cases, most, seed, length=length, temperature=temp)
        with out.progress("verifying") as progress:
            verdict = verify.verify(
                engine, cases_to_run, n_predict, parallel=parallel, progress=progress
            )
    _engine.note_ops_without_kernel(engine, out)
    _show(verdict, sorted(engine.target.ops.without_kernel), out)


def _show(verdict: VerifyResult, without_kernel: list[str], out: Output) -> None:
    """Show notes, verdict and acceptance; raise CheckFailed for a bad verdict."""
    for note in verdict.notes:
        out.note(note)
    out.result({**verdict.json(), "ops_without_kernel": without_kernel})
    if verdict.mismatch is not None:
        what = "the draft" if verdict.draft else "a batch with other texts"
        raise CheckFailed(f"{what} changed the text: {verdict.mismatch}")
    if not verdict.ok:
        raise CheckFailed(
            "the draft proposed no tokens, so nothing was verified",
            fix="pass a larger -n; `g4spec validate` checks the file of a draft, and n-gram lookup "
            "proposes only in texts that repeat themselves",
        )
    out.line(verdict.summary(), style="good")
    if verdict.drafted:
        drafted = "1 token was" if verdict.drafted == 1 else f"{verdict.drafted} tokens were"
        share = verdict.accepted / verdict.drafted
        out.line(f"{drafted} drafted, {share:.1%} of them accepted")
    if strange := low_acceptance_note(verdict.first_drafted, verdict.first_accepted):
        out.line(strange, style="warn")
    if verdict.interrupted:
        raise KeyboardInterrupt  # after the result is shown: the exit code reports it, too
