"""The command line.

A file in this folder that defines `command` is a command of that name. A file that defines `app`
is a command with subcommands (`bench compare`).

`main` is the only place where errors become messages and exit codes (see `g4spec.errors`).
Nothing here, and nothing at the top of a command's file, may import torch or numpy: `--help` and
`--version` must answer at once.
"""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from g4spec import __version__
from g4spec.cli import _command_classes, _signals, render
from g4spec.cli._os_errors import CLICK_ERROR, as_error
from g4spec.errors import G4Error

ORDER = ("demo", "convert", "quantize", "validate", "inspect", "generate", "tokenize", "verify")
"""Order of commands in `--help`, by workflow. All other commands follow alphabetically."""


def _version(value: bool) -> None:
    if value:
        render.Output().stream(f"g4spec {__version__}\n")
        raise typer.Exit


def _top(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Convert, validate, verify and run speculative-decoding drafts for Gemma 4.

    Exit codes: 0 ok, 1 a check failed, 2 wrong usage, 3 bad input, 4 problem of this machine,
    130 Ctrl-C, 143 SIGTERM, 129 closed terminal, 141 closed pipe (`| head`).
    `g4spec help COMMAND` is the same as `g4spec COMMAND --help`.
    """
    if context.invoked_subcommand is None:
        render.Output().stream(context.get_help() + "\n")
        raise typer.Exit(2)


def names() -> list[str]:
    """Return the names of the command files in this folder, in the order of `--help`."""
    command_names = {info.name for info in pkgutil.iter_modules(__path__)}
    command_names = {
        name for name in command_names if not name.startswith("_") and name != "render"
    }
    listed = [name for name in ORDER if name in command_names]
    return listed + sorted(command_names - set(listed))


def app(command: str | None = None) -> typer.Typer:
    """Return the Typer application with every command registered, or only `command` if there is
    one of this name: the others would take a third of its start."""
    # Plain help text: importing rich costs 0.1 s, a third of the time budget of `--help`.
    application = typer.Typer(
        name="g4spec",
        cls=_command_classes.Group,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    settings = {"help_option_names": ["-h", "--help"]}
    application.callback(invoke_without_command=True, context_settings=settings)(_top)
    known = names()
    for name in [command] if command in known else known:
        module = importlib.import_module(f"{__name__}.{name}")
        if hasattr(module, "app"):
            application.add_typer(module.app, name=name, cls=_command_classes.Group)
        elif hasattr(module, "command"):
            application.command(name, cls=_command_classes.Command)(module.command)
    return application


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    json = "--json" in argv
    render.Output.printed, render.Output.field_names = False, {}
    if list(argv[:1]) == ["help"]:
        argv = [*argv[1:], "--help"]
    try:
        code = app(*argv[:1])(list(argv), prog_name="g4spec", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (G4Error, CLICK_ERROR, ImportError, MemoryError, OSError, RuntimeError) as problem:
        error = None if _signals.received() else as_error(problem)
        if error is None:
            raise
        if isinstance(problem, OSError) and problem.errno == errno.EBADF:
            render.discard(sys.stdout)
        return render.error(str(error), error.exit_code, json=json)


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed (`>&-`).

    Otherwise the first file that the run opens takes the number of the stream, and receives what
    libraries and subprocesses write to it. stdin is empty then and stderr is discarded. stdout is
    opened for reading: the requested output is lost, and the error of the first write says so.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            number = os.open(os.devnull, mode)  # the lowest free number: that of the stream
            os.set_inheritable(number, True)
            stream = open(number, "r" if name == "stdin" else "w")  # noqa: SIM115
            setattr(sys, name, stream)


def main() -> None:
    """Run the command line of this process (see `g4spec.__main__`)."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show must not end the run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    code = 130
    try:  # a signal before or after the command
        with suppress(KeyboardInterrupt), _signals.handled():
            code = run(sys.argv[1:])
    finally:
        _flush_log()
    sys.exit(code)


def _flush_log() -> None:
    """Write what is left for stderr; if its reader has gone, discard it: Python flushes once more
    at exit, and a failure there would replace the exit code by 120."""
    try:
        sys.stderr.flush()
    except OSError:
        render.discard(sys.stderr)
