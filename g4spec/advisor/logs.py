"""Recognises known error texts in a log: cause and fix.

A log may be anything: binary, endless lines, gigabytes. It is read in blocks; a pattern is tried
only on lines that contain its literal key, and only on the first part of a long line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from g4spec.advisor.facts import Facts
from g4spec.advisor.schema import ErrorFact

MAX_LINE = 1 << 14
"""Bytes of a line that are looked at."""
MAX_BYTES = 1 << 30
"""Bytes of a log that are read."""
SHOWN = 160


@dataclass(frozen=True, slots=True)
class LogMatch:
    """A known text: where it stands first, and how often it came."""

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
    """Numbered lines as text; the rest of a line beyond MAX_LINE is skipped."""
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


def match(facts: Facts, text: str) -> list[ErrorFact]:
    """Known errors in one line."""
    low = text.lower()
    return [e for e in facts.all(ErrorFact) if e.key in low and _compiled(e.pattern).search(text)]


def _scan(facts: Facts, file: BinaryIO) -> list[LogMatch]:
    found: dict[str, LogMatch] = {}
    known = facts.all(ErrorFact)
    for number, text in lines(file):
        low = text.lower()
        for e in known:
            if e.key not in low or not _compiled(e.pattern).search(text):
                continue
            old = found.get(e.id)
            found[e.id] = LogMatch(
                e,
                old.line if old else number,
                old.text if old else shorten(text, e),
                old.count + 1 if old else 1,
            )
    return sorted(found.values(), key=lambda h: (h.error.harmless, h.line))


def shorten(text: str, error: ErrorFact) -> str:
    """The part of a line around the match, printable."""
    hit = _compiled(error.pattern).search(text)
    start = max(0, (hit.start() if hit else 0) - SHOWN // 3)
    piece = " ".join(text[start : start + SHOWN].split())
    clean = "".join(c if c.isprintable() else "?" for c in piece)
    return ("... " if start else "") + clean


def scan(facts: Facts, path: Path) -> list[LogMatch]:
    """Known errors in a file, or in standard input for `-`; harmless ones last."""
    if str(path) == "-":
        return _scan(facts, sys.stdin.buffer)
    with path.open("rb") as file:
        with suppress(ValueError):
            return _scan(facts, file)
        return []
