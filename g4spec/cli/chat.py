"""`g4spec chat`: chat in the terminal with a local target or with a server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from g4spec.cli import _chat_options, _engine, _option_checks, _options, _sampling_defaults
from g4spec.cli._notes import thinking_note
from g4spec.cli.render import Output, Quiet
from g4spec.errors import UsageError

if TYPE_CHECKING:
    import asyncio

    from g4spec.server.chat_client import ChatBackend


def command(
    context: typer.Context,
    model: _options.Model[Path | None] = None,
    draft: _options.DraftModel = None,
    url: _chat_options.Url = None,
    api_key: _chat_options.ApiKey = None,
    system: _chat_options.System = None,
    think: _chat_options.Think = False,
    show_draft: _options.ShowDraft = False,
    n_predict: _chat_options.NPredict = None,
    temp: _chat_options.Temperature = None,
    top_k: _options.TopK[int | None] = None,
    top_p: _options.TopP[float | None] = None,
    min_p: _options.MinP[float | None] = None,
    top_n_sigma: _options.TopNSigma[float | None] = None,
    seed: _chat_options.Seed = None,
    draft_max: _options.DraftMax = "auto",
    ctx_size: _options.ContextSize = None,
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    threads: _options.Threads = None,
    quiet: Quiet = False,
) -> None:
    """Chat with a model in the terminal; /help lists the commands."""
    flags, out = _option_checks.given_flags(context), Output(quiet=quiet)
    if (model is None) == (url is None):
        raise UsageError(
            "expected either -m or --url", fix="name a model with -m, or a server with --url"
        )
    length = _options.draft_max(draft_max)
    if url is None:
        _option_checks.refuse_without_effect(flags, ["api_key"], "without --url")
        _option_checks.require_draft(
            draft, draft_max=draft_max not in ("auto", "0"), show_draft=show_draft
        )
    else:
        _option_checks.refuse_without_effect(
            flags, _chat_options.LOCAL_ONLY, "with --url, the server decides"
        )
    sampling = _sampling_defaults.given(context.params)
    from g4spec.cli._conversation import Conversation

    with _loop() as loop, ExitStack() as stack:
        backend: ChatBackend
        if url is not None:
            backend = _remote(
                url,
                api_key,
                think,
                n_predict,
                show_draft,
                out,
                loop,
                sampling | {"draft_max": length if "draft_max" in flags else None},
            )
        else:
            assert model is not None
            setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type)
            path, file = _engine.files(model, draft, setup, out)
            from g4spec.server.local_chat import LocalChat

            sampler = _sampling_defaults.sampler(path, out, **sampling)
            engine = _engine.load(path, file, setup, out, prefix_cache=256 << 20)
            stack.enter_context(engine)
            if think and (why := thinking_note(engine.tokenizer, "--think")):
                out.note(why)
                think = False
            backend = LocalChat(
                engine,
                sampler,
                n_predict=n_predict,
                draft_max=length,
                thinking=think,
                show_origins=show_draft,
            )
        stack.callback(lambda: loop.run_until_complete(backend.close()))
        conversation = Conversation(backend, out, system=system, seed=seed, show=show_draft)
        conversation.run(loop)
    if conversation.exit_code and not sys.stdin.isatty():
        raise typer.Exit(conversation.exit_code)


@contextmanager
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    import asyncio

    loop = asyncio.new_event_loop()

    async def end(tasks: set[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await loop.shutdown_asyncgens()

    try:
        yield loop
    finally:
        # httpx closes its generators in tasks of their own, which asyncio would report as lost.
        loop.run_until_complete(end(asyncio.all_tasks(loop)))
        loop.close()


def _remote(
    url: str,
    key: str | None,
    think: bool,
    max_tokens: int | None,
    show_origins: bool,
    out: Output,
    loop: asyncio.AbstractEventLoop,
    fields: dict[str, Any],
) -> ChatBackend:
    from g4spec.server.chat_client import RemoteChat

    if not re.match(r"https?://[^/\s]", url):
        raise UsageError("--url", expected="an address such as http://127.0.0.1:8080", found=url)
    fields |= {"max_tokens": max_tokens, "reasoning_effort": "high" if think else None}
    backend = RemoteChat(
        url, key, {k: v for k, v in fields.items() if v is not None}, show_origins=show_origins
    )
    out.note(f"model {loop.run_until_complete(backend.model())} at {backend.url}")
    return backend
