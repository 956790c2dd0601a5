"""/v1/completions: jobs, responses and streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import Field

from g4spec.core import Logprobs
from g4spec.server import constraints, grammar, options, response_parts
from g4spec.server.fields import OpenAI
from g4spec.server.generation import Delta, Token
from g4spec.server.output_parser import TextEvent
from g4spec.server.request_errors import RequestError
from g4spec.server.service import Generation, Job, Service, Text
from g4spec.server.sse import Events, event

DEFAULT_TOKENS = 16
"""Default of `max_tokens` if the server has none, as in OpenAI's API."""


class CompletionRequest(OpenAI):
    """A body of /v1/completions; max_tokens -1 fills the context, as in llama.cpp."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=-1)
    n_predict: int | None = Field(None, ge=-1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None


async def build_job(service: Service, request: CompletionRequest) -> Job:
    """Build the job of a request."""
    service.check_model(request.model)
    n = options.count(service, request)
    if request.best_of not in (None, n):
        raise RequestError(
            400, "best_of: only the value of n is supported; leave it out", param="best_of"
        )
    if request.suffix:
        raise RequestError(
            400,
            "suffix: Gemma 4 has no tokens for infilling; send only the text before the gap",
            param="suffix",
        )
    wanted = await asyncio.to_thread(constraints.of, request)
    if wanted and request.ignore_eos:
        raise RequestError(
            400,
            "ignore_eos cannot be combined with a grammar or schema; leave it out",
            param="ignore_eos",
        )
    n_predict = request.n_predict if request.max_tokens is None else request.max_tokens
    if n_predict is None:
        n_predict = service.settings.n_predict or DEFAULT_TOKENS
    sent = prompts(request.prompt)
    options.check_n_texts(service, n * len(sent), "prompt")
    first, *others = [await prompt_ids(service, each) for each in sent]
    if n_predict == -1:
        n_predict = max(options.room(service, ids) for ids in (first, *others))
    engine_options = options.options(
        service,
        request,
        n_predict,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )
    engine_options = replace(
        engine_options, progress=bool(request.stream and request.return_progress)
    )
    return Job(
        first,
        engine_options,
        n,
        grammar.whole_text(None, answer=wanted.answer, user=wanted.user) if wanted else None,
        live=request.live,
        others=tuple(others),
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


@dataclass(slots=True)
class _Piece:
    """The next part of a text.

    Attributes:
        first, echo: see `response_parts.CompletionLogprobs.of`.
        finish, progress: see `Delta`.
    """

    words: str = ""
    tokens: list[Token] = field(default_factory=list)
    first: int | None = None
    echo: str | None = None
    finish: str | None = None
    progress: int | None = None


async def _pieces(
    generation: Generation, request: CompletionRequest
) -> AsyncGenerator[tuple[Text, _Piece], None]:
    """Yield what the texts consist of: with `echo` first the prompt, before the first token or the
    end."""
    read: dict[int, list[Logprobs] | None] = {text.index: [] for text in generation.texts}
    async with aclosing(generation.deltas()) as deltas:
        async for text, delta in deltas:
            found = read[text.index]
            if found is not None:
                found += delta.prompt_logprobs
            if request.echo and delta and found is not None:
                read[text.index] = None
                yield text, _prompt(generation, request, text, found)
            if delta or delta.progress is not None:
                words, progress = _words(delta), delta.progress
                yield text, _Piece(words, delta.tokens, finish=delta.finish, progress=progress)


def _prompt(
    generation: Generation, request: CompletionRequest, text: Text, found: list[Logprobs]
) -> _Piece:
    sent, ids = prompts(request.prompt)[text.index // generation.job.n], text.request.prompt
    echo = sent if isinstance(sent, str) else None
    words = generation.service.tokenizer.decode(sent) if echo is None else echo
    if request.logprobs is None:
        return _Piece(words)
    tokens = [Token(id, *logprobs) for id, logprobs in zip(ids[1:], found, strict=True)]
    return _Piece(words, tokens, first=ids[0], echo=echo)


async def full_response(generation: Generation, request: CompletionRequest) -> dict[str, Any]:
    """Return the complete response body."""
    tokenizer = generation.service.tokenizer
    found = [response_parts.CompletionLogprobs(tokenizer) for _ in generation.texts]
    choices: list[dict[str, Any]] = [
        {
            "index": text.index,
            "text": "",
            "logprobs": None if request.logprobs is None else {},
            "finish_reason": None,
        }
        for text in generation.texts
    ]
    async with aclosing(_pieces(generation, request)) as pieces:
        async for text, piece in pieces:
            choice, finder = choices[text.index], found[text.index]
            choice["text"] += piece.words
            choice["finish_reason"] = piece.finish
            if request.logprobs is not None:
                part = finder.of(piece.tokens, first=piece.first, echo=piece.echo)
                for key, values in part.items():
                    choice["logprobs"].setdefault(key, []).extend(values)
    out = {**_head(generation), "choices": choices, "usage": response_parts.usage(generation)}
    return out | response_parts.timings_of_one(generation.texts)


async def stream_response(generation: Generation, request: CompletionRequest) -> Events:
    """Yield the response as events."""
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    found = [
        response_parts.CompletionLogprobs(generation.service.tokenizer) for _ in generation.texts
    ]

    def chunk(text: Text, piece: _Piece) -> str:
        logprobs = None
        if piece.tokens or piece.first is not None:
            logprobs = found[text.index].of(piece.tokens, first=piece.first, echo=piece.echo)
        out = _head(generation)
        out["choices"] = [
            {
                "index": text.index,
                "text": piece.words,
                "logprobs": logprobs,
                "finish_reason": piece.finish,
            }
        ]
        out |= response_parts.chunk_usage(request.stream_options, text)
        if piece.finish or request.timings_per_token:
            out["timings"] = response_parts.timings(text)
        if piece.progress is not None:
            out["prompt_progress"] = response_parts.progress(text, piece.progress)
        return event(out)

    async with aclosing(_pieces(generation, request)) as pieces:
        async for text, piece in pieces:
            yield chunk(text, piece)
    if include_usage:
        last = {**_head(generation), "choices": [], "usage": response_parts.usage(generation)}
        yield event(last | response_parts.timings_of_one(generation.texts))
    yield event("[DONE]")
