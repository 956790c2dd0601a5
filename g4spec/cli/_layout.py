"""Wraps text, commands and tables to the width of a terminal, without cutting a word or cell."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import TextIO

MIN_COLUMNS = 20
"""Smallest terminal width that text is wrapped to."""
COLUMN_GAP = 2
"""Number of spaces between two columns of a table, and left of the first."""

_WORDS = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")


def display_width(text: str) -> int:
    """Return the number of terminal columns of a text; a wide character takes two."""
    if text.isascii():
        return len(text)
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def width(file: TextIO) -> int | None:
    """Return the width of a terminal in columns; None for a pipe or a file: do not wrap."""
    return max(shutil.get_terminal_size().columns, MIN_COLUMNS) if file.isatty() else None


def text_width(file: TextIO) -> int | None:
    """Return `width`, or $COLUMNS for a pipe or a file, if it is set: text for people is wrapped.

    Shells set COLUMNS but do not export it, so it is only there if the user wants it.
    """
    columns = os.environ.get("COLUMNS", "")
    if file.isatty() or not re.fullmatch("0*[1-9][0-9]{0,4}", columns):
        return width(file)
    return max(int(columns), MIN_COLUMNS)


def wrap(text: str, columns: int | None) -> str:
    """Wrap a line between words.

    Further lines are indented by two more columns. After a leading number, mark or name with two
    spaces behind it, they are indented to the beginning of the text.
    """
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
    """Wrap a shell command between words, with a backslash at line ends.

    `prefix`: text on the same line before the command.
    """
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
    """Wrap the lines of a shell script as `command` does, and comments as `wrap` does; keep its own
    continuation lines."""
    out = []
    for line in text.split("\n"):
        body = line.removesuffix(" \\").lstrip()
        plain = not body or body.startswith("#")
        at = line[: len(line) - len(line.lstrip())]
        whole = wrap(line, columns) if plain else command(at, body, columns)
        out.append(whole if plain or body == line.lstrip() else whole + " \\")
    return "\n".join(out)


def _longest_word(cells: Sequence[str]) -> int:
    return max((display_width(word) for cell in cells for word in cell.split()), default=1)


def widths(columns: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Return widths of a table's columns that fit into `room`, or None if that is impossible.

    The widest columns are shortened first, none below its longest word.

    Args:
        columns: cells of each column, its name included.
        room: available width in terminal columns.
    """
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
    """Return the indices of the columns to show: drops those of `optional`, last first, to fit."""
    kept = list(range(len(columns)))
    drop = list(optional)
    while drop and sum(max(map(display_width, columns[i])) + COLUMN_GAP for i in kept) > room:
        kept.remove(drop.pop())
    return kept


def records(names: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> str:
    """Format rows as `name: value, ...`, one per line, for tables that do not fit."""
    out = []
    for row in rows:
        first, *rest = row
        named = zip(names[1:], rest, strict=True)
        text = ", ".join(f"{n}: {c}" if n else c for n, c in named if c)
        out.append(wrap(f"  {first}", room))
        out.append(wrap(f"    {text}", room))
    return "\n".join(out)
