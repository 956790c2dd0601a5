"""Items of OpenAI's Responses API: validation, and conversion to chat completion requests."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from g4spec.server import fields
from g4spec.server.fields import Body, ChatRequest, Json, Sampling
from g4spec.server.message_fields import join_thoughts
from g4spec.server.request_errors import RequestError
from g4spec.server.response_fields import (
    FORMATS,
    INPUT,
    ITEMS,
    OUTPUT,
    THOUGHT,
    CallItem,
    CallOutputItem,
    FunctionTool,
    InputRequest,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ReferenceItem,
    RefusalPart,
    ResponsesRequest,
    SchemaFormat,
)

LOGPROBS = "message.output_text.logprobs"


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
        if request.structured_outputs is not None and "response_format" in value:
            raise RequestError(
                400,
                "structured_outputs and text.format exclude each other; set only one",
                param="structured_outputs",
            )
        value["structured_outputs"] = request.structured_outputs
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
