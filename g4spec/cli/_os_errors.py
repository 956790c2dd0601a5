"""Maps exceptions of libraries and the operating system to errors of g4spec.

Exceptions that are bugs are not mapped, and end in a traceback.
"""

from __future__ import annotations

import errno
import os

import typer

from g4spec.cli.render import STDOUT
from g4spec.errors import EnvironmentProblem, G4Error, InputError, UsageError

_INPUT_FIXES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "check the path",
    errno.ENAMETOOLONG: "check the path",
    errno.ELOOP: "check the path",
    errno.EACCES: "check its permissions",  # writers of files say "cannot write"
}

INSTALL = "install it: pip install 'g4spec[run]' (README: a smaller build for CPUs)"
"""How to install torch."""

# click's ClickException, or that of typer's own copy of click in newer versions: both are
# reachable from here without naming either.
CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


def as_error(problem: Exception) -> G4Error | None:
    """Return the error of g4spec for an exception, or None if it is a bug."""
    if isinstance(problem, G4Error):
        return problem
    if isinstance(problem, CLICK_ERROR):
        context = getattr(problem, "ctx", None)
        path = context.command_path if context is not None else "g4spec"
        text = problem.format_message().rstrip(".")  # type: ignore[attr-defined]
        return UsageError(text, fix=f"see `{path} --help`")
    if (
        isinstance(problem, ImportError | MemoryError)
        or _is_out_of_memory(problem)
        or _is_unloadable(problem)
    ):
        return _missing_resource(problem)
    if isinstance(problem, RecursionError):  # only nested file content causes deep recursion
        return InputError("a file is nested too deeply", expected="JSON of a few levels")
    if isinstance(problem, RuntimeError):
        return _from_path_error(problem)
    return _from_os_error(problem) if isinstance(problem, OSError) else None


def _from_path_error(problem: RuntimeError) -> G4Error | None:
    """Return an error for a `RuntimeError` of `pathlib.Path`; None for another one."""
    if "Symlink loop" in str(problem):  # Path.resolve
        return InputError(f"cannot open: {problem}", fix="check the path")
    if "home directory" in str(problem):  # Path.home
        return EnvironmentProblem(
            "the cache has no place: this user has no home folder",
            fix="set XDG_CACHE_HOME, or HOME, to a folder",
        )
    return None


def _missing_resource(problem: Exception) -> EnvironmentProblem | None:
    """Return an error for missing memory, torch or shared libraries; None for a missing module."""
    if _is_unloadable(problem):
        return EnvironmentProblem(
            "a package cannot be loaded",
            found=str(problem),
            fix="install the missing library, or the package again; it also needs enough memory",
        )
    if not isinstance(problem, ImportError):
        return EnvironmentProblem(
            "out of memory", fix="use a shorter context (-c) or smaller files"
        )
    if "socksio" in str(problem):  # httpx
        return EnvironmentProblem(
            "the environment sets a SOCKS proxy, which needs the package socksio",
            fix="install it, or unset ALL_PROXY",
        )
    if problem.name != "torch" or not isinstance(problem, ModuleNotFoundError):
        return None
    return EnvironmentProblem(
        "running a model needs the package torch, which is not installed", fix=INSTALL
    )


def _is_unloadable(problem: Exception) -> bool:
    """Return True if a package is installed, but the linker cannot load a library of it.

    The import of an extension reports this as `ImportError` with its path; torch, which loads some
    libraries with ctypes first, as `OSError` without a number.
    """
    if isinstance(problem, ImportError):
        return str(problem.path).endswith((".so", ".pyd"))
    return isinstance(problem, OSError) and problem.errno is None and ".so" in str(problem)


def _is_out_of_memory(problem: Exception) -> bool:
    """Return True for an out-of-memory error of torch (its CPU allocator only has a message)."""
    if not isinstance(problem, RuntimeError):
        return False
    return type(problem).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(problem)


def check_working_folder() -> None:
    """Raise EnvironmentProblem in a folder that was deleted, where torch cannot be imported."""
    if (error := _deleted_folder()) is not None:
        raise error


def _deleted_folder() -> EnvironmentProblem | None:
    """Return the error for a working folder that was deleted; None if it exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return EnvironmentProblem(
            f"the working folder {os.environ.get('PWD', '')} was deleted",
            fix="change to a folder that exists, and run the command again",
        )
    return None


def _from_os_error(problem: OSError) -> G4Error | None:
    """Return an error for an `OSError`; None if it has no errno."""
    if problem.errno is None:
        return None
    where = f" {os.fspath(problem.filename)!r}" if problem.filename else ""
    where = " to stdout" if problem.filename == STDOUT else where
    reason = (problem.strerror or os.strerror(problem.errno)).lower()
    if "temporary directory" in reason:  # tempfile.gettempdir
        return EnvironmentProblem(reason, fix="set TMPDIR to a folder that can be written to")
    if problem.errno in _INPUT_FIXES:
        gone = None if problem.filename else _deleted_folder()  # os.getcwd names no file
        return gone or InputError(f"cannot open{where}: {reason}", fix=_INPUT_FIXES[problem.errno])
    if problem.errno == errno.EBADF:  # see `cli._open_closed_streams`
        return EnvironmentProblem("cannot write: stdout is closed", fix="redirect it to a file")
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentProblem(f"cannot write{where}: {reason}", fix="free disk space")
    fix = "check its permissions" if problem.errno == errno.EPERM else None
    return EnvironmentProblem(f"cannot access{where}: {reason}", fix=fix)
