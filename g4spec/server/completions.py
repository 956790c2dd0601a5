"""/v1/completions: jobs, responses and streams."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from g4spec.server import grammar, options, response_parts
from g4spec.server.fields import CompletionRequest
from g4spec.server.generation import Delta, Token
from g4spec.server.output_parser import TextEvent
from g4spec.server.request_errors import RequestError
from g4spec.server.service import Generation, Job, Service, Text
from g4spec.server.sse import Events, event

DEFAULT_TOKENS = 16
"""Default of `max_tokens` if the server has none, as in OpenAI's API."""


async def build_job(service: Service, request: CompletionRequest) -> Job:
    """Build the job of a request."""
    service.check_model(request.model)
    n = options.count(service, request)
    if request.best_of not in (None, n):
        raise RequestError(
            400, "best_of: only the value of n is supported; leave it out", param="best_of"
        )
    if request.echo and request.logprobs is not None:
        raise RequestError(
            400,
            "echo with logprobs is not supported (prompts have no log-probabilities); set only one",
            param="echo",
        )
    constraint = None
    if request.grammar:
        if request.ignore_eos:
            raise RequestError(
                400,
                "ignore_eos cannot be combined with a grammar; leave it out",
                param="ignore_eos",
            )
        lark = await asyncio.to_thread(grammar.to_lark, request.grammar)
        constraint = grammar.whole_text(None, user=lark)
    n_predict = (
        request.max_tokens or request.n_predict or service.settings.n_predict or DEFAULT_TOKENS
    )
    engine_options = options.options(service, request, n_predict, logprobs=request.logprobs)
    engine_options = replace(
        engine_options, progress=bool(request.stream and request.return_progress)
    )
    first, *others = prompts(request.prompt)
    options.check_n_texts(service, n * (1 + len(others)), "prompt")
    return Job(
        await prompt_ids(service, first),
        engine_options,
        n,
        constraint,
        live=request.live,
        others=tuple([await prompt_ids(service, each) for each in others]),
    )


def prompts(prompt: Any) -> list[Any]:
    """Return the prompts of the `prompt` field as a list."""
    return list(prompt) if several(prompt) else [prompt]


def several(prompt: Any) -> bool:
    """Return True for a list of prompts, False for one prompt (a str or a list of token ids)."""
    listed = isinstance(prompt, list) and len(prompt) > 0
    return listed and not any(isinstance(part, int) for part in prompt)


async def prompt_ids(service: Service, prompt: str | list[int]) -> list[int]:
    """Return the token ids of a prompt, which is a str or a list of token ids."""
    return await service.prompter.encode(prompt) if isinstance(prompt, str) else list(prompt)


def _head(generation: Generation) -> dict[str, Any]:
    return {
        "id": f"cmpl-{generation.id}",
        "object": "text_completion",
        "created": generation.created,
        "model": generation.service.settings.model,
        "system_fingerprint": response_parts.SYSTEM_FINGERPRINT,
    }


def _words(delta: Delta) -> str:
    return "".join(piece.text for piece in delta.events if isinstance(piece, TextEvent))


def _echo(generation: Generation, request: CompletionRequest, text: Text) -> str:
    if not request.echo:
        return ""
    prompt = prompts(request.prompt)[text.index // generation.job.n]
    return prompt if isinstance(prompt, str) else generation.service.tokenizer.decode(prompt)


async def full_response(generation: Generation, request: CompletionRequest) -> dict[str, Any]:
    """Return the complete response body."""
    texts = [_echo(generation, request, text) for text in generation.texts]
    tokens: list[list[Token]] = [[] for _ in texts]
    async with aclosing(generation.deltas()) as deltas:
        async for text, delta in deltas:
            texts[text.index] += _words(delta)
            tokens[text.index] += delta.tokens
    choices = []
    for text in generation.texts:
        logprobs = None
        if request.logprobs is not None:
            found = response_parts.CompletionLogprobs(generation.service.tokenizer)
            logprobs = found.of(tokens[text.index])
        choices.append(
            {
                "index": text.index,
                "text": texts[text.index],
                "logprobs": logprobs,
                "finish_reason": text.finish,
            }
        )
    out = {**_head(generation), "choices": choices, "usage": response_parts.usage(generation)}
    return out | (
        {"timings": response_parts.timings(generation.texts[0])} if len(choices) == 1 else {}
    )


async def stream_response(generation: Generation, request: CompletionRequest) -> Events:
    """Yield the response as events."""
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    found = [
        response_parts.CompletionLogprobs(generation.service.tokenizer) for _ in generation.texts
    ]

    def chunk(
        text: Text,
        words: str,
        tokens: list[Token],
        finish: str | None = None,
        progress: int | None = None,
    ) -> str:
        logprobs = found[text.index].of(tokens) if tokens else None
        out = _head(generation)
        out["choices"] = [
            {"index": text.index, "text": words, "logprobs": logprobs, "finish_reason": finish}
        ]
        if include_usage:
            out["usage"] = None
        if finish or request.timings_per_token:
            out["timings"] = response_parts.timings(text)
        if progress is not None:
            out["prompt_progress"] = response_parts.progress(text, progress)
        return event(out)

    for text in generation.texts:
        if echo := _echo(generation, request, text):
            yield chunk(text, echo, [])
    async with aclosing(generation.deltas()) as deltas:
        async for text, delta in deltas:
            yield chunk(text, _words(delta), delta.tokens, delta.finish, delta.progress)
    if include_usage:
        last = {**_head(generation), "choices": [], "usage": response_parts.usage(generation)}
        if len(found) == 1:
            last["timings"] = response_parts.timings(generation.texts[0])
        yield event(last)
    yield event("[DONE]")
