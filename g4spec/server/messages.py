"""/v1/messages of Anthropic's API: responses and streams."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from g4spec.server import chat, response_parts
from g4spec.server.fields import Json
from g4spec.server.generation import Delta
from g4spec.server.message_fields import CountRequest, MessagesRequest, chat_request
from g4spec.server.output_parser import ArgumentEvent, CallEvent, Event, TextEvent, ThoughtEvent
from g4spec.server.request_errors import RequestError
from g4spec.server.service import Generation, Job, Service, Text
from g4spec.server.sse import Events, event

VERSIONS = ("2023-06-01", "2026-10-21")
"""Supported API versions. The second removes fields, which this server still accepts."""

PING = event({"type": "ping"}, "ping")


def check_version(request: Request) -> None:
    """Raise RequestError for an unsupported `anthropic-version` header."""
    wanted = request.headers.get("anthropic-version", VERSIONS[0])
    if wanted not in VERSIONS:
        raise RequestError(
            400,
            f"anthropic-version: only {' or '.join(VERSIONS)} is supported",
            param="anthropic-version",
        )


async def build_job(service: Service, request: MessagesRequest) -> Job:
    """Build the job of a request."""
    return await chat.build_job(service, chat_request(request))


async def count(service: Service, request: CountRequest) -> Json:
    """Return the response of /v1/messages/count_tokens."""
    service.check_model(request.model)
    prompt = await chat.build_prompt(service, chat_request(request), generates=False)
    return {"input_tokens": len(prompt.ids)}


async def full_response(generation: Generation, request: MessagesRequest) -> Json:
    """Return the complete response body, assembled from the events of a stream."""
    message: Json = {}
    arguments: dict[int, str] = {}
    async for each in _events(generation, request):
        kind, delta = each["type"], each.get("delta", {})
        if kind == "message_start":
            message = each["message"]
        elif kind == "content_block_start":
            message["content"].append(each["content_block"])
        elif kind == "content_block_delta" and delta["type"] == "input_json_delta":
            arguments[each["index"]] = arguments.get(each["index"], "") + delta["partial_json"]
        elif kind == "content_block_delta":
            name = delta["type"].removesuffix("_delta")
            message["content"][each["index"]][name] += delta[name]
        elif kind == "message_delta":
            message |= {**delta, "usage": each["usage"], "timings": each["timings"]}
    for index, text in arguments.items():
        # Truncated arguments: keep the complete part, as clients of streams do.
        message["content"][index]["input"] = from_json(text, allow_partial=True)
    return message


async def stream_response(generation: Generation, request: MessagesRequest) -> Events:
    """Yield the response as events."""
    async with aclosing(_events(generation, request)) as events:
        async for each in events:
            yield event(each, each["type"])


async def _events(generation: Generation, request: MessagesRequest) -> AsyncGenerator[Json, None]:
    blocks = _Blocks(request)
    text = generation.texts[0]
    started = False
    async with aclosing(generation.deltas()) as deltas:
        async for _, delta in deltas:
            if not started:  # not earlier: prefill reports how much of the prompt was cached
                yield {"type": "message_start", "message": _head(generation)}
                started = True
            for each in blocks.events(delta):
                yield each
            if delta.finish:
                reason = {"stop_reason": _stop_reason(text, delta), "stop_sequence": delta.stop}
                figures = {"usage": _usage(text), "timings": response_parts.timings(text)}
                yield {"type": "message_delta", "delta": reason, **figures}
                yield {"type": "message_stop"}


def _head(generation: Generation) -> Json:
    usage = {**_usage(generation.texts[0]), "output_tokens": 0}
    usage["output_tokens_details"] = {"thinking_tokens": 0}
    return {
        "id": f"msg_{generation.id}",
        "type": "message",
        "role": "assistant",
        "model": generation.service.settings.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(text: Text) -> Json:
    """Return Anthropic's `usage`; its input tokens exclude cached ones."""
    stats = text.request.stats
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.tokens,
        "output_tokens_details": {"thinking_tokens": text.assembler.thoughts},
    }


def _stop_reason(text: Text, delta: Delta) -> str:
    if delta.stop is not None:
        return "stop_sequence"
    if text.request.stats.stop_reason == "context":
        return "model_context_window_exceeded"
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(str(delta.finish), "end_turn")


class _Blocks:
    """Converts deltas to events of content blocks."""

    def __init__(self, request: MessagesRequest) -> None:
        self._index = -1
        self._open: type[Event] | None = None
        self._hidden = request.thinking is not None and request.thinking.display == "omitted"

    def events(self, delta: Delta) -> Iterator[Json]:
        """Yield the events of a delta."""
        for piece in delta.events:
            kind = CallEvent if isinstance(piece, ArgumentEvent) else type(piece)
            if kind is not self._open or isinstance(piece, CallEvent):
                yield from self._close()
                self._open, self._index = kind, self._index + 1
                yield {
                    "type": "content_block_start",
                    "index": self._index,
                    "content_block": _block(piece),
                }
            yield from self._delta(piece)
        if delta.finish:
            yield from self._close()

    def _delta(self, piece: Event) -> Iterator[Json]:
        if isinstance(piece, TextEvent):
            yield self._part("text_delta", text=piece.text)
        elif isinstance(piece, ArgumentEvent):
            yield self._part("input_json_delta", partial_json=piece.json)
        elif isinstance(piece, ThoughtEvent) and not self._hidden:
            yield self._part("thinking_delta", thinking=piece.text)

    def _close(self) -> Iterator[Json]:
        if self._open is None:
            return
        if self._open is ThoughtEvent:  # clients expect one; this server signs nothing
            yield self._part("signature_delta", signature="")
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _part(self, kind: str, **more: Any) -> Json:
        delta = {"type": kind, **more}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _block(piece: Event) -> Json:
    if isinstance(piece, TextEvent):
        return {"type": "text", "text": ""}
    if isinstance(piece, ThoughtEvent):
        return {"type": "thinking", "thinking": "", "signature": ""}
    assert isinstance(piece, CallEvent)
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": piece.name,
        "input": {},
    }
