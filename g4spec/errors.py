"""The errors that g4spec raises on purpose. Any other exception is a bug.

    G4Error
    ├── CheckFailed         exit 1   a requested check failed
    ├── UsageError          exit 2   options or arguments are wrong or contradict each other
    ├── InputError          exit 3   a file, folder or prompt is invalid
    │   ├── Unsupported     exit 3   the input is valid, but this version cannot handle it
    │   └── PromptTooLong   exit 3   the prompt has more tokens than the context
    └── EnvironmentProblem  exit 4   this machine lacks something: memory, disk, a package
        └── KernelCompileError       NVRTC failed to compile a CUDA kernel

A message says what failed, what was expected, what was found, and what to do.

Messages of the library name parameters and fields in backticks: `draft_max`. Interfaces with other
names (options of the command line, fields of a request) replace them with `spell`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def _joined(value: object) -> object:
    if isinstance(value, list) and all(isinstance(x, str) for x in value):
        return ", ".join(value)
    return "an empty text" if isinstance(value, str) and value == "" else value


def spell(text: str, names: Mapping[str, str]) -> str:
    """Replace each parameter name in backticks that `names` contains: "`draft_max`" becomes
    "--draft-max" in the command line."""
    return re.sub(r"`(\w+)`", lambda found: names.get(found[1], found[0]), text)


def did_you_mean(found: object, choices: Iterable[str]) -> str | None:
    """Return "did you mean A, B or C?" with the choices most similar to `found`; None without one.

    Case, leading dashes and `.gguf` do not count. Choices that begin with `found` follow the
    similar ones.
    """
    word = str(found).strip().lower().lstrip("-").removesuffix(".gguf")
    known = {choice.lower().lstrip("-").removesuffix(".gguf"): choice for choice in choices}
    scores = {name: difflib.SequenceMatcher(None, word, name).ratio() for name in known}
    best = max(scores.values(), default=0)
    similar = [name for name in known if scores[name] >= max(0.6, best - 0.1)]
    similar.sort(key=lambda name: -scores[name])
    begins = [name for name in known if word and name.startswith(word)]
    names = [known[name] for name in dict.fromkeys([*similar, *begins])][:3]
    if not names:
        return None
    return f"did you mean {' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}?"


_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def similar_files(path: Path) -> str | None:
    """Return `did_you_mean` with the files of a folder for one that does not exist there.

    Of a split model it names the first part only, by which such a model is opened.
    """
    folder = path.parent if path.parent.is_dir() else Path()
    names = [entry.name for entry in folder.iterdir()]
    return did_you_mean(path.name, (name for name in names if not _LATER_PART.search(name)))


def unexpanded(path: Path) -> str | None:
    """Return the fix for a path with a ~ that the shell left unchanged; None for another path."""
    text = str(path)
    if not text.startswith("~"):
        return None
    return f"write {os.path.expanduser(text)}: the shell leaves ~ unchanged in quotes and after ="


class G4Error(Exception):
    """Base class of all errors that a user can cause; its text needs no traceback.

    Args:
        what: what failed, naming the file, key or tensor.
        expected, found: both sides of the failed comparison, if there is one. Lists of names are
            shown separated by commas.
        fix: what the user can do about it, as an imperative.
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
            text += f": expected {_joined(expected)}"
        if found is not None:
            text += f"{',' if expected is not None else ':'} found {_joined(found)}"
        if fix:
            text = f"{text.removesuffix('.')}. {fix[0].upper()}{fix[1:]}"
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text and all attributes, independent of the `__init__` of a subclass."""
        return _unpickled, (type(self), str(self), vars(self))


class CheckFailed(G4Error):
    """A requested check that failed (verify, validate, bench compare)."""

    exit_code = 1


class UsageError(G4Error):
    """Options or arguments that are wrong or contradict each other."""

    exit_code = 2


class InputError(G4Error):
    """A file, folder or prompt that is invalid."""


class Unsupported(InputError):
    """Valid input that this version cannot handle; the text names the missing feature."""


class PromptTooLong(InputError):
    """A prompt that does not fit into the context.

    Args:
        tokens: number of tokens in the prompt, or a lower bound of it.
        n_ctx: context length in tokens.
        found: how the message states the number of tokens.
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
    """A CUDA kernel that NVRTC failed to compile.

    Args:
        path: source file of the kernel.
        options: compiler options, including the architecture.
        log: complete compiler output; it is also part of the message.
    """

    def __init__(self, path: str, options: tuple[str, ...], log: str, *, fix: str) -> None:
        self.path, self.options, self.log = path, options, log
        super().__init__(
            f"{path}: cannot compile the kernel",
            expected=" ".join(("a cubin from NVRTC", *options)),
            found=f"\n{log.strip()}\n",
            fix=fix,
        )


def _unpickled(kind: type[G4Error], text: str, attributes: dict[str, Any]) -> G4Error:
    error = kind.__new__(kind, text)
    vars(error).update(attributes)
    return error


@contextmanager
def permitted(path: Path) -> Iterator[None]:
    """Turn a PermissionError in this block into an EnvironmentProblem: `path` cannot be written."""
    try:
        yield
    except PermissionError as error:
        raise EnvironmentProblem(
            f"cannot write {path}: permission denied", fix="choose another folder"
        ) from error
