"""/v1/completions."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from g4spec.server import grammar, options, shapes
from g4spec.server.fields import CompletionRequest
from g4spec.server.gemma import Text as Words
from g4spec.server.generation import Delta, Token
from g4spec.server.refusals import Refused
from g4spec.server.service import Generation, Job, Service, Text
from g4spec.server.streams import Events, event

DEFAULT_TOKENS = 16
"""New tokens where a request names no limit, as OpenAI's API has it."""


async def job_of(service: Service, request: CompletionRequest) -> Job:
    """Build the job of a request."""
    service.check_model(request.model)
    n = options.count(service, request)
    if request.best_of not in (None, n):
        raise Refused(400, "best_of: only the same as n; nothing is chosen from", param="best_of")
    if request.echo and request.logprobs is not None:
        raise Refused(400, "echo with logprobs: prompts have no log-probabilities here",
                      param="echo")  # fmt: skip
    wanted = None
    if request.grammar is not None:
        if request.ignore_eos:
            raise Refused(400, "ignore_eos and a grammar contradict each other", param="ignore_eos")
        wanted = grammar.whole(None, user=grammar.written(request.grammar))
    made = options.options(service, request, request.max_tokens or DEFAULT_TOKENS,
                           logprobs=request.logprobs)  # fmt: skip
    return Job(await prompt_ids(service, request.prompt), made, n, wanted, live=request.live)


async def prompt_ids(service: Service, prompt: str | list[Any]) -> list[int]:
    """Return the tokens of a prompt: a text, its tokens, or a list with one of these."""
    if isinstance(prompt, str):
        return await service.prompter.encode(prompt)
    if prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise Refused(400, "prompt: one at a time; several requests run side by side",
                          param="prompt")  # fmt: skip
        return await prompt_ids(service, prompt[0])
    return list(prompt)


def _head(generation: Generation) -> dict[str, Any]:
    return {"id": f"cmpl-{generation.id}", "object": "text_completion",
            "created": generation.created, "model": generation.service.settings.model}  # fmt: skip


def _words(delta: Delta) -> str:
    return "".join(piece.text for piece in delta.events if isinstance(piece, Words))


def _echo(generation: Generation, request: CompletionRequest) -> str:
    if not request.echo:
        return ""
    if isinstance(request.prompt, str):
        return request.prompt
    return generation.service.tokenizer.decode(generation.job.prompt)


async def answer(generation: Generation, request: CompletionRequest) -> dict[str, Any]:
    """Return the whole response body."""
    texts = [_echo(generation, request) for _ in generation.texts]
    tokens: list[list[Token]] = [[] for _ in texts]
    async with aclosing(generation.deltas()) as deltas:
        async for text, delta in deltas:
            texts[text.index] += _words(delta)
            tokens[text.index] += delta.tokens
    choices = []
    for text in generation.texts:
        told = None
        if request.logprobs is not None:
            told = shapes.legacy(generation.service.tokenizer, tokens[text.index], 0)
        choices.append({"index": text.index, "text": texts[text.index], "logprobs": told,
                        "finish_reason": text.finish})  # fmt: skip
    out = {**_head(generation), "choices": choices, "usage": shapes.usage(generation)}
    return out | ({"timings": shapes.timings(generation.texts[0])} if len(choices) == 1 else {})


async def chunks(
    generation: Generation, request: CompletionRequest, include_usage: bool
) -> Events:  # fmt: skip
    """Yield the response as events."""
    tokenizer = generation.service.tokenizer
    offsets = [0] * len(generation.texts)

    def chunk(text: Text, words: str, tokens: list[Token], finish: str | None = None) -> str:
        told = None
        if tokens:
            told = shapes.legacy(tokenizer, tokens, offsets[text.index])
            offsets[text.index] += sum(map(len, told["tokens"]))
        out = _head(generation)
        out["choices"] = [{"index": text.index, "text": words, "logprobs": told,
                           "finish_reason": finish}]  # fmt: skip
        if include_usage:
            out["usage"] = None
        if finish and len(offsets) == 1:
            out["timings"] = shapes.timings(text)
        return event(out)

    if echo := _echo(generation, request):
        for text in generation.texts:
            yield chunk(text, echo, [])
    async with aclosing(generation.deltas()) as deltas:
        async for text, delta in deltas:
            yield chunk(text, _words(delta), delta.tokens, delta.finish)
    if include_usage:
        yield event({**_head(generation), "choices": [], "usage": shapes.usage(generation)})
    yield event("[DONE]")
