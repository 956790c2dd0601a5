"""Convert JSON Schema keywords for numbers and strings to grammar terminals."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance

from g4spec.server.schemas import BOUNDS

_DAY = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_ATOM = "[A-Za-z0-9_+-]{1,32}"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"

FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,8}}",
    "email": rf"{_ATOM}(\.{_ATOM}){{0,4}}@{_LABEL}(\.{_LABEL}){{1,8}}",
}
"""Regular expressions of `format` values (full match). Dates like 02-31 are accepted."""


def has_type(value: Any, types: Sequence[str]) -> bool:
    """Return True if a JSON value has one of the types."""
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, (int, float)):
        return "number" in types or ("integer" in types and value == int(value))
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)] in types


SIZE_KEYWORDS: dict[type, str] = {str: "Length", list: "Items", dict: "Properties"}
NESTED_KEYWORDS: dict[type, tuple[str, ...]] = {
    str: ("pattern",),
    list: ("items", "prefixItems", "additionalItems"),
    dict: ("properties", "patternProperties", "additionalProperties", "required"),
}
"""Keywords, by type of value, that are not checked for `enum` and `const` values."""


def within_bounds(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return True if a value is within the bounds and sizes of a schema."""
    if (name := SIZE_KEYWORDS.get(type(value))) is not None:
        least, most = schema.get(f"min{name}"), schema.get(f"max{name}")
        return (least is None or len(value) >= least) and (most is None or len(value) <= most)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    checks: dict[str, Callable[[Any, Any], bool]] = {
        "minimum": operator.ge,
        "maximum": operator.le,
        "exclusiveMinimum": operator.gt,
        "exclusiveMaximum": operator.lt,
        "multipleOf": lambda a, b: b != 0 and a % b == 0,
    }
    return all(check(value, schema[k]) for k, check in checks.items() if schema.get(k) is not None)


def bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the range keywords of a number schema."""
    return {k: schema[k] for k in BOUNDS if schema.get(k) is not None}


def terminal(schema: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """Return the terminal of a string schema (None: any), and the keywords it does not enforce."""
    parts: list[str] = []
    unenforced: list[str] = []
    if (pattern := schema.get("pattern")) is not None:
        found = search_terminal(pattern)
        parts += [found] if found else []
        unenforced += [] if found else ["pattern"]
    if (name := schema.get("format")) is not None:
        if name in FORMATS:
            parts.append(f"/{FORMATS[name]}/")
        else:
            unenforced.append("format")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        parts.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
    return (" & ".join(parts) if parts else None), unenforced


def search_terminal(pattern: Any) -> str | None:
    """Return a terminal for strings that contain a match of an ECMA regular expression.

    Return None for look-around, back references and inner anchors, which are unsupported.
    """
    if not isinstance(pattern, str):
        return None
    branches = []
    for branch in alternatives(pattern):
        start = "" if branch.startswith("^") else "(?s:.*)"
        end = "" if re.search(r"(?<!\\)(\\\\)*\$$", branch) else "(?s:.*)"
        core = branch.removeprefix("^")
        branches.append(f"{start}(?:{core if end else core[:-1]}){end}")
    try:
        regex = llguidance.regex_to_lark("|".join(branches), "dw")
    except ValueError:
        return None
    grammar = llguidance.LLMatcher.grammar_from_lark(f"start: A\nA: /{regex}/")
    return None if llguidance.LLMatcher.validate_grammar(grammar) else f"/{regex}/"


def alternatives(pattern: str) -> list[str]:
    """Split a regular expression at its top-level `|`."""
    branches, depth, in_class, at = [""], 0, False, 0
    while at < len(pattern):
        c = pattern[at]
        if c == "\\":
            c = pattern[at : at + 2]
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
        elif c in "()":
            depth += 1 if c == "(" else -1
        elif c == "|" and not depth:
            branches.append("")
            at += 1
            continue
        branches[-1] += c
        at += len(c)
    return branches
