"""Schemas of OpenAI's Responses API, and conversion to chat completion requests."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError, from_json

from g4spec.server import fields
from g4spec.server.fields import Body, ChatRequest, Content, Effort, Hints, Json, Sampling
from g4spec.server.message_fields import Caller, join_thoughts
from g4spec.server.request_errors import RequestError

LOGPROBS = "message.output_text.logprobs"


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Json | None = None


class RefusalPart(Body):
    """A refusal by the assistant, treated as text."""

    type: Literal["refusal"]
    refusal: str


class ThoughtPart(Body):
    """A piece of reasoning, or a summary of it."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


INPUT: dict[str, type[Body]] = dict.fromkeys(("input_text", "text"), TextPart)
OUTPUT: dict[str, type[Body]] = {"output_text": TextPart, **INPUT, "refusal": RefusalPart}
THOUGHT: dict[str, type[Body]] = dict.fromkeys(
    ("reasoning_text", "summary_text", "text"), ThoughtPart
)


class Item(Body):
    """Common fields of items."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    """A message; `phase` is ignored."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None


class CallItem(Item):
    """A function call."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    caller: Caller | None = None
    namespace: None = None


class CallOutputItem(Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    caller: Caller | None = None
    name: str | None = None
    namespace: None = None
    created_by: str | None = None


class ReasoningItem(Item):
    """Reasoning of the assistant; `encrypted_content` is ignored."""

    type: Literal["reasoning"]
    summary: Content = Field(default_factory=list)
    content: Content | None = None
    encrypted_content: str | None = None


class ReferenceItem(Body):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"]
    id: str


ITEMS: dict[str, type[Body]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
}


class FunctionTool(Body):
    """The declaration of a function."""

    type: Literal["function"]
    name: str
    parameters: Json | None = None
    strict: bool | None = None
    description: str | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


class NamedFunction(Body):
    """A `tool_choice` that requires a call of one function."""

    type: Literal["function"]
    name: str


class PlainFormat(Body):
    """A format without a schema: free text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    name: str
    schema_: Json = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


FORMATS: dict[str, type[Body]] = {
    "text": PlainFormat,
    "json_object": PlainFormat,
    "json_schema": SchemaFormat,
}


class TextOptions(Body):
    """Format of the answer."""

    format: Any = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """Reasoning options. Reasoning is not summarized: it is returned in full, as `content`."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input", "expected a string or a list of items")
    return value


class InputRequest(Body):
    """A body of /v1/responses/input_tokens."""

    model: str | None = None
    input: Annotated[
        list[Any],
        BeforeValidator(_items),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
        ),
    ] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    conversation: None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(InputRequest, Sampling, Hints):
    """A body of /v1/responses, with the sampling fields of the other endpoints.

    `client_metadata`, sent by Codex, is ignored. `timings_per_token` and `return_progress` are
    llama.cpp's and apply to streams.
    """

    client_metadata: Json | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_tool_calls: None = None
    prompt: None = None


def followed(query: Mapping[str, str], streamed: bool) -> int | None:
    """Return the sequence number after which events are requested (-1: all), or None if no
    stream is requested.

    Args:
        query: query parameters.
        streamed: True if the response has recorded events.
    """
    known = {"stream": ("true", "false"), "include_obfuscation": ("false",), "starting_after": ()}
    for name, value in query.items():
        if name not in known:
            raise RequestError(
                400,
                f"unknown query parameter {name:.80}; remove it",
                param=name,
                code="unknown_field",
            )
        if known[name] and value not in known[name]:
            raise RequestError(
                400, f"{name}: expected {' or '.join(known[name])}, found {value!r:.60}", param=name
            )
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream == "false":
        if after is not None:
            raise RequestError(400, "starting_after: only with stream=true", param="starting_after")
        return None
    if not streamed:
        raise RequestError(
            400,
            "stream: only a response created with background and stream has events",
            param="stream",
        )
    if after is not None and not re.fullmatch("[0-9]{1,9}", after):
        raise RequestError(
            400,
            "starting_after: expected the sequence_number of the last event received",
            param="starting_after",
        )
    return -1 if after is None else int(after)


def new_id(prefix: str) -> str:
    """Return a random id."""
    return f"{prefix}_{secrets.token_hex(16)}"


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def items(request: InputRequest) -> list[Json]:
    """Validate the input items of a request, and return them in the stored form."""
    out = []
    for i, value in enumerate(request.input):
        where = f"input[{i}]"
        item = fields.variant(ITEMS, value, where, "message")
        kept = item.model_dump(exclude_none=True)
        if isinstance(item, MessageItem):
            kept["content"] = _parts(item, where)
        elif isinstance(item, CallOutputItem):
            parts = _texts(INPUT, item.output, f"{where}.output")
            kept["output"] = [{"type": "input_text", "text": text} for text in parts]
        elif isinstance(item, CallItem):
            _check_arguments(item, where)
        elif isinstance(item, ReasoningItem):
            for name in ("summary", "content"):
                _texts(THOUGHT, kept.get(name, []), f"{where}.{name}")
        if not isinstance(item, ReferenceItem):
            kept.setdefault("id", new_id(_PREFIXES[kept["type"]]))
            kept.setdefault("status", "completed")
        out.append(kept)
    return out


def _check_arguments(item: CallItem, where: str) -> None:
    try:
        whole = isinstance(from_json(item.arguments or "{}"), dict)
    except ValueError:
        whole = False
    if not whole and item.status != "incomplete":
        raise RequestError(
            400, f"{where}.arguments: expected a JSON object", param=f"{where}.arguments"
        )


def _parts(item: MessageItem, where: str) -> list[Json]:
    if item.role != "assistant":
        texts = _texts(INPUT, item.content, f"{where}.content")
        return [{"type": "input_text", "text": text} for text in texts]
    texts = _texts(OUTPUT, item.content, f"{where}.content")
    return [{"type": "output_text", "text": text, "annotations": []} for text in texts]


def _texts(models: dict[str, type[Body]], parts: Sequence[Any], where: str) -> list[str]:
    found = [fields.variant(models, part, f"{where}[{i}]") for i, part in enumerate(parts)]
    return [
        part.refusal if isinstance(part, RefusalPart) else part.text  # type: ignore[attr-defined]
        for part in found
    ]


def chat_request(request: InputRequest, context: Sequence[Json]) -> ChatRequest:
    """Convert a request to the equivalent chat completion request.

    Args:
        context: items of the conversation, including those of the request.
    """
    messages = _messages(context)
    if not messages:
        raise RequestError(
            400, "input: there is no content; send at least one non-empty message", param="input"
        )
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    value: Json = {
        "model": request.model,
        "messages": messages,
        "parallel_tool_calls": request.parallel_tool_calls,
    }
    if request.tools:
        value["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if isinstance(choice, dict):
        named = fields.variant({"function": NamedFunction}, choice, "tool_choice")
        choice = {"type": "function", "function": named.model_dump(include={"name"})}
    value["tool_choice"] = choice
    if request.reasoning is not None:
        value["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        value["response_format"] = _format(request.text.format)
    if isinstance(request, ResponsesRequest):
        value |= {name: getattr(request, name) for name in Sampling.model_fields}
        value |= {"stream": request.stream, "return_progress": request.return_progress}
        value["max_tokens"] = request.max_output_tokens
        if request.top_logprobs or LOGPROBS in (request.include or []):
            value |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return fields.check(ChatRequest, value)


def _tool(tool: Any, where: str) -> Json:
    found = fields.variant({"function": FunctionTool}, tool, where)
    names = {"name", "description", "parameters", "strict"}
    return {"type": "function", "function": found.model_dump(include=names)}


def _format(value: Any) -> Json:
    form = fields.variant(FORMATS, value, "text.format")
    if isinstance(form, SchemaFormat):
        return {
            "type": "json_schema",
            "json_schema": form.model_dump(exclude={"type"}, by_alias=True),
        }
    return form.model_dump()


def _messages(context: Sequence[Json]) -> list[Json]:
    """Convert items to chat messages; adjacent reasoning, text and calls form one message."""
    out: list[Json] = []
    called: set[str] = set()
    for item in context:
        kind = item["type"]
        if kind == "function_call_output":
            if item["call_id"] not in called:
                raise RequestError(
                    400,
                    "function_call_output: there is no function_call before it with "
                    f"the call_id {item['call_id']!r}",
                    param="input",
                )
            out.append(
                {"role": "tool", "tool_call_id": item["call_id"], "content": _plain(item["output"])}
            )
        elif kind == "message" and item["role"] != "assistant":
            out.append({"role": item["role"], "content": _plain(item["content"])})
        elif kind != "function_call" or item["status"] != "incomplete":
            _add(_turn(out, kind), item)
            called |= {item["call_id"]} if kind == "function_call" else set()
    join_thoughts(out)
    return [m for m in out if m["role"] != "assistant" or m["content"] or m.get("tool_calls")]


def _turn(out: list[Json], kind: str) -> Json:
    """Return the assistant message that an item belongs to; append a new one if needed."""
    last = out[-1] if out else {"role": None}
    begun = kind != "function_call" and (last.get("content") or last.get("tool_calls"))
    if last["role"] != "assistant" or begun:
        out.append({"role": "assistant", "content": []})
    return out[-1]


def _plain(parts: Sequence[Json]) -> list[Json]:
    return [{"type": "text", "text": part["text"]} for part in parts]


def _add(message: Json, item: Json) -> None:
    """Add an item to its assistant message; see `join_thoughts`."""
    if item["type"] == "message":
        message["content"] = _plain(item["content"])
    elif item["type"] == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    else:
        texts = [part["text"] for part in item.get("content") or item["summary"]]
        message.setdefault("thoughts", []).extend(text for text in texts if text)
