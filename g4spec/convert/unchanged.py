"""Detect that a source changed during a conversion, before the result replaces a file."""

from __future__ import annotations

import os
from pathlib import Path

from g4spec.errors import InputError
from g4spec.gguf import parts

ENDINGS = (".gguf", ".jinja", ".json", ".safetensors")
Stamp = tuple[int, int, int]


def file_stamps(source: Path) -> dict[Path, Stamp]:
    """Return inode, size and modification time (ns) of each file that a source may be read from."""
    inside = sorted(source.iterdir()) if source.is_dir() else [source, *parts.siblings(source)]
    files = [p for p in inside if not source.is_dir() or p.suffix in ENDINGS]
    return {p: _stamp(p) for p in files if p.exists()}


def _stamp(path: Path) -> Stamp:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


class UnchangedCheck:
    """A callable check that sources have not changed since it was created.

    Calling it raises InputError if a file was replaced, written to or removed. Otherwise a
    conversion could mix two states of a source and record the digest of one.
    """

    def __init__(self, *sources: Path | None) -> None:
        self._sources = [s for s in sources if s is not None]
        self._before = [file_stamps(s) for s in self._sources]

    def __call__(self) -> None:
        for source, before in zip(self._sources, self._before, strict=True):
            after = file_stamps(source)
            changed = [p for p, stamp in before.items() if after.get(p) != stamp]
            if changed:
                raise InputError(
                    f"{min(changed)} changed while it was read",
                    fix="run the command again when no other program writes to it",
                )
