"""Terminal output: the only module that prints.

stdout carries the requested output (text, tables, or one JSON object). stderr carries everything
about the run (notices, progress, errors), so that a pipe receives the requested output only.

Names and texts come from untrusted files, so none of their control characters reaches a terminal:
an escape sequence can set the title, write the clipboard or overwrite earlier output, and a line
break can forge a verdict. A pipe receives generated text unchanged.
"""

from __future__ import annotations

import io
import json as jsonlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, TextIO

import typer

from g4spec.cli import _layout
from g4spec.errors import spell

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only errors and the requested text or ids.")
]

CLOSED_PIPE = 141
"""Exit code after the reader of a pipe has gone: a shell reports it for SIGPIPE, too."""

Progress = Callable[[int, int], None]

MAX_ROWS = 2000
"""Maximum number of table rows. No real model has more tensors; a hostile file may claim more."""

PIPE_TABLE_WIDTH = 240
"""Maximum width of a table, in columns, if stdout is not a terminal and COLUMNS is not set."""

PROGRESS_SECONDS = 10.0
"""Least time between two progress lines where stderr is not a terminal."""

STYLES = {"good": "32", "bad": "31", "warn": "33", "dim": "2", "bold": "1", "struck": "9;31"}
"""Style names for commands -> ANSI code."""

MARKS = {"good": "[]", "struck": "~~"}
"""Opening and closing marks that replace a meaningful colour where colours are off."""


_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, and marks that change the direction of text."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters other than line breaks and tabs."""
_STYLE_CODES = re.compile(r"(\x1b\[[0-9;]*m)")
"""ANSI styles, as `styled` and rich write them."""
_DEL_AND_C1 = re.compile("[\x7f-\x9f]")


STDOUT = "<stdout>"
"""File name in errors of writing to stdout, as Python calls it."""


def has_colours(file: TextIO) -> bool:
    """Return True if `file` is a terminal with colours enabled (https://no-color.org)."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str | None, file: TextIO) -> str:
    """Return `text` with its control characters escaped, in a style of STYLES."""
    text = _CONTROL.sub(_escape, text)
    if style is None or not text or not has_colours(file):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def flat(text: str) -> str:
    """Escape line breaks and control characters in `text`; keep its spaces."""
    return _UNSAFE.sub(_escape, text)


def one_line(text: str) -> str:
    """Join `text` to one line and escape characters that cannot be printed."""
    flat = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in flat)


def _print(text: str, file: TextIO, end: str = "\n") -> None:
    """Print and flush; end the run silently if the reader has gone (`| head`).

    After a failed write the file is the null device: Python flushes what is left once more at exit,
    and a second failure there would replace the exit code by 120.

    The only control characters that a terminal gets are line breaks, tabs and ANSI styles.
    """
    if file.isatty():
        parts = _STYLE_CODES.split(text)
        parts[::2] = [_CONTROL.sub(_escape, part) for part in parts[::2]]
        text = "".join(parts)
    try:
        print(text, file=file, end=end, flush=True)
    except OSError as problem:
        discard(file)
        if isinstance(problem, BrokenPipeError):
            raise typer.Exit(CLOSED_PIPE) from None
        if file is sys.stdout:
            problem.filename = STDOUT
        raise


def discard(file: TextIO) -> None:
    """Send what was and will be written to `file` to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def _json_value(value: Any) -> Any:
    """Return `value` with JSON types only: NaN and infinity become None, arrays become lists."""
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
    """Return JSON on one line, with DEL and C1 control characters escaped, too, and where stdout is
    not UTF-8 all that is not ASCII."""
    ascii_only = "utf" not in (sys.stdout.encoding or "utf-8").lower()
    text = jsonlib.dumps(value, ensure_ascii=ascii_only, default=str)
    return _DEL_AND_C1.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _print_grid(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    right: Sequence[bool],
) -> None:
    """Print a table. `widths`: width of each column; `right`: True for columns aligned right."""
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
        lines = [*_layout.wrap(title, _layout.text_width(sys.stdout)).split("\n"), "", *lines]
    _print("\n".join(lines), sys.stdout)


class Output:
    """The output of one command.

    With `json`, stdout carries exactly one object. With `quiet`, stdout carries only the requested
    output (`stream`, `result`), and stderr stays empty.
    """

    printed = False  # of this process: an error after a result must not add a second object
    field_names: ClassVar[Mapping[str, str]] = {}
    """Parameter of the library -> option of the command that runs, for notices and errors."""

    def __init__(self, json: bool = False, quiet: bool = False) -> None:
        self.json, self.quiet = json, quiet
        self._noted: set[str] = set()

    def line(self, text: str = "", style: str | None = None, *, gap: bool = False) -> None:
        """Print a line on stdout, after an empty line with `gap`; not with `json` or `quiet`."""
        if not self.json and not self.quiet:
            text = _layout.wrap(flat(text), _layout.text_width(sys.stdout))
            _print("\n" * gap + styled(text, style, sys.stdout), sys.stdout)

    def command(self, before: str, text: str) -> None:
        """Print `before` and a shell command, wrapped so that it can be pasted."""
        if not self.json and not self.quiet:
            columns = _layout.text_width(sys.stdout)
            _print(_layout.command(before, flat(text), columns), sys.stdout)

    def note(self, text: str | None) -> None:
        """Print a notice on stderr, each text once per run; nothing for None."""
        if text is not None and not self.quiet and text not in self._noted:
            self._noted.add(text)
            text = one_line(spell(text, self.field_names))
            text = _layout.wrap(text, _layout.width(sys.stderr))
            _print(styled(text, "dim", sys.stderr), sys.stderr)

    def stream(self, text: str, style: str | None = None) -> None:
        """Print requested text without adding a line break.

        A pipe gets it unchanged, a terminal without control characters.
        """
        if not self.json:
            if sys.stdout.isatty():
                text = styled(text.replace("\r\n", "\n"), style, sys.stdout)
            _print(text, sys.stdout, end="")

    def script(self, text: str) -> None:
        """Print requested shell commands; on a terminal, wrapped so that they can be pasted."""
        self.stream(_layout.script(text, _layout.width(sys.stdout)) + "\n")

    def stream_dim(self, text: str) -> None:
        """Print dim text that accompanies the output, such as a model's thoughts.

        It goes to stderr if stdout is not a terminal.
        """
        file = sys.stdout if sys.stdout.isatty() else sys.stderr
        if not self.quiet and not self.json:
            _print(styled(text.replace("\r\n", "\n"), "dim", file), file, end="")

    def log(self, text: str) -> None:
        """Print lines about the run on stderr, every time (`note`: only once)."""
        if not self.quiet:
            for line in spell(text, self.field_names).split("\n"):
                shown = _layout.wrap(flat(line), _layout.width(sys.stderr))
                _print(styled(shown, "dim", sys.stderr), sys.stderr)

    def read_line(self, prompt: str) -> str:
        """Read a line of stdin; raise EOFError at its end. `prompt` is shown on terminals only."""
        if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "replace":
            # Invalid UTF-8 must not end the run. This cannot be changed after the first read.
            sys.stdin.reconfigure(errors="replace")
        if sys.stdin.isatty() and sys.stdout.isatty():
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def stream_marked(self, text: str, style: str) -> None:
        """Print text in a meaningful colour, or between MARKS where colours are off.

        Line breaks of struck text are escaped, as it is not part of the answer.
        """
        if style == "struck":
            text = flat(text)
        if text and not has_colours(sys.stdout):
            text = MARKS[style][0] + text + MARKS[style][1]
        self.stream(text, style)

    def legend(self, entries: Sequence[tuple[str, str | None]]) -> None:
        """Print the meaning of the styles of `stream_marked` on stderr."""
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
        """Print a table; columns that contain only numbers are aligned right.

        Args:
            optional: columns to drop on a narrow terminal, the last one first.
        """
        if self.json or self.quiet:
            return
        columns = [one_line(name) for name in columns]
        cells = [[one_line(str(cell)) for cell in row] for row in rows[:MAX_ROWS]]
        room = _layout.text_width(sys.stdout) or PIPE_TABLE_WIDTH
        by_column = [[name, *(row[i] for row in cells)] for i, name in enumerate(columns)]
        kept = _layout.columns_kept(by_column, [columns.index(name) for name in optional], room)
        widths = _layout.widths([by_column[i] for i in kept], room)
        if widths is None:
            shown = _layout.wrap(one_line(title), room)
            _print(f"{shown}\n{_layout.records(columns, cells, room)}", sys.stdout)
        else:
            right = [bool(rows) and all(isinstance(r[i], int | float) for r in rows) for i in kept]
            shown_cells = [[row[i] for i in kept] for row in cells]
            _print_grid(one_line(title), [columns[i] for i in kept], shown_cells, widths, right)
        if widths is not None and len(kept) < len(columns):  # records show every column
            hidden = ", ".join(name for i, name in enumerate(columns) if i not in kept)
            self.note(f"columns not shown (output too narrow): {hidden}; --json has all")
        if len(rows) > MAX_ROWS:
            self.note(f"{len(rows) - MAX_ROWS:,} more rows are not shown; --json has all")

    def result(self, value: Mapping[str, Any]) -> None:
        """Print the whole result as one JSON object on stdout; nothing without `json`."""
        if self.json:
            _print(_json(_json_value(value)), sys.stdout)
            Output.printed = True

    @contextmanager
    def progress(self, label: str) -> Iterator[Progress]:
        """Yield `callback(done, total)`, which shows the progress on stderr.

        Draws a bar on a terminal; elsewhere prints a line every PROGRESS_SECONDS.
        """
        if self.quiet or not sys.stderr.isatty():
            yield (lambda done, total: None) if self.quiet else self._progress_lines(label)
            return
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(one_line(label).replace("[", r"\["), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    def _progress_lines(self, label: str) -> Progress:
        """Return a progress callback that prints a line on stderr every PROGRESS_SECONDS."""
        printed = time.monotonic()

        def show(done: int, total: int) -> None:
            nonlocal printed
            if not total or time.monotonic() - printed < PROGRESS_SECONDS:
                return
            printed = time.monotonic()
            counts = f"{done} of {total}, " if total < 100_000 else ""  # larger: bytes
            self.log(f"{label}: {counts}{done / total:.0%}")

        return show


def error(text: str, exit_code: int, *, json: bool = False) -> int:
    """Print why the run failed and return `exit_code`.

    Prints one line on stderr and, with `json`, an object on stdout unless a result was printed.
    """
    text = spell(text, Output.field_names)
    try:
        shown = _layout.wrap(f"error: {one_line(text)}", _layout.width(sys.stderr))
        _print(styled("error:", "bad", sys.stderr) + shown.removeprefix("error:"), sys.stderr)
        if json and not Output.printed:
            _print(_json({"error": text, "exit_code": exit_code}), sys.stdout)
    except (typer.Exit, OSError):
        pass  # no reader, or no disk space; the exit code still reports the error
    return exit_code
