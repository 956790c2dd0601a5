"""Errors of invalid fields: one sentence that names the field as in the request."""

from __future__ import annotations

from typing import Any

import pytest

from g4spec.server import field_errors
from tests.server.running_server import Served
from tests.support.processor_time import processor_time_below

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SOUND: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"prompt": "x"},
    NATIVE: {"prompt": "x"},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    RESPONSES: {"input": "x"},
}
PROMPT = "a string, a list of strings, a list of integers or a list of lists of integers"
CHOICE = "expected 'auto', 'none' or 'required' or a JSON object, found 3"
BLOCKS = "a string or a list of content blocks"
USER = {"role": "user", "content": "x"}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def called(arguments: Any) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (
        CHAT,
        user(3),
        "messages[0].content",
        "expected a string or a list of content parts, found 3",
    ),
    (CHAT, user([3]), "messages[0].content[0]", "expected a JSON object, found 3"),
    (
        CHAT,
        user([{"type": "text", "text": 5}]),
        "messages[0].content[0].text",
        "expected a string, found 5",
    ),
    (CHAT, user([{"type": "text"}]), "messages[0].content[0].text", "missing; it is required"),
    (
        CHAT,
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[0]",
        "image_url is not supported, only text",
    ),
    (
        CHAT,
        called(3),
        "messages[1].tool_calls[0].function.arguments",
        "expected a string or a JSON object, found 3",
    ),
    (CHAT, {"messages": None}, "messages", "expected a list, found null"),
    (CHAT, {"messages": [{}]}, "messages[0].role", "missing; it is required"),
    (
        CHAT,
        {"messages": [{**USER, "audio": {}}]},
        "messages[0].audio",
        "not supported here; leave it out",
    ),
    (MESSAGES, {"stop": "x"}, "stop", "not supported here; use stop_sequences"),
    (CHAT, {"stop": 3}, "stop", "expected a string or a list of strings, found 3"),
    (CHAT, {"stop": ["a", 3]}, "stop[1]", "expected a string, found 3"),
    (CHAT, {"stream": 1}, "stream", "expected true or false, found 1"),
    (CHAT, {"n": True}, "n", "expected an integer, found true"),
    (CHAT, {"tool_choice": 3}, "tool_choice", CHOICE),
    (CHAT, {"tool_choice": {"type": "x"}}, "tool_choice.type", "expected 'function', found 'x'"),
    (
        CHAT,
        {"tool_choice": {"type": "function"}},
        "tool_choice.function",
        "missing; it is required",
    ),
    (CHAT, {"response_format": "x"}, "response_format", "expected a JSON object, found 'x'"),
    (
        CHAT,
        {"stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "expected false, found true",
    ),
    (
        CHAT,
        {"live": "short"},
        "live",
        "expected at least 16 characters, found 'short'",
    ),
    (COMPLETIONS, {"prompt": 3}, "prompt", f"expected {PROMPT}, found 3"),
    (COMPLETIONS, {"prompt": [1, "x"]}, "prompt[1]", "expected an integer, found 'x'"),
    (
        COMPLETIONS,
        {"prompt": [1.5]},
        "prompt[0]",
        "expected a string, an integer or a list, found 1.5",
    ),
    (COMPLETIONS, {"prompt": [[1], ["x"]]}, "prompt[1][0]", "expected an integer, found 'x'"),
    (NATIVE, {"prompt": 3}, "prompt", "expected a string, a JSON object or a list, found 3"),
    (NATIVE, {"prompt": {}}, "prompt.prompt_string", "missing; it is required"),
    (NATIVE, {"prompt": [[{}]]}, "prompt[0][0]", "expected an integer or a string, found {}"),
    (NATIVE, {"logit_bias": 3}, "logit_bias", "expected a JSON object or a list, found 3"),
    (
        NATIVE,
        {"speculative.n_max": -3},
        "speculative.n_max",
        'expected "auto" or 0 to 15, found -3',
    ),
    (MESSAGES, user(3), "messages[0].content", f"expected {BLOCKS}, found 3"),
    (MESSAGES, {"system": 3}, "system", f"expected {BLOCKS}, found 3"),
    (MESSAGES, user([{"type": "text"}]), "messages[0].content[0].text", "missing; it is required"),
    (RESPONSES, {"input": None}, "input", "expected a string or a list of items, found null"),
    (RESPONSES, {"tool_choice": 3}, "tool_choice", CHOICE),
    (RESPONSES, {"stop": [3]}, "stop[0]", "expected a string, found 3"),
]


@pytest.mark.parametrize("path,more,field,message", WRONG)
def test_a_field_is_named_once_with_what_is_allowed(
    busy: Served, path: str, more: Any, field: str, message: str
) -> None:
    error = busy.refused(path, {**SOUND[path], **more})
    assert error["message"] == f"{field}: {message}"
    if path == MESSAGES:
        assert error == {"type": "invalid_request_error", "message": error["message"]}
    else:
        assert error["param"] == field


@pytest.mark.parametrize(
    "path,name,other",
    [
        (CHAT, "stop_sequences", "stop"),
        (CHAT, "max_output_tokens", "max_tokens"),
        (MESSAGES, "max_completion_tokens", "max_tokens"),
        (RESPONSES, "max_tokens", "max_output_tokens"),
        (RESPONSES, "repeat_penalty", "repetition_penalty"),
        (RESPONSES, "response_format", "text"),
        (NATIVE, "max_completion_tokens", "max_tokens"),
    ],
)
def test_fields_of_other_apis_are_named(busy: Served, path: str, name: str, other: str) -> None:
    """The error of `stop_sequences` in a chat was "remove it"."""
    error = busy.refused(path, {**SOUND[path], name: 1})
    assert error["message"] == f"unknown field {name}; use {other}"


def test_names_of_unknown_fields_are_shortened(busy: Served) -> None:
    with processor_time_below(5):  # 10 seconds if the whole name is compared
        error = busy.refused(CHAT, {**SOUND[CHAT], "x" * 10**6: 1})
    assert error["message"] == f"unknown field {'x' * 60}; remove it"
    assert busy.refused(CHAT, {**SOUND[CHAT], "": 1})["message"] == "unknown field ''; remove it"


def test_a_million_wrong_values_are_refused_at_once(busy: Served) -> None:
    """The server answers nothing else meanwhile: errors are not read one by one."""
    with processor_time_below(5):  # 15 seconds if all are read
        error = busy.refused(COMPLETIONS, {"prompt": [1.5] * 350_000})
    assert error["message"].startswith("the request has 1050001 errors in fields; send fewer")
    few = {"prompt": [1.5] * (field_errors.MAX_ERRORS // 4)}
    assert busy.refused(COMPLETIONS, few)["param"] == "prompt[0]"
