"""Fits text, commands and tables into the width of a terminal: no word and no cell is cut."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len

LEAST = 20
"""Columns below which nothing is fitted."""
GAP = 2
"""Columns between two columns of a table, and left of the first."""

_WORDS = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")


def width(file: TextIO) -> int | None:
    """Columns of a terminal; None for a pipe or a file, which gets lines as long as they are."""
    return max(shutil.get_terminal_size().columns, LEAST) if file.isatty() else None


def wrapped(text: str, columns: int | None) -> str:
    """Break a line between words. What follows is indented by two more columns, or to where the
    text begins behind a number, a mark or a name with two spaces after it."""
    if columns is None or cell_len(text) <= columns:
        return text
    begin = re.match(r"\s*(?:[✓!✗·#] |\d+\. |\S{1,12} {2,}(?=\S))?", text)
    at = min(begin.end() if begin else 0, columns // 3)
    indent = " " * (at if begin and begin[0].strip() else at + 2)
    lines = textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False,
                          break_on_hyphens=False, drop_whitespace=True,
                          expand_tabs=False, replace_whitespace=False)  # fmt: skip
    return "\n".join(lines)


def command(before: str, text: str, columns: int | None) -> str:
    """Break a shell command between words so that it can still be pasted: lines end with a
    backslash. `before`: what stands in front of it."""
    if columns is None or cell_len(before + text) <= columns:
        return before + text
    words = _WORDS.findall(text)
    lines, line = [], before.rstrip() + "\n    " + words[0] if before.strip() else "    " + words[0]
    for word in words[1:]:
        last = line.rsplit("\n", 1)[-1]
        if cell_len(f"{last} {word} \\") > columns and last.strip():
            lines.append(line + " \\")
            line = "      " + word
        else:
            line += f" {word}"
    return "\n".join([*lines, line])


def _longest_word(cells: Sequence[str]) -> int:
    return max((cell_len(word) for cell in cells for word in cell.split()), default=1)


def widths(columns: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Widths of a table's columns (each with its name first) that fit into `room`, widest columns
    shortened first and none below its longest word; None if there are none."""
    natural = [max(map(cell_len, column)) for column in columns]
    least = [_longest_word(column) for column in columns]
    room -= GAP * len(columns)
    if sum(least) > room:
        return None
    while sum(natural) > room:
        i = max(range(len(natural)), key=lambda i: (natural[i] > least[i], natural[i]))
        natural[i] -= 1
    return natural


def columns_kept(columns: Sequence[Sequence[str]], spare: Sequence[int], room: int) -> list[int]:
    """Choose the columns of a table that fit: those of `spare` are left out, last first."""
    left = list(range(len(columns)))
    drop = list(spare)
    while drop and sum(max(map(cell_len, columns[i])) + GAP for i in left) > room:
        left.remove(drop.pop())
    return left


def records(names: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> str:
    """Write rows below one another, `name: value` with commas between, where columns do not fit."""
    out = []
    for row in rows:
        first, *rest = row
        text = ", ".join(f"{n}: {c}" for n, c in zip(names[1:], rest, strict=True) if c)
        out.append(wrapped(f"  {first}", room))
        out.append(wrapped(f"    {text}", room))
    return "\n".join(out)
