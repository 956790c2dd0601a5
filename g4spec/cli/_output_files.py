"""Writes result files of commands."""

from __future__ import annotations

import os
from pathlib import Path

from g4spec.cli.render import Output
from g4spec.errors import UsageError, permitted

RESULT_MARKS = (b'"schema": "g4spec.', b"<title>Draft lengths: ")
"""Bytes near the beginning of result files: JSON, HTML."""


def prepare(*paths: Path | None) -> None:
    """Check that all `paths` can be written.

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


def _check_file(path: Path) -> None:
    from g4spec.gguf.atomic import check_replaceable, check_writable

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
