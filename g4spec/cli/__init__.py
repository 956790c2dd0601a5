"""The command line. A file in this folder that defines `command` is a command of that name.

`main` is the only place where errors become messages and exit codes (see `g4spec.errors`).
Nothing here, and nothing at the top of a command's file, may import torch or numpy: `--help` and
`--version` have to answer at once.
"""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from g4spec import __version__
from g4spec.cli import render
from g4spec.errors import EnvironmentProblem, G4Error, InputError, UsageError

ORDER = ("demo", "convert", "quantize", "validate", "inspect", "generate", "tokenize", "verify")
"""Order in `--help`: the way through the work. Commands that are not named come after, by name."""

_INPUT_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}

# click's ClickException, or that of typer's own copy of click in newer versions: both are
# reachable from here without naming either.
_CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


def _version(value: bool) -> None:
    if value:
        render.Output().stream(f"g4spec {__version__}\n")
        raise typer.Exit


def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Convert, validate, verify and run speculative-decoding drafts for Gemma 4.

    Exit codes: 0 ok, 1 a check failed, 2 usage, 3 bad input, 4 environment.
    """
    if context.invoked_subcommand is None:
        render.Output().stream(context.get_help() + "\n")
        raise typer.Exit(2)


def names() -> list[str]:
    """The files of this folder that may hold a command, in the order of `--help`."""
    found = {info.name for info in pkgutil.iter_modules(__path__) if info.name != "render"}
    listed = [name for name in ORDER if name in found]
    return listed + sorted(found - set(listed))


def app() -> typer.Typer:
    """The Typer application with every command registered."""
    # Plain help text: rich's costs 0.1 s of imports, a third of what `--help` may take.
    made = typer.Typer(name="g4spec", rich_markup_mode=None, pretty_exceptions_enable=False)
    made.callback(invoke_without_command=True)(_top)
    for name in names():
        module = importlib.import_module(f"{__name__}.{name}")
        if hasattr(module, "command"):
            made.command(name.replace("_", "-"))(module.command)
    return made


def _as_error(problem: Exception) -> G4Error | None:
    """What the user, or the operating system, did, as one of our errors; None for a bug."""
    if isinstance(problem, G4Error):
        return problem
    if isinstance(problem, _CLICK_ERROR):
        context = getattr(problem, "ctx", None)
        path = context.command_path if context is not None else "g4spec"
        text = problem.format_message().rstrip(".")  # type: ignore[attr-defined]
        return UsageError(text, fix=f"see `{path} --help`")
    if isinstance(problem, MemoryError):
        return EnvironmentProblem("out of memory", fix="use a shorter context or smaller files")
    return _refused(problem) if isinstance(problem, OSError) else None


def _refused(problem: OSError) -> G4Error | None:
    """What the operating system refused; None when there is no such refusal in it."""
    if problem.errno is None:
        return None
    where = f" {os.fspath(problem.filename)!r}" if problem.filename else ""
    reason = (problem.strerror or os.strerror(problem.errno)).lower()
    if problem.errno in _INPUT_ERRNOS:
        return InputError(f"cannot open{where}: {reason}", fix="check the path")
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentProblem(f"cannot write{where}: {reason}", fix="free some disk space")
    return EnvironmentProblem(f"cannot use{where}: {reason}")


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    json = "--json" in argv
    render.Output.printed = False
    try:
        code = app()(list(argv), prog_name="g4spec", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Python flushes stdout again at exit; nobody is left to read it or its complaint.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (G4Error, _CLICK_ERROR, MemoryError, OSError) as problem:
        known = _as_error(problem)
        if known is None:
            raise
        return render.error(str(known), known.exit_code, json=json)


def main() -> None:
    """Entry point of `g4spec`."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))
