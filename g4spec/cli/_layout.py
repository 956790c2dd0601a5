"""Fits text, commands and tables into the width of a terminal: no word and no cell is cut."""

from __future__ import annotations

import re
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import TextIO

MIN_COLUMNS = 20
"""Columns below which nothing is fitted."""
COLUMN_GAP = 2
"""Columns between two columns of a table, and left of the first."""

_WORDS = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")


def display_width(text: str) -> int:
    """Columns that a text takes: two for a wide character."""
    if text.isascii():
        return len(text)
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def width(file: TextIO) -> int | None:
    """Columns of a terminal; None for a pipe or a file, which gets lines as long as they are."""
    return max(shutil.get_terminal_size().columns, MIN_COLUMNS) if file.isatty() else None


def wrap(text: str, columns: int | None) -> str:
    """Break a line between words. What follows is indented by two more columns, or to where the
    text begins behind a number, a mark or a name with two spaces after it."""
    if columns is None or display_width(text) <= columns:
        return text
    begin = re.match(r"\s*(?:[✓!✗·] |# *|\d+\. |\S{1,12} {2,}(?=\S))?", text)
    at, mark = min(begin.end(), columns // 3) if begin else 0, begin[0].strip() if begin else ""
    indent = "#" + " " * (at + 1) if mark == "#" else " " * (at if mark else at + 2)
    lines = textwrap.wrap(
        text,
        columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        expand_tabs=False,
        replace_whitespace=False,
    )
    return "\n".join(lines)


def command(prefix: str, text: str, columns: int | None) -> str:
    """Break a shell command between words so that it can still be pasted: lines end with a
    backslash. `before`: what stands in front of it."""
    if columns is None or display_width(prefix + text) <= columns:
        return prefix + text
    words = _WORDS.findall(text)
    lines, line = [], prefix + words[0]
    for word in words[1:]:
        if display_width(f"{line} {word} \\") > columns:
            lines.append(line + " \\")
            line = "    " + word
        else:
            line += f" {word}"
    return "\n".join([*lines, line])


def script(text: str, columns: int | None) -> str:
    """Break the lines of a shell script as `command` does; its own continuations stay."""
    out = []
    for line in text.split("\n"):
        body = line.removesuffix(" \\").lstrip()
        plain = not body or body.startswith("#")
        at = line[: len(line) - len(line.lstrip())]
        whole = line if plain else command(at, body, columns)
        out.append(whole if plain or body == line.lstrip() else whole + " \\")
    return "\n".join(out)


def _longest_word(cells: Sequence[str]) -> int:
    return max((display_width(word) for cell in cells for word in cell.split()), default=1)


def widths(columns: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Widths of a table's columns (each with its name first) that fit into `room`, widest columns
    shortened first and none below its longest word; None if there are none."""
    natural = [max(map(display_width, column)) for column in columns]
    least = [_longest_word(column) for column in columns]
    room -= COLUMN_GAP * len(columns)
    if sum(least) > room:
        return None
    while sum(natural) > room:
        i = max(range(len(natural)), key=lambda i: (natural[i] > least[i], natural[i]))
        natural[i] -= 1
    return natural


def columns_kept(columns: Sequence[Sequence[str]], optional: Sequence[int], room: int) -> list[int]:
    """Choose the columns of a table that fit: those of `optional` are left out, last first."""
    kept = list(range(len(columns)))
    drop = list(optional)
    while drop and sum(max(map(display_width, columns[i])) + COLUMN_GAP for i in kept) > room:
        kept.remove(drop.pop())
    return kept


def records(names: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> str:
    """Write rows below one another, `name: value` with commas between, where columns do not fit."""
    out = []
    for row in rows:
        first, *rest = row
        text = ", ".join(f"{n}: {c}" for n, c in zip(names[1:], rest, strict=True) if c)
        out.append(wrap(f"  {first}", room))
        out.append(wrap(f"    {text}", room))
    return "\n".join(out)
