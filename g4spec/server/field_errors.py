"""Word the errors of pydantic as one sentence about a field, named as in the request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from g4spec.errors import did_you_mean
from g4spec.server.request_errors import RequestError

Path = tuple[int | str, ...]

EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a JSON object",
    "model_type": "a JSON object",
    "list[Part]": "a list of content parts",
    "list[str]": "a list of strings",
    "list[int]": "a list of integers",
    "list[list[int]]": "a list of lists of integers",
}
"""Allowed values, by the type of an error, or by the branch of a union if its value is no list."""

SAME = (
    ("stop", "stop_sequences"),
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"),
    ("repetition_penalty", "repeat_penalty"),
    ("response_format", "text", "output_config"),
)
"""Names that different APIs have for the same field."""

MAX_ERRORS = 20_000
"""Maximum number of errors to read: pydantic reads all or none, and each takes microseconds."""


def spelled(value: object) -> str:
    """Return the first characters of a value, for messages."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (str, list)):
        value = value[:60]  # the rest may take seconds to spell
    return f"{value!r:.60}"


def spelled_path(path: Sequence[int | str], where: str) -> str:
    """Return a path below `where` like `messages[0].content`."""
    for part in path:
        where += f"[{part}]" if isinstance(part, int) else f"{'.' if where else ''}{part:.60}"
    return where


def refused(error: ValidationError, value: Any, where: str, known: Sequence[str]) -> RequestError:
    """Return the error of the first invalid field.

    Args:
        value: what was validated.
        where: path of the value.
        known: names of its fields, for suggestions.
    """
    if (n := error.error_count()) > MAX_ERRORS:
        what = f"{where}: found" if where else "the request has"
        message = f"{what} {n} errors in fields; send fewer values to see the first"
        return RequestError(400, message, param=where or None)
    path, errors = _first_invalid(error.errors(include_url=False), value)
    first, where = errors[0], spelled_path(path, where)
    if first["type"] == "extra_forbidden":
        fields = known if len(path) == 1 else ()
        fix = _renamed(path[-1], fields) or did_you_mean(f"{path[-1]:.60}", fields) or "remove it"
        name = where or "''"
        return RequestError(400, f"unknown field {name}; {fix}", param=where, code="unknown_field")
    if first["type"] == "missing":
        message = "missing; it is required"
    elif first["type"] == "none_required":
        fix = _renamed(path[-1], known if len(path) == 1 else ()) or "leave it out"
        message = f"not supported here; {fix}"
    else:
        *others, last = dict.fromkeys(map(_expected, errors))
        wanted = f"{', '.join(others)} or {last}" if others else last
        message = f"expected {wanted}, found {spelled(first['input'])}"
    return RequestError(400, f"{where}: {message}", param=where or None)


def _renamed(name: int | str, known: Sequence[str]) -> str | None:
    """Return "use ..." with the name that this API has for a field of another one."""
    same = next((names for names in SAME if name in names), ())
    return next((f"use {other}" for other in same if other != name and other in known), None)


def _first_invalid(errors: Sequence[Any], value: Any) -> tuple[Path, list[Any]]:
    """Return the path of the first invalid field, with its errors.

    In a union, each branch has errors: those of the branches that read most of the value count.
    """
    places = [_place(error, value) for error in errors]
    union, branch = places[0]
    if not branch:
        return union, [errors[0]]
    n_steps = errors[0]["loc"].index(branch[0])
    firsts: dict[Path, tuple[Path, Any]] = {}  # the first error of each branch
    for (path, branch), error in zip(places, errors, strict=True):
        if path[:n_steps] == union[:n_steps]:
            firsts.setdefault(branch, (path, error))
    furthest = max((path for path, _ in firsts.values()), key=_progress)
    return furthest, [error for path, error in firsts.values() if path == furthest]


def _progress(path: Path) -> tuple[int, list[int]]:
    return len(path), [part for part in path if isinstance(part, int)]


def _place(error: Any, value: Any) -> tuple[Path, Path]:
    """Return the path of an error, and the names of branches of unions in its location."""
    path: Path = ()
    branch: Path = ()
    for i, part in enumerate(error["loc"]):
        if isinstance(part, int) or (isinstance(value, dict) and part in value):
            value, path = value[part], (*path, part)
        elif error["type"] == "missing" and i == len(error["loc"]) - 1:
            path = (*path, part)
        else:
            branch = (*branch, part)
    return path, branch


def _expected(error: Any) -> str:
    kind, last = error["type"], error["loc"][-1]
    if kind == "list_type" and last in EXPECTED:
        return EXPECTED[last]
    if kind in EXPECTED:
        return EXPECTED[kind]
    words = re.fullmatch(
        r"(?:(?:Input|List|String) should (?:be|have)|expected) (.+?)(?: after validation.*)?",
        error["msg"],
    )
    wanted = words[1].replace("False", "false") if words else error["msg"]
    return f"a value {wanted}" if kind.startswith(("greater", "less")) else wanted
