"""Open and read files of untrusted checkpoints.

A name in a checkpoint may be a pipe without a writer, an endless device, a link to a private file
of the user, or a file that is too large to read.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from g4spec.errors import InputError

MAX_READ_BYTES = 64 << 20
"""Maximum size of a file that is read at once, in bytes. Gemma's tokenizer.json has 32 MB."""
_BLOB = re.compile(r".*/blobs/(?:[0-9a-f]{2}/)?(?:[0-9a-f]{40}|[0-9a-f]{64})")


LFS = b"version https://git-lfs.github.com/spec/"
LFS_FIX = "run git lfs pull in its repository"


def is_lfs_pointer(begin: bytes) -> bool:
    """True if a file with this beginning is a Git LFS pointer: its content was not downloaded."""
    return begin.startswith(LFS)


def refuse_lfs_pointer(path: Path, begin: bytes) -> None:
    """Raise InputError if a file with this beginning is a Git LFS pointer."""
    if is_lfs_pointer(begin):
        raise InputError(
            f"{path}: a Git LFS pointer", expected="the file it points to", fix=LFS_FIX
        )


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises InputError for a pipe, socket or device, and OSError
    as `open` does."""
    mode = os.stat(path).st_mode  # before opening: opening a pipe blocks until it has a writer
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"{path}: a device or pipe", expected="a file")
    return open(path, "rb")


def read_regular(path: Path, limit: int = MAX_READ_BYTES) -> bytes:
    """Read a regular file. Raises InputError if it is larger than `limit` bytes."""
    with open_regular(path) as f:
        size = os.fstat(f.fileno()).st_size
        if size > limit:
            raise InputError(
                f"{path}: too large", expected=f"at most {limit:,} bytes", found=f"{size:,} bytes"
            )
        return f.read(size)


def check_link(path: Path) -> Path:
    """Return `path`, or raise InputError if it is a link out of its folder.

    Links to blobs of a Hugging Face cache are allowed. Any other target could be a private file,
    whose content would become part of a converted file that may be published.
    """
    real = Path(os.path.realpath(path))  # unlike `resolve`, accepts circular links
    if path.parent.resolve() not in real.parents and not _BLOB.fullmatch(real.as_posix()):
        raise InputError(
            f"{path}: a link that leads out of its folder",
            fix="replace the link by the file, if it belongs to the checkpoint",
        )
    return path
