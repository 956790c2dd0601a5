"""Detect that a source changed during a conversion, before the result replaces a file."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from g4spec.errors import InputError
from g4spec.gguf import parts
from g4spec.gguf.regular_files import open_regular

ENDINGS = (".gguf", ".jinja", ".json", ".safetensors")
SAMPLE = 64 << 10
Stamp = tuple[int, int, bytes]


def file_stamps(source: Path) -> dict[Path, Stamp]:
    """Return size, modification time (ns) and a digest of the first and last 64 KiB of each file
    that a source may be read from.

    No inodes: network and FUSE mounts may give a file another one when they are asked again.
    """
    inside = sorted(source.iterdir()) if source.is_dir() else [source, *parts.siblings(source)]
    files = [p for p in inside if not source.is_dir() or p.suffix.lower() in ENDINGS]
    return {p: _stamp(p) for p in files if p.exists()}


def _stamp(path: Path) -> Stamp:
    found = os.stat(path)
    digest = hashlib.sha256()
    with suppress(OSError, InputError), open_regular(path) as file:  # reading it reports these
        digest.update(file.read(SAMPLE))
        file.seek(max(found.st_size - SAMPLE, 0))
        digest.update(file.read(SAMPLE))
    return found.st_size, found.st_mtime_ns, digest.digest()


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
