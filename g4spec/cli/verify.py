"""Proves that a draft changes nothing about the text."""

from __future__ import annotations

from typing import Annotated

import typer

from g4spec.cli import _engine, _options, _streams
from g4spec.cli._spoken import strange_draft
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import CheckFailed, UsageError

Cases = Annotated[int, typer.Option("--cases", help="Comparisons: prompts x lengths x samplers.")]
Number = Annotated[int, typer.Option("-n", "--n-predict", help="Tokens of each text.")]
LongTokens = Annotated[int | None, typer.Option(min=1, help="Of long prompts. [at most 1024]")]


def command(
    model: _options.Model,
    draft: _options.DraftModel = None,
    cases: Cases = 48,
    n_predict: Number = 64,
    ctx_size: _options.ContextSize = None,
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    parallel: _streams.Parallel = 1,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    long_tokens: LongTokens = None,
    seed: _options.Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate alone without the draft, and with it, several at once if asked for, over prompts,
    draft lengths, seeds and temperatures; exit code 1 at the first token that differs."""
    if draft is None:
        raise UsageError("nothing to verify without a draft", fix="pass one with -md")
    from g4spec.measure import prompts, verify
    from g4spec.runtime.request import Options

    out = Output(json, quiet)
    # Typing errors should not cost the time of converting and loading.
    Options(n_predict)
    verify.check(cases, parallel)
    setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type, parallel)
    model, draft_file = _engine.files(model, draft, setup, out)
    engine = _engine.load(model, draft_file, setup, out)
    assert engine.draft is not None
    room = prompts.room(long_tokens, engine.n_ctx, n_predict, 1024)
    texts = prompts.prompts(engine.tokenizer, long_tokens=room)
    todo = verify.cases(texts, cases, engine.draft.max_tokens, seed)
    with out.progress("verifying") as progress:
        verdict = verify.verify(engine, todo, n_predict, parallel=parallel, progress=progress)
    _engine.tell(engine, out)
    for note in verdict.notes:
        out.note(note)
    out.result(verdict.json())
    if verdict.mismatch is not None:
        raise CheckFailed(f"the draft changed the text: {verdict.mismatch}")
    if not verdict.drafted:
        raise CheckFailed("the draft proposed nothing, so nothing about it was verified",
                          fix="pass a larger -n, or run `g4spec validate` on it")  # fmt: skip
    share = verdict.accepted / verdict.drafted
    out.line(
        f"{verdict.cases} of {verdict.cases} texts are the same with and without the draft"
        f"{f', {parallel} at once' * (parallel > 1)}: "
        f"{verdict.tokens} tokens, {verdict.same_logits} of them with the very same logit",
        style="good",
    )
    out.line(f"{verdict.drafted} tokens were drafted, {share:.1%} of them accepted")
    if strange := strange_draft(verdict.first_drafted, verdict.first_accepted):
        out.line(strange, style="warn")
