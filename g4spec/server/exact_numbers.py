"""Refuse numbers of JSON schemas that llguidance would replace by others.

Its `%json` reads numbers as 64-bit floats, and not always as the nearest one: the constant
9007199254740993 becomes ...992, 123456789.12345679 becomes 123456789.1234568. The constant -2^63
ends the process, by an endless recursion (llguidance 1.9.1).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from functools import cache
from typing import Any

import llguidance

from g4spec.errors import Unsupported
from g4spec.server.schemas import BOUNDS, NAMED_PARTS

_WHOLE = 2**53
"""All integers up to here are exact as floats."""

_INT64 = 2**63
"""Limit from which llguidance writes only the leading digits, or limits bounds of integers."""

_LARGEST_STEP = 2**18
"""Largest `multipleOf`. llguidance compiles a state for each remainder: 2^18 in 0.1 s, 2^22 in
19 s, 2^31 not within minutes."""

_VALUES = ("const", "enum")
_ANY_VALUE = (*_VALUES, "default", "examples", "example")
"""Keywords whose value contains no schemas."""


def refuse_rounded(schema: Any, where: str) -> None:
    """Raise Unsupported if a schema has constants or bounds that llguidance would change.

    Args:
        where: name of the schema in errors.
    """
    stack = [schema]  # no recursion: parts that nothing refers to may be nested deeply
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        if not isinstance(part, Mapping):
            continue
        for keyword, value in part.items():
            if keyword in _VALUES:
                if changed := _changed(value):
                    raise _rounded(where, keyword, changed[0])
            elif keyword in BOUNDS:
                if not _is_exact(keyword, value, part.get("type")):
                    raise _rounded(where, keyword, value)
                if _is_long(keyword, value):
                    raise _too_long(where, value)
            elif keyword in NAMED_PARTS and isinstance(value, Mapping):
                stack += value.values()
            elif keyword not in _ANY_VALUE:
                stack.append(value)


def refuse_rounded_in_lark(grammar: str) -> None:
    """Do the same for the schemas after `%json`; llguidance reports those that are no JSON."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"%json\s*", grammar):
        with suppress(ValueError, RecursionError):
            refuse_rounded(decoder.raw_decode(grammar, found.end())[0], "the grammar")


def _rounded(where: str, keyword: str, value: float) -> Unsupported:
    """Return the error for a keyword with a number that llguidance would change."""
    fix = "make it a string, or let the model call a function: its constants are exact"
    return Unsupported(
        f"schema of {where}: {keyword} has a number that cannot be enforced exactly",
        expected="integers up to 2^53, numbers of at most 15 digits",
        found=json.dumps(value)[:120],
        fix="use a bound with fewer digits, or remove it" if keyword in BOUNDS else fix,
    )


def bound_is_enforced(keyword: str, value: Any, kind: Any) -> bool:
    """Return True if a bound is exact (see `_is_exact`) and compiled in time."""
    return _is_exact(keyword, value, kind) and not _is_long(keyword, value)


def _is_long(keyword: str, value: Any) -> bool:
    return keyword == "multipleOf" and _is_number(value) and abs(value) > _LARGEST_STEP


def _too_long(where: str, value: float) -> Unsupported:
    return Unsupported(
        f"schema of {where}: multipleOf takes too long to compile",
        expected=f"at most {_LARGEST_STEP:,}",
        found=json.dumps(value)[:120],
        fix="use a smaller one, or remove it",
    )


def _is_exact(keyword: str, value: Any, kind: Any) -> bool:
    """Return True if llguidance accepts only numbers within a bound, or the bound is no number.

    Args:
        kind: the value of `type` beside it.
    """
    if not _is_number(value) or (isinstance(value, float) and not value.is_integer()):
        return not _changed(value)
    limit = int(value)
    if abs(limit) < _WHOLE:
        return True
    if keyword.startswith("exclusive") and kind != "number":
        return False  # llguidance adds or subtracts 1 as a float
    if kind == "integer" and keyword == "maximum" and limit >= _INT64 - 1:
        return True  # becomes 2^63 - 1
    if abs(limit) < _INT64:
        return Decimal(float(limit) if kind == "integer" else repr(float(limit))) == limit
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _changed(value: Any) -> list[float]:
    """Return the numbers in a constant that llguidance would change."""
    integers: list[float] = []
    floats: list[float] = []
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, (list, Mapping)):
            stack += reversed(part if isinstance(part, list) else list(part.values()))
        elif isinstance(part, float) and not (part.is_integer() and abs(part) <= _INT64):
            floats.append(part)
        elif _is_number(part):
            integers.append(part)
    changed = [n for n in integers if abs(n) >= _INT64 or float(n) != n]
    return changed or _changed_floats([n for n in floats if not _is_short(n)])


def _is_short(number: float) -> bool:
    """Return True if one exact operation makes the float of its digits and its power of ten."""
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return math.isfinite(number) and len(digits) <= 15 and abs(int(exponent)) <= 22


def _changed_floats(numbers: list[float]) -> list[float]:
    """Return the numbers that differ in the text that llguidance forces for a constant list."""
    if not numbers or not all(map(math.isfinite, numbers)):
        return numbers
    schema = {"const": numbers, "x-guidance": {"whitespace_flexible": False}}
    matcher = llguidance.LLMatcher(_bytes(), f"start: %json {json.dumps(schema)}", log_level=0)
    if matcher.is_error():
        return numbers
    texts = bytes(matcher.compute_ff_tokens()).decode().strip("[]").split(",")
    return [n for n, text in zip(numbers, texts, strict=True) if float(text) != n]


@cache
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")
