"""Writes result files of commands."""

from __future__ import annotations

import os
from pathlib import Path

from g4spec.cli.render import Output
from g4spec.errors import UsageError, permitted

RESULT_MARKS = (b'"schema": "g4spec.', b"<title>Draft lengths: ")
"""Bytes near the beginning of result files: JSON, HTML."""


def prepare(*paths: Path | None) -> None:
    """Check that all `paths` can be written, and create their folders.

    Raises UsageError for a file that exists and is not a result that a run before this one wrote.
    Call it before measuring: after hours of work it is too late to find out.
    """
    written = [path.resolve() for path in paths if path is not None]
    if len(written) != len(set(written)):
        raise UsageError(f"{written[0]} would be written twice", fix="choose different names")
    for path in paths:
        if path is not None:
            with permitted(path):
                _check_file(path)


def check_folder(folder: Path) -> None:
    """Raise UsageError if the folder for results, or a folder above it, is a file, and
    EnvironmentProblem if it cannot be written to, or created."""
    with permitted(folder):
        if not os.access(_existing(folder), os.W_OK):
            raise PermissionError


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists; raise UsageError for a file."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(
            f"{existing} is a file",
            expected="a folder, which may be new",
            fix="choose another folder",
        )
    return existing


def _check_file(path: Path) -> None:
    from g4spec.gguf.atomic import check_replaceable, check_writable

    _existing(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_device(path):
        if not os.access(path, os.W_OK):
            raise PermissionError
        return
    check_writable(path)
    check_replaceable(path, RESULT_MARKS, "a result of g4spec")


def _is_device(path: Path) -> bool:
    """Return True for a device or pipe, which is written directly."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write(path: Path, text: str, out: Output) -> None:
    """Write a result: replace regular files atomically, write devices and pipes directly."""
    from g4spec.gguf.atomic import atomic_write

    data = text.encode(errors="surrogateescape")  # names of files may not be UTF-8
    if _is_device(path):
        path.write_bytes(data)
    else:
        with atomic_write(path, len(data)) as f:
            f.write(data)
    out.note(f"wrote {path}")
