"""Schemas of OpenAI's Responses API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from g4spec.server.fields import (
    Body,
    Content,
    Effort,
    Hints,
    Json,
    Parsed,
    Sampling,
    StructuredOutputs,
)
from g4spec.server.message_fields import Caller
from g4spec.server.request_errors import RequestError, check_query


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None
    parsed: Parsed = None
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
    parsed_arguments: Parsed = None
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
    llama.cpp's and apply to streams, `structured_outputs` is vLLM's.
    """

    client_metadata: Json | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    structured_outputs: StructuredOutputs | None = None
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
    known = {
        "stream": ("true", "false"),
        "include_obfuscation": ("false",),
        "starting_after": (),
        "model": (),
    }
    check_query(query, known)
    for name, value in query.items():
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
