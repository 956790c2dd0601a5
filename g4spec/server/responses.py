"""/v1/responses of OpenAI's API: responses and streams."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json

from g4spec.server import chat, response_parts
from g4spec.server.fields import Json
from g4spec.server.generation import Delta, Token
from g4spec.server.output_parser import ArgumentEvent, CallEvent, Event, TextEvent, ThoughtEvent
from g4spec.server.request_errors import INTERNAL, RequestError
from g4spec.server.response_fields import InputRequest, ResponsesRequest
from g4spec.server.response_items import chat_request, items, new_id
from g4spec.server.response_store import Record, ResponseStore
from g4spec.server.service import Generation, Job, Service, Text
from g4spec.server.sse import Events, event


def context(store: ResponseStore, request: InputRequest, owner: str | None) -> list[Json]:
    """Return the items of the conversation: those of the previous response, and the request's."""
    before: list[Json] = []
    if request.previous_response_id is not None:
        record = store.get(request.previous_response_id, owner)
        if record.generation is not None:
            raise RequestError(
                400,
                "previous_response_id: this response has not ended yet; wait for it",
                param="previous_response_id",
            )
        before = record.context
    return [*before, *store.find(items(request), owner)]


async def count(
    service: Service, store: ResponseStore, request: InputRequest, owner: str | None
) -> Json:
    """Return the response of /v1/responses/input_tokens."""
    service.check_model(request.model)
    chat_body = chat_request(request, context(store, request, owner))
    prompt = await chat.build_prompt(service, chat_body, generates=False)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}


class Writer:
    """Generates one response: as events, as a complete body, or in the background.

    The other forms are built from the events.

    Args:
        owner: see `Record`.

    Attributes:
        response: the response so far.
    """

    def __init__(
        self, service: Service, store: ResponseStore, request: ResponsesRequest, owner: str | None
    ) -> None:
        if request.background and request.store is False:
            raise RequestError(
                400, "background: only with store; leave out `store: false`", param="background"
            )
        self._service, self._store, self._request = service, store, request
        self._items = context(store, request, owner)
        self._chat = chat_request(request, self._items)
        self.response = _new_response(service, request)
        self._record = Record(owner, self.response, self._items)
        self._number = 0
        self._open: type[Event] | None = None
        self._pending_logprobs: list[Token] = []

    async def job(self) -> Job:
        """Build the job of the request."""
        return await chat.build_job(self._service, self._chat)

    async def full_response(self, generation: Generation) -> Json:
        """Return the complete response body."""
        async with aclosing(self._events(generation)) as events:
            async for _ in events:
                pass
        return self.response

    async def stream_response(self, generation: Generation) -> Events:
        """Yield the response as events."""
        async with aclosing(self._events(generation)) as events:
            async for each in events:
                yield event(each, each["type"])

    def failed(self, refused: RequestError) -> str:
        """Mark the response as failed; return the event `response.failed`."""
        self._end("failed", {"error": {"code": "server_error", "message": refused.message}})
        return event(self._event("response.failed", response=self.response), "response.failed")

    async def start(self) -> Record:
        """Start the generation in the background."""
        generation = await self._service.submit(await self.job())
        self._record.generation = generation
        self._record.events = [] if self._request.stream else None
        self._store.put(self._record)
        self._store.run(self._record, self._service, self._work(generation))
        return self._record

    async def _work(self, generation: Generation) -> None:
        record = self._record
        try:
            async with aclosing(self.stream_response(generation)) as events:
                async for each in events:
                    record.add_event(each)
        except RequestError as refused:
            if not record.cancelled:
                self._service.metrics.count_error(refused.status)
                record.add_event(self.failed(refused))
        finally:
            generation.close()
            if record.cancelled and record.generation is not None:
                self._end("cancelled", {})  # its model may be unloaded since it was closed
            if record.generation is not None:  # shutdown or a bug
                record.add_event(self.failed(RequestError(500, INTERNAL)))
            record.add_event(ended=True)

    # ---- events

    def _event(self, kind: str, **more: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    async def _events(self, generation: Generation) -> AsyncGenerator[Json, None]:
        for kind in ("created", "in_progress"):
            now = {**self.response, "output": []}
            yield self._event(f"response.{kind}", response=now)
        async with aclosing(generation.deltas()) as deltas:
            async for text, delta in deltas:
                if delta.progress is not None:
                    yield self._progress(text, delta.progress)
                timed = self._request.timings_per_token and not delta.finish
                timings: Json = {"timings": response_parts.timings(text)} if timed else {}
                for each in self._pieces(delta):
                    yield {**each, **timings}
        text = generation.texts[0]
        status = "incomplete" if text.finish == "length" else "completed"
        timings = {"timings": response_parts.timings(text)}
        more: Json = {"usage": _usage(generation), **timings}
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        self._end(status, more)
        yield self._event(f"response.{status}", response=self.response, **timings)

    def _progress(self, text: Text, read: int) -> Json:
        """Return the event for the progress of prefill, as llama.cpp does."""
        progress = response_parts.progress(text, read)
        timed = self._request.timings_per_token
        timings: Json = {"timings": response_parts.timings(text, read)} if timed else {}
        now = {**self.response, "output": []}
        return self._event(
            "response.in_progress", response=now, prompt_progress=progress, **timings
        )

    def _end(self, status: str, more: Json) -> None:
        """Set the final status of the response, and store it if requested."""
        self.response |= {"status": status, "completed_at": int(time.time()), **more}
        running, self._record.generation = self._record.generation, None
        kept = self._store.keeps(self._record) if running else self._request.store is not False
        if kept:
            self._store.put(self._record)

    def _pieces(self, delta: Delta) -> Iterator[Json]:
        """Yield the events of a delta."""
        self._pending_logprobs += delta.tokens
        for piece in delta.events:
            kind = CallEvent if isinstance(piece, ArgumentEvent) else type(piece)
            if kind is not self._open or isinstance(piece, CallEvent):
                yield from self._close()
                yield from self._begin(piece)
                self._open = kind
            yield from self._append(piece)
        if delta.finish:
            yield from self._close(cut=delta.finish == "length")

    @property
    def _item(self) -> Json:
        """Return the current output item."""
        item: Json = self.response["output"][-1]
        return item

    def _position(self, **more: Any) -> Json:
        """Return the fields that locate an event in the output, with `more`."""
        at = {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}
        return {**at, **({} if self._open is CallEvent else {"content_index": 0}), **more}

    def _begin(self, piece: Event) -> Iterator[Json]:
        output = self.response["output"]
        item = _new_item(piece)
        output.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        index = len(output) - 1
        yield self._event("response.output_item.added", output_index=index, item=shown)
        if "content" in item:
            yield self._event(
                "response.content_part.added",
                item_id=item["id"],
                output_index=index,
                content_index=0,
                part=dict(item["content"][0]),
            )

    def _append(self, piece: Event) -> Iterator[Json]:
        item = self._item
        if isinstance(piece, TextEvent):
            yield self._append_text(piece.text)
        elif isinstance(piece, ThoughtEvent):
            item["content"][0]["text"] += piece.text
            yield self._event("response.reasoning_text.delta", **self._position(delta=piece.text))
        elif isinstance(piece, ArgumentEvent):
            item["arguments"] += piece.json
            yield self._event(
                "response.function_call_arguments.delta", **self._position(delta=piece.json)
            )

    def _append_text(self, text: str) -> Json:
        """Append to the text of a message, with the pending log-probabilities."""
        tokens = response_parts.chat_logprobs(self._service.tokenizer, self._pending_logprobs)
        self._pending_logprobs.clear()
        part = self._item["content"][0]
        part["text"] += text
        part["logprobs"] += tokens
        return self._event(
            "response.output_text.delta", **self._position(delta=text, logprobs=tokens)
        )

    def _close(self, *, cut: bool = False) -> Iterator[Json]:
        """Finish the current item; yield its events.

        Args:
            cut: the text was truncated by the token limit.
        """
        if self._open is None:
            return
        item = self._item
        if self._open is TextEvent and self._pending_logprobs:
            yield self._append_text("")
        item["status"] = "incomplete" if cut and not _is_complete_call(item) else "completed"
        if self._open is CallEvent:
            whole = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **self._position(**whole))
        else:
            part = item["content"][0]
            kind, text = part["type"], {"text": part["text"]}
            if self._open is TextEvent:
                text["logprobs"] = part["logprobs"]
            yield self._event(f"response.{kind}.done", **self._position(**text))
            yield self._event("response.content_part.done", **self._position(part=part))
        at = len(self.response["output"]) - 1
        yield self._event("response.output_item.done", output_index=at, item=item)
        self._open = None


def _is_complete_call(item: Json) -> bool:
    """Return True if an item is a call with complete arguments."""
    try:
        return isinstance(from_json(item.get("arguments", "")), dict)
    except ValueError:
        return False


def _new_item(piece: Event) -> Json:
    """Return a new output item for an event."""
    if isinstance(piece, TextEvent):
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "content": [part],
            "status": "in_progress",
        }
    if isinstance(piece, ThoughtEvent):
        return {
            "id": new_id("rs"),
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": ""}],
            "status": "in_progress",
        }
    assert isinstance(piece, CallEvent)
    return {
        "id": new_id("fc"),
        "type": "function_call",
        "call_id": new_id("call"),
        "name": piece.name,
        "arguments": "",
        "status": "in_progress",
    }


def _new_response(service: Service, request: ResponsesRequest) -> Json:
    """Return a new response object without output."""
    text = request.text.model_dump(exclude_none=True) if request.text is not None else {}
    reasoning = request.reasoning
    tools = [{"parameters": None, "strict": None, **tool} for tool in request.tools or []]
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": service.settings.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": request.tool_choice or ("auto" if tools else "none"),
        "tools": tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }


def _usage(generation: Generation) -> Json:
    """Return the `usage` object of the Responses API."""
    usage = response_parts.usage(generation)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
