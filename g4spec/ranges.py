"""Valid values of parameters: one table for the library and the command line.

This module does not import torch, so that a wrong option is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, NamedTuple

from g4spec.core import MAX_DRAFT
from g4spec.errors import UsageError


class Range(NamedTuple):
    """The valid values of a parameter.

    Attributes:
        contains: whether it contains a number. `text`: its description in errors.
        type: `Integral`, or `Real` for parameters that may have a fraction; never bool.
        word: a valid value that is not a number, or "".
    """

    contains: Callable[[Any], bool]
    text: str
    type: type[Any] = Integral
    word: str = ""


MAX_COUNT = 100_000
"""Largest number of comparisons or repeats in one run."""
MAX_PARALLEL = 1024
"""Largest number of running requests of an engine, each of which has memory from the start, and of
completions of one prompt."""

_COUNT = Range(lambda x: 1 <= x <= MAX_COUNT, f"1 to {MAX_COUNT}")
_PARALLEL = Range(lambda x: 1 <= x <= MAX_PARALLEL, f"1 to {MAX_PARALLEL}")
_POSITIVE = Range(lambda x: x >= 1, ">= 1")
_NOT_NEGATIVE = Range(lambda x: x >= 0, ">= 0")
_OPENAI_PENALTY = Range(lambda x: -2 <= x <= 2, "in [-2, 2]", Real)

RANGES = {
    "temperature": Range(lambda x: math.isfinite(x) and x >= 0, "a finite number >= 0", Real),
    "top_k": Range(lambda x: x >= 0, ">= 0 (0 keeps all)"),
    "top_p": Range(lambda x: 0 < x <= 1, "in (0, 1]", Real),
    "min_p": Range(lambda x: 0 <= x <= 1, "in [0, 1]", Real),
    "top_n_sigma": Range(
        lambda x: math.isfinite(x) and x >= 0, "a finite number >= 0 (0 keeps all)", Real
    ),
    "seed": Range(lambda x: 0 <= x < 2**64, "in [0, 2^64)"),
    "repetition_penalty": Range(lambda x: 0.01 <= x <= 100, "in [0.01, 100] (1 is off)", Real),
    "presence_penalty": _OPENAI_PENALTY,
    "frequency_penalty": _OPENAI_PENALTY,
    "n_predict": Range(lambda x: x >= 0, ">= 0 (0 only reads the prompt)"),
    "draft_max": Range(lambda x: 0 <= x <= MAX_DRAFT, f"0 to {MAX_DRAFT}, or auto", word="auto"),
    "n": _PARALLEL,
    "count": _COUNT,
    "parallel": _PARALLEL,
    "chunk": _POSITIVE,
    "pool": _POSITIVE,
    "prefix_cache": Range(lambda x: x >= 0, ">= 0 (0 disables it)"),
    "repeats": _COUNT,
    "logprobs": _NOT_NEGATIVE,
    "prompt_logprobs": _NOT_NEGATIVE,
    "accept_length": Range(
        lambda x: 1 <= x <= MAX_DRAFT + 1,
        f"1 to {MAX_DRAFT + 1}, the target's own token included",
        Real,
    ),
}
"""Parameter -> its valid values. NaN is in none of them."""


def is_header_text(text: str) -> bool:
    """Return True if an HTTP header can hold a text, such as an API key: it is printable ASCII."""
    return text.isascii() and text.isprintable()


def check_key(key: str) -> None:
    """Raise UsageError, which does not contain the key, for an API key that no client can send."""
    if not is_header_text(key):
        raise UsageError("`api_key`", expected="printable ASCII, all that requests can contain")


def is_token_id(value: Any, n_vocab: float = math.inf) -> bool:
    """Return True for an integer from 0 to `n_vocab` - 1, not for a bool."""
    integer = isinstance(value, int | Integral) and type(value) is not bool
    return integer and 0 <= int(value) < n_vocab


def check(**values: Any) -> None:
    """Raise UsageError for the first value of another type or outside RANGES."""
    for name, value in values.items():
        _check(name, value)


def check_given(**values: Any) -> None:
    """Check values as `check` does, but skip None, the default of such parameters."""
    check(**{name: value for name, value in values.items() if value is not None})


def _check(name: str, value: Any) -> None:
    valid = RANGES[name]
    if valid.word and value == valid.word:
        return
    check_type(name, value, valid.text, valid.type)
    if not valid.contains(value):
        raise UsageError(f"`{name}`", expected=valid.text, found=value)


def check_type(name: str, value: Any, valid: str, type: type[Any] = Integral) -> None:
    """Raise UsageError for a bool or a value of another type than `type`, Integral or Real.

    Args:
        valid: description of the valid values.
    """
    if isinstance(value, bool) or not isinstance(value, type):
        what = "an integer" if type is Integral else "a number"
        raise UsageError(f"`{name}`", expected=f"{what}, {valid}", found=repr(value))


def check_fields(record: Any, names: Iterable[str]) -> None:
    """Check the fields `names` of a dataclass as `check` does, but take None only where it is the
    default. Numbers of numpy, which overflow, and fractions, which tensors cannot be multiplied
    with, become int or float."""
    defaults = {field.name: field.default for field in fields(record)}
    for name in names:
        value = getattr(record, name)
        if value is None and defaults[name] is None:
            continue
        _check(name, value)
        if isinstance(value, Real):
            object.__setattr__(record, name, plain_number(value))


def plain_number(value: Any) -> int | float:
    """Return a number as an int if it is an integer of any type, else as a float."""
    return int(value) if isinstance(value, Integral) else float(value)
