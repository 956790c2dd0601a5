"""Schemas of Anthropic's Messages API, and conversion to chat completion requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from g4spec.server import fields
from g4spec.server.fields import Body, ChatRequest, Content, Json, Sampling
from g4spec.server.options import MAX_STOPS
from g4spec.server.request_errors import RequestError

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""Header line of Claude Code's system prompt. It is removed: it contains a hash of the request, so
no two prompts would share a cached prefix."""


class TextBlock(Body):
    """A text block."""

    type: Literal["text"]
    text: str
    cache_control: Json | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Body):
    """Reasoning of the assistant; the signature is ignored."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Body):
    """Encrypted reasoning, which is dropped: only Anthropic can read it."""

    type: Literal["redacted_thinking"]
    data: str


class Caller(Body):
    """The caller of a tool; only the model itself (`direct`) is supported."""

    type: Literal["direct"]


class ToolUseBlock(Body):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    cache_control: Json | None = None
    caller: Caller | None = None
    toolset_name: None = None


class ToolResultBlock(Body):
    """The result of a tool call; with `is_error` its text is prefixed with "Error: "."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None
    cache_control: Json | None = None
    toolset_name: None = None


class ReferenceBlock(Body):
    """A tool that a search has found: from then on, its deferred declaration is shown."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: Json | None = None


TEXT: dict[str, type[Body]] = {"text": TextBlock}
RESULT: dict[str, type[Body]] = {**TEXT, "tool_reference": ReferenceBlock}
USER: dict[str, type[Body]] = {**TEXT, "tool_result": ToolResultBlock}
ASSISTANT: dict[str, type[Body]] = {
    **TEXT,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedBlock,
    "tool_use": ToolUseBlock,
}
BLOCKS = {"system": TEXT, "user": USER, "assistant": ASSISTANT}
"""Allowed content blocks by message role."""


class MessageParam(Body):
    """A chat message."""

    role: Literal["system", "user", "assistant"]
    content: Content


class ToolParam(Body):
    """The declaration of a function. Arguments are always streamed incrementally.

    With `defer_loading` the model sees it only after a `tool_reference` to it.
    """

    name: str
    description: str | None = None
    input_schema: Json
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Json | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(Body):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Reasoning: on or off, token budget, and whether it is part of the response."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class AnswerFormat(Body):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Body):
    """Format of the answer; `effort` has no effect: Gemma 4 has no reasoning levels."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnswerFormat | None = None


class KeepThinking(Body):
    """A context edit without effect: keep all reasoning."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Context edits."""

    edits: list[KeepThinking] | None = None


class CountRequest(Body):
    """A body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[MessageParam] = Field(min_length=1)
    system: Content | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Json | None = None
    speed: Literal["standard"] | None = None


class MessagesRequest(CountRequest, Sampling):
    """A body of /v1/messages, with the sampling fields of the other endpoints.

    `thread` is refused: no messages are stored.
    """

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOPS)
    stop: None = None
    stream: bool | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    thread: Json | None = None


def chat_request(request: CountRequest) -> ChatRequest:
    """Convert a request to the equivalent chat completion request."""
    tools = [_declared(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or [])]
    shown = {tool.name: not tool.defer_loading for tool in tools}
    messages = [*_system(request.system or []), *_messages(request.messages, shown)]
    value: Json = {"model": request.model, "messages": messages}
    value["continue_final_message"] = messages[-1]["role"] == "assistant"
    value["tools"] = [_tool(tool) for tool in tools if shown[tool.name]]
    if request.tool_choice is not None:
        value |= _choice(request.tool_choice)
    if request.thinking is not None:
        value |= _thinking(request.thinking)
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.schema_, "strict": True}
        value["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        if request.thread is not None:
            raise _no_threads()
        value |= {name: getattr(request, name) for name in Sampling.model_fields}
        value |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences}
    return fields.check(ChatRequest, value)


def _no_threads() -> RequestError:
    """Return the error by which Anthropic's SDK knows that it must send all messages."""
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return RequestError(
        400,
        "thread: messages are not stored here; send all messages, without thread",
        param="thread",
        more={"details": details},
    )


def _system(blocks: Sequence[Any]) -> list[Json]:
    texts = _texts(blocks, "system")
    texts[:1] = [_BILLING.sub("", text) for text in texts[:1]]
    texts = [text for text in texts if text]
    return [{"role": "system", "content": _parts(texts)}] if texts else []


def _texts(blocks: Sequence[Any], where: str) -> list[str]:
    """Return the texts of text blocks; raise RequestError for other blocks."""
    found = [fields.variant(TEXT, block, f"{where}[{i}]") for i, block in enumerate(blocks)]
    return [block.text for block in found if isinstance(block, TextBlock)]


def _parts(texts: Sequence[str]) -> list[Json]:
    return [{"type": "text", "text": text} for text in texts]


def _messages(messages: Sequence[MessageParam], shown: dict[str, bool]) -> list[Json]:
    """Convert messages; merge adjacent messages of one role and put tool results first.

    Args:
        shown: by the name of each tool, whether the model sees it; updated by references.
    """
    out: list[Json] = []
    called: set[str] = set()  # ids of the calls that results may belong to
    for i, message in enumerate(messages):
        for j, value in enumerate(message.content):
            where = f"messages[{i}].content[{j}]"
            block = fields.variant(BLOCKS[message.role], value, where)
            if isinstance(block, ToolResultBlock):
                at = len(out) - (bool(out) and out[-1]["role"] == "user")
                out.insert(at, _result(block, called, shown, where))
                continue
            if not out or out[-1]["role"] != message.role:
                out.append({"role": message.role, "content": []})
                called = called if message.role == "user" else set()
            _add(out[-1], block)
            called |= {block.id} if isinstance(block, ToolUseBlock) else set()
    join_thoughts(out)
    found = [m for m in out if m["content"] or m["role"] == "tool" or m.get("tool_calls")]
    if not found:
        raise RequestError(
            400,
            "messages: there is no content; send at least one non-empty message",
            param="messages",
        )
    return found


def join_thoughts(messages: Sequence[Json]) -> None:
    """Replace the list `thoughts` of each message by its `reasoning_content`, once: there may be
    many."""
    for message in messages:
        if thoughts := message.pop("thoughts", None):
            message["reasoning_content"] = "\n".join(thoughts)


def _add(message: Json, block: Body) -> None:
    """Append a block to a chat message; see `join_thoughts`."""
    if isinstance(block, TextBlock):
        message["content"] += _parts([block.text])
    elif isinstance(block, ThinkingBlock) and block.thinking:
        message.setdefault("thoughts", []).append(block.thinking)
    elif isinstance(block, ToolUseBlock):
        function = {"name": block.name, "arguments": block.input}
        call = {"id": block.id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _result(block: ToolResultBlock, called: set[str], shown: dict[str, bool], where: str) -> Json:
    """Convert a tool result to a message with the role tool.

    Args:
        called: ids of the calls in the turn before it.
        shown: see `_messages`.
    """
    if block.tool_use_id not in called:
        raise RequestError(
            400,
            f"{where}: there is no tool_use {block.tool_use_id!r} in the turn before it",
            param=where,
        )
    texts = []
    for i, value in enumerate(block.content or []):
        at = f"{where}.content[{i}]"
        part = fields.variant(RESULT, value, at)
        if isinstance(part, ReferenceBlock):
            if part.tool_name not in shown:
                raise RequestError(
                    400,
                    f"{at}.tool_name: there is no tool {part.tool_name!r:.80} in tools",
                    param=f"{at}.tool_name",
                )
            shown[part.tool_name] = True
            texts.append(part.tool_name)
        elif isinstance(part, TextBlock):
            texts.append(part.text)
    text = "\n".join(texts)
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }


def _declared(tool: Any, where: str) -> ToolParam:
    found = fields.variant({"custom": ToolParam}, tool, where, "custom")
    assert isinstance(found, ToolParam)
    return found


def _tool(tool: ToolParam) -> Json:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Json:
    if (choice.name is not None) != (choice.type == "tool"):
        raise RequestError(
            400,
            "tool_choice.name: required for the type tool, not allowed for other types",
            param="tool_choice.name",
        )
    out: Json = {"tool_choice": "required" if choice.type == "any" else choice.type}
    if choice.type == "tool":
        out["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        out["parallel_tool_calls"] = False
    return out


def _thinking(thinking: Thinking) -> Json:
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    if thinking.budget_tokens is not None and thinking.type != "enabled":
        raise RequestError(
            400,
            "thinking.budget_tokens: only with the type enabled; change one of them",
            param="thinking.budget_tokens",
        )
    return {"reasoning_effort": "high", "thinking_budget_tokens": thinking.budget_tokens}
