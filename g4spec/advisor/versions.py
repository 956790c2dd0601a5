"""Parses versions and ranges as the facts write them: `>=0.24,<0.33`, `<b9549`, `8.6`."""

from __future__ import annotations

import re
from functools import lru_cache

_TERM = re.compile(r"(>=|<=|==|!=|>|<|)\s*b?(\d+(?:\.\d+)*)$")


@lru_cache(maxsize=2048)
def parse(text: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version: `0.19.2rc1.dev21+g89` gives (0, 19, 2).

    A build of llama.cpp (`b9549`) gives one number; a text without a number gives ().
    """
    found = re.match(r"\s*[vb]?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def _terms(text: str) -> list[tuple[str, tuple[int, ...]]]:
    out = []
    for term in text.split(","):
        found = _TERM.match(term.strip())
        if not found:
            raise ValueError(f"not a range: {text!r}")
        out.append((found[1] or "==", parse(found[2])))
    return out


@lru_cache(maxsize=2048)
def holds(text: str, version: tuple[int, ...]) -> bool:
    """Return True if `version` is in the range `text`; an empty range contains everything.

    `==0.25` means 0.25 and every 0.25.x; so does `<=`. Raises ValueError for a malformed range.
    """
    if not text:
        return True
    for sign, bound in _terms(text):
        n = max(len(version), len(bound))
        a, b = version + (0,) * (n - len(version)), bound + (0,) * (n - len(bound))
        same = version[: len(bound)] == bound or a == b
        ok = {
            ">=": a >= b,
            ">": a > b and not same,
            "<=": a <= b or same,
            "<": a < b,
            "==": same,
            "!=": not same,
        }[sign]
        if not ok:
            return False
    return True


def check(text: str) -> None:
    """Raise ValueError unless `text` is a range."""
    holds(text, (0,))
    if text:
        _terms(text)
