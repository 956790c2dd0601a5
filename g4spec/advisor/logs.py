"""Recognizes known error texts in a log, and gives cause and fix.

A log may be binary, have very long lines, or be gigabytes large. At most MAX_BYTES of it and
MAX_LINE bytes of each line are read; a pattern is tried only on lines that contain its key.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from g4spec.advisor.facts import Facts
from g4spec.advisor.schema import ErrorFact

MAX_LINE = 1 << 14
"""Maximum bytes of a line that are searched."""
MAX_BYTES = 1 << 30
"""Maximum bytes of a log that are read."""
SHOWN = 160


@dataclass(frozen=True, slots=True)
class LogMatch:
    """A known error found in a log: the line of its first occurrence, and how often it occurs."""

    error: ErrorFact
    line: int
    text: str
    count: int

    def json(self) -> dict[str, Any]:
        e = self.error
        return {
            "id": e.id,
            "line": self.line,
            "text": self.text,
            "count": self.count,
            "cause": e.cause,
            "fix": e.fix,
            "versions": e.versions,
            "harmless": e.harmless,
            "source": list(e.source),
            "date": e.date,
        }


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def lines(file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield line number and text; bytes of a line beyond MAX_LINE are skipped."""
    number, read, inside = 0, 0, False
    while read < MAX_BYTES:
        raw = file.readline(MAX_LINE)
        if not raw:
            return
        read += len(raw)
        if not inside:
            number += 1
            yield number, raw.decode("utf-8", errors="replace")
        inside = not raw.endswith(b"\n")


def match(known: list[ErrorFact], text: str) -> list[ErrorFact]:
    """Return the errors in one line, of those that are known."""
    low = text.lower()
    return [e for e in known if e.key in low and _compiled(e.pattern).search(text)]


def _scan(facts: Facts, file: BinaryIO) -> list[LogMatch]:
    found: dict[str, LogMatch] = {}
    known = facts.all(ErrorFact)
    for number, text in lines(file):
        for e in match(known, text):
            old = found.get(e.id)
            found[e.id] = LogMatch(
                e,
                old.line if old else number,
                old.text if old else shorten(text, e),
                old.count + 1 if old else 1,
            )
    return sorted(found.values(), key=lambda h: (h.error.harmless, h.line))


def shorten(text: str, error: ErrorFact) -> str:
    """Return the part of a line around the match, with unprintable characters replaced."""
    hit = _compiled(error.pattern).search(text)
    start = max(0, (hit.start() if hit else 0) - SHOWN // 3)
    piece = " ".join(text[start : start + SHOWN].split())
    clean = "".join(c if c.isprintable() else "?" for c in piece)
    return ("... " if start else "") + clean


def scan(facts: Facts, path: Path) -> list[LogMatch]:
    """Return the known errors in a file, or in standard input for `-`; harmless ones last."""
    if str(path) == "-":
        return _scan(facts, sys.stdin.buffer)
    with path.open("rb") as file:
        return _scan(facts, file)


def is_binary(path: Path) -> bool:
    """Return True for a file with a zero byte near its beginning, which no text has in UTF-8."""
    if not path.is_file():  # a pipe cannot be read twice
        return False
    with path.open("rb") as file:
        return b"\0" in file.read(1 << 12)
