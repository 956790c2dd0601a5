"""The errors g4spec raises on purpose. Everything else is a bug.

    G4Error
    ├── CheckFailed         exit 1   a check that was asked for did not hold
    ├── UsageError          exit 2   the command line cannot mean anything
    ├── InputError          exit 3   a file, folder or prompt is not what it must be
    │   ├── Unsupported     exit 3   it is valid, but this version has no code for it
    │   └── PromptTooLong   exit 3   a prompt has more tokens than a context
    └── EnvironmentProblem  exit 4   this machine lacks something: memory, disk, a package
        └── KernelCompileError       a CUDA kernel that its compiler refused

A message says what failed, what was expected, what was found, and what to do.
"""

from __future__ import annotations

from typing import Any


def _shown(value: object) -> object:
    if isinstance(value, list) and all(isinstance(x, str) for x in value):
        return ", ".join(value)
    return value


class G4Error(Exception):
    """Base of all errors a user can cause. Its text is complete: no traceback is needed.

    Args:
        what: what failed, naming the file, key or tensor.
        expected, found: both sides of the comparison, when there is one. Names in a list are shown
            with commas between them.
        fix: what the user can do about it.
    """

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.expected, self.found, self.fix = what, expected, found, fix
        text = what
        if expected is not None:
            text += f": expected {_shown(expected)}"
        if found is not None:
            text += f"{',' if expected is not None else ':'} found {_shown(found)}"
        if fix:
            text += f". {fix[0].upper()}{fix[1:]}"
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text and all attributes, whatever `__init__` of a subclass takes."""
        return _error, (type(self), str(self), vars(self))


class CheckFailed(G4Error):
    """A check that the user asked for did not hold (verify, validate, bench compare)."""

    exit_code = 1


class UsageError(G4Error):
    """Options or arguments that cannot mean anything together."""

    exit_code = 2


class InputError(G4Error):
    """A file, folder or prompt that is not what it must be."""


class Unsupported(InputError):
    """Valid input for which this version has no code; names the missing feature."""


class PromptTooLong(InputError):
    """A prompt that does not fit into the context.

    Args:
        tokens: its tokens, at least. n_ctx: of the context. found: as it is said.
    """

    def __init__(self, tokens: int, n_ctx: int, found: object, fix: str | None = None) -> None:
        self.tokens, self.n_ctx = tokens, n_ctx
        super().__init__(
            "the prompt does not fit into the context",
            expected=f"at most {n_ctx} tokens",
            found=found,
            fix=fix,
        )


class EnvironmentProblem(G4Error):
    """The machine lacks something: memory, disk space, a package."""

    exit_code = 4


class KernelCompileError(EnvironmentProblem):
    """A CUDA kernel that NVRTC did not compile.

    Args:
        path: the kernel's file.
        options: what the compiler was called with, the architecture included.
        log: what the compiler said, whole; it is also part of the message.
    """

    def __init__(self, path: str, options: tuple[str, ...], log: str, *, fix: str) -> None:
        self.path, self.options, self.log = path, options, log
        super().__init__(
            f"{path}: kernel not compiled",
            expected=" ".join(("a cubin from NVRTC", *options)),
            found=f"\n{log.strip()}\n",
            fix=fix,
        )


def _error(kind: type[G4Error], text: str, attributes: dict[str, Any]) -> G4Error:
    error = kind.__new__(kind, text)
    vars(error).update(attributes)
    return error
