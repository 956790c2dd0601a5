"""Reads the JSON files of `--messages` and `--tools`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4spec.cli import _inputs
from g4spec.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages, as in `POST /v1/chat/completions`."""


def read_messages(path: Path) -> list[dict[str, Any]]:
    """Read a conversation; raise InputError for a message that `serve` refuses too."""
    messages = _objects(path, "role")
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:  # a template may drop its message
            raise InputError(
                f"{path}: role", expected=f"one of {', '.join(ROLES)}", found=message["role"]
            )
        if not _has_text(message):
            raise InputError(
                f"{path}: message {i + 1}, of the role {message['role']}, has no text",
                expected='a text field "content"',
                found=_shown(message),
            )
    return messages


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Read functions that the model may call; raise InputError for a tool that `serve` refuses too.

    A missing description becomes an empty one, which templates require.
    """
    tools = _objects(path, "type")
    for i, tool in enumerate(tools):
        where, function = f"{path}: tool {i + 1}", tool.get("function")
        if tool["type"] != "function":
            raise InputError(f'{where}: "type"', expected="function", found=f"{tool['type']:.80}")
        if not isinstance(function, dict):
            raise InputError(
                f'{where}: "function"',
                expected='an object with the fields "name", "description" and "parameters"',
                found=_shown(function),
            )
        for name, kind, expected in (
            ("name", str, "a text"),
            ("description", str, "a text"),
            ("parameters", dict, "a JSON schema, which is an object"),
        ):
            value = function.get(name)
            if not isinstance(value, kind) and (value is not None or name == "name"):
                raise InputError(
                    f'{where}: "function.{name}"', expected=expected, found=_shown(value)
                )
        if function.get("description") is None:
            function["description"] = ""
    return tools


def _has_text(message: Mapping[str, Any]) -> bool:
    """Return True if the content is text or text parts, or only tool calls of an assistant."""
    content = message.get("content")
    if content is None:
        return message["role"] == "assistant" and bool(message.get("tool_calls"))
    if not isinstance(content, list):
        return isinstance(content, str)
    texts = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"]
    return 0 < len(texts) == len(content) and all(isinstance(text, str) for text in texts)


def _objects(path: Path, key: str) -> list[dict[str, Any]]:
    """Read a JSON list of objects that all have the text field `key`."""
    try:
        found = json.loads(_inputs.read_text(path))
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {str(error)[:80]}") from None
    expected = f'objects with a text field "{key}"'
    if found == []:
        raise InputError(f"{path}: the list is empty", expected=f"one or more {expected}")
    if not isinstance(found, list):
        raise InputError(f"{path}: not a list of {expected}", found=_shown(found))
    for i, entry in enumerate(found):
        if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
            raise InputError(
                f"{path}: entry {i + 1} of the list",
                expected=f'an object with a text field "{key}"',
                found=_shown(entry),
            )
    return found


def _shown(value: object) -> str:
    """Return the first 80 characters of a value of a JSON file, in JSON."""
    return "nothing" if value is None else f"{json.dumps(value, ensure_ascii=False):.80}"
