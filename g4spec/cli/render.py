"""The only place that prints.

stdout carries what was asked for (text, tables, or one JSON object); stderr carries everything
about the run (notices, progress, errors), so that a pipe receives the product and nothing else.

Names and texts come from files that nobody vouches for, so no control character of theirs reaches
a terminal: an escape sequence can set its title, write the clipboard or rewrite what was printed,
and a line break can forge a verdict. A pipe receives generated text as it is.
"""

from __future__ import annotations

import io
import json as jsonlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TextIO

import typer

from g4spec.cli import _layout

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only errors and the requested text or ids.")
]

CLOSED_PIPE = 141
"""Exit code when nobody reads on: what a shell reports for a program ended by SIGPIPE."""

Progress = Callable[[int, int], None]

MAX_ROWS = 2000
"""Of a table: no model has that many tensors, and a file that claims them should not take long."""

PIPE_TABLE_WIDTH = 240
"""Columns of a table that no terminal shows."""

STYLES = {"good": "32", "bad": "31", "warn": "33", "dim": "2", "bold": "1", "struck": "9;31"}
"""Names that commands may use for colours -> ANSI code."""

MARKS = {"good": "[]", "struck": "~~"}
"""What stands around text where the colour carries meaning and there are no colours."""


_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, and marks that change the direction of what follows."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""The same without line breaks and tabs, which a text has."""
_STYLE_CODES = re.compile(r"(\x1b\[[0-9;]*m)")
"""Colours, as `styled` and rich write them."""
_DEL_AND_C1 = re.compile("[\x7f-\x9f]")


def has_colours(file: TextIO) -> bool:
    """Whether `file` is a terminal that wants colours (https://no-color.org)."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str | None, file: TextIO) -> str:
    """`text`, which has no escape sequences of its own, in a colour of STYLES."""
    text = _CONTROL.sub(_escape, text)
    if style is None or not text or not has_colours(file):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def flat(text: str) -> str:
    """`text` with line breaks and control characters spelled out, and its spaces kept."""
    return _UNSAFE.sub(_escape, text)


def one_line(text: str) -> str:
    """`text` without line breaks and control characters: names inside may come from a file."""
    flat = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in flat)


def _print(text: str, file: TextIO, end: str = "\n") -> None:
    """Print at once; a reader that went away (`| head`) ends the run, quietly.

    A terminal gets no control characters but line breaks, tabs and the colours of this module.
    """
    if file.isatty():
        parts = _STYLE_CODES.split(text)
        parts[::2] = [_CONTROL.sub(_escape, part) for part in parts[::2]]
        text = "".join(parts)
    try:
        print(text, file=file, end=end, flush=True)
    except BrokenPipeError:
        # Python flushes again at exit; nobody is left to read that or its complaint.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        raise typer.Exit(CLOSED_PIPE) from None


def _json_value(value: Any) -> Any:
    """JSON has no NaN and no infinity; numpy scalars and arrays become Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _json_value(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    if isinstance(value, (list, tuple)):
        return [_json_value(v) for v in value]
    return value


def _json(value: Any) -> str:
    """JSON on one line; DEL and C1 control characters are escaped as JSON escapes the others."""
    text = jsonlib.dumps(value, ensure_ascii=False, default=str)
    return _DEL_AND_C1.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _print_grid(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    right: Sequence[bool],
) -> None:
    """Print a table of columns with these widths; `right`: those aligned right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours, text = has_colours(sys.stdout), io.StringIO()
    room = sum(widths) + _layout.COLUMN_GAP * len(widths)
    console = Console(file=text, width=room, force_terminal=colours, no_color=not colours)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name, width, numeric in zip(names, widths, right, strict=True):
        side: Literal["left", "right"] = "right" if numeric else "left"
        table.add_column(Text(name), justify=side, overflow="fold", width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    lines = [line.rstrip() for line in text.getvalue().rstrip().split("\n")]
    if title:
        lines = [*_layout.wrap(title, _layout.width(sys.stdout)).split("\n"), "", *lines]
    _print("\n".join(lines), sys.stdout)


class Output:
    """What one command says. With `json`, stdout is exactly one object; with `quiet`, stdout is
    only the product (`stream`, `result`) and stderr is empty."""

    printed = False  # per process: an error after a result must not add a second object

    def __init__(self, json: bool = False, quiet: bool = False) -> None:
        self.json, self.quiet = json, quiet
        self._noted: set[str] = set()

    def line(self, text: str = "", style: str | None = None, *, gap: bool = False) -> None:
        """One line of the human answer, an empty one before it with `gap`; absent with `json` and
        `quiet`."""
        if not self.json and not self.quiet:
            text = _layout.wrap(flat(text), _layout.width(sys.stdout))
            _print("\n" * gap + styled(text, style, sys.stdout), sys.stdout)

    def command(self, before: str, text: str) -> None:
        """A shell command of the human answer, broken so that it can be pasted."""
        if not self.json and not self.quiet:
            _print(_layout.command(before, flat(text), _layout.width(sys.stdout)), sys.stdout)

    def note(self, text: str | None) -> None:
        """A notice on stderr, said once per run however often it is raised; nothing for None."""
        if text is not None and not self.quiet and text not in self._noted:
            self._noted.add(text)
            text = _layout.wrap(one_line(text), _layout.width(sys.stderr))
            _print(styled(text, "dim", sys.stderr), sys.stderr)

    def stream(self, text: str, style: str | None = None) -> None:
        """Text that is the product itself, as it comes; no line break is added. Exact in a pipe,
        without control characters on a terminal."""
        if not self.json:
            if sys.stdout.isatty():
                text = styled(text.replace("\r\n", "\n"), style, sys.stdout)
            _print(text, sys.stdout, end="")

    def script(self, text: str) -> None:
        """Shell commands that are the product; a terminal gets them broken so that they can be
        pasted."""
        self.stream(_layout.script(text, _layout.width(sys.stdout)) + "\n")

    def stream_dim(self, text: str) -> None:
        """Text beside the product as it comes, dim: a model's thoughts. Where stdout is a pipe, it
        goes to stderr."""
        file = sys.stdout if sys.stdout.isatty() else sys.stderr
        if not self.quiet and not self.json:
            _print(styled(text.replace("\r\n", "\n"), "dim", file), file, end="")

    def log(self, text: str) -> None:
        """Lines about the run on stderr, said each time."""
        if not self.quiet:
            for line in text.split("\n"):
                shown = _layout.wrap(flat(line), _layout.width(sys.stderr))
                _print(styled(shown, "dim", sys.stderr), sys.stderr)

    def read_line(self, prompt: str) -> str:
        """Read a line; EOFError at the end. `prompt` is shown where a person types."""
        if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "replace":
            # What is no UTF-8 must not end a run. A stream that was read from cannot be changed.
            sys.stdin.reconfigure(errors="replace")
        if sys.stdin.isatty() and sys.stdout.isatty():
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def stream_marked(self, text: str, style: str) -> None:
        """Like `stream`, for a colour that means something: brackets where colours are off. Line
        breaks of struck text, which is not part of the answer, are spelled out."""
        if style == "struck":
            text = flat(text)
        if text and not has_colours(sys.stdout):
            text = MARKS[style][0] + text + MARKS[style][1]
        self.stream(text, style)

    def legend(self, entries: Sequence[tuple[str, str | None]]) -> None:
        """What the colours of `mark` mean, on stderr."""
        if self.quiet or self.json:
            return
        shown = []
        for name, style in entries:
            plain = style is None or has_colours(sys.stderr)
            marked = name if plain else MARKS[str(style)][0] + name + MARKS[str(style)][1]
            shown.append(styled(marked, style, sys.stderr))
        _print("  ".join(shown), sys.stderr)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        optional: Sequence[str] = (),
    ) -> None:
        """A table of the human answer; columns that hold only numbers are aligned right.

        Args:
            optional: columns that a narrow terminal does without, the last one first.
        """
        if self.json or self.quiet:
            return
        columns, all_rows = [one_line(name) for name in columns], rows
        cells = [[one_line(str(cell)) for cell in row] for row in rows[:MAX_ROWS]]
        room = _layout.width(sys.stdout) or PIPE_TABLE_WIDTH
        by_column = [[name, *(row[i] for row in cells)] for i, name in enumerate(columns)]
        kept = _layout.columns_kept(by_column, [columns.index(name) for name in optional], room)
        widths = _layout.widths([by_column[i] for i in kept], room)
        if widths is None:
            shown = _layout.wrap(one_line(title), room)
            _print(f"{shown}\n{_layout.records(columns, cells, room)}", sys.stdout)
        else:
            right = [
                bool(rows) and all(isinstance(r[i], int | float) for r in all_rows) for i in kept
            ]
            made = [[row[i] for i in kept] for row in cells]
            _print_grid(one_line(title), [columns[i] for i in kept], made, widths, right)
        if len(kept) < len(columns):
            left = ", ".join(name for i, name in enumerate(columns) if i not in kept)
            self.note(f"not shown for lack of width: {left}; --json has all")
        if len(rows) > MAX_ROWS:
            self.note(f"{len(rows) - MAX_ROWS:,} more rows are not shown; --json has all")

    def result(self, value: Mapping[str, Any]) -> None:
        """The whole answer as one JSON object on stdout; nothing without `json`."""
        if self.json:
            _print(_json(_json_value(value)), sys.stdout)
            Output.printed = True

    @contextmanager
    def progress(self, label: str) -> Iterator[Progress]:
        """Gives `callback(done, total)`; drawn on stderr only when that is a terminal."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(one_line(label).replace("[", r"\["), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def error(text: str, exit_code: int, *, json: bool = False) -> int:
    """Says why the run failed: one line on stderr and, with `json`, an object on stdout when no
    result was printed before. Returns `exit_code`."""
    try:
        shown = _layout.wrap(f"error: {one_line(text)}", _layout.width(sys.stderr))
        _print(styled("error:", "bad", sys.stderr) + shown.removeprefix("error:"), sys.stderr)
        if json and not Output.printed:
            _print(_json({"error": text, "exit_code": exit_code}), sys.stdout)
    except (typer.Exit, OSError):
        pass  # nobody listens, or there is no room; the code still says it
    return exit_code
