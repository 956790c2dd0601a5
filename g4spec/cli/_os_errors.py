"""What the user or the machine did wrong, told apart from bugs, which stay tracebacks."""

from __future__ import annotations

import errno
import os

import typer

from g4spec.errors import EnvironmentProblem, G4Error, InputError, UsageError

_INPUT_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}

INSTALL = "install it: pip install 'g4spec[run]' (README: a smaller build for CPUs)"
"""What brings torch."""

# click's ClickException, or that of typer's own copy of click in newer versions: both are
# reachable from here without naming either.
CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


def as_error(problem: Exception) -> G4Error | None:
    """What the user, or the operating system, did, as one of our errors; None for a bug."""
    if isinstance(problem, G4Error):
        return problem
    if isinstance(problem, CLICK_ERROR):
        context = getattr(problem, "ctx", None)
        path = context.command_path if context is not None else "g4spec"
        text = problem.format_message().rstrip(".")  # type: ignore[attr-defined]
        return UsageError(text, fix=f"see `{path} --help`")
    if isinstance(problem, ImportError | MemoryError) or _is_out_of_memory(problem):
        return _missing_resource(problem)
    if isinstance(problem, RecursionError):  # only files nest: nothing here recurses by itself
        return InputError("a file is nested too deep", expected="JSON of a few levels")
    if isinstance(problem, RuntimeError) and "Symlink loop" in str(problem):  # Path.resolve
        return InputError(f"cannot open: {problem}", fix="check the path")
    return _from_os_error(problem) if isinstance(problem, OSError) else None


def _missing_resource(problem: Exception) -> EnvironmentProblem | None:
    """What this machine lacks: memory, or torch. Another module that is missing is a bug."""
    if not isinstance(problem, ImportError):
        return EnvironmentProblem("out of memory", fix="use a shorter context or smaller files")
    if problem.name != "torch" or not isinstance(problem, ModuleNotFoundError):
        return None
    return EnvironmentProblem("running a model needs the package torch", fix=INSTALL)


def _is_out_of_memory(problem: Exception) -> bool:
    """Whether torch could not allocate: on a GPU it has a class for that, on a CPU words."""
    if not isinstance(problem, RuntimeError):
        return False
    return type(problem).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(problem)


def _from_os_error(problem: OSError) -> G4Error | None:
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
