"""Opens regular files, and reads small ones whole.

A name in a checkpoint may be a pipe that nobody writes to, a device without an end, a link to
something of the user's that is no part of the checkpoint, or simply too large.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from g4spec.errors import InputError

MAX_READ_BYTES = 64 << 20
"""Bytes of a file that is read whole. Gemma's tokenizer.json has 32 MB."""
_BLOB = re.compile(r".*/blobs/(?:[0-9a-f]{2}/)?(?:[0-9a-f]{40}|[0-9a-f]{64})")


LFS = b"version https://git-lfs.github.com/spec/"
LFS_FIX = "run git lfs pull in its repository"


def is_lfs_pointer(begin: bytes) -> bool:
    """Whether a file that begins so is a Git LFS pointer: the file itself was not fetched."""
    return begin.startswith(LFS)


def refuse_lfs_pointer(path: Path, begin: bytes) -> None:
    """InputError for a file that begins as a Git LFS pointer does."""
    if is_lfs_pointer(begin):
        raise InputError(
            f"{path}: a Git LFS pointer", expected="the file it points to", fix=LFS_FIX
        )


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading. InputError for a pipe, socket or device; OSError as
    `open` raises it."""
    mode = os.stat(path).st_mode  # before it is opened: a pipe would wait for its writer
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"{path}: a device or pipe", expected="a file")
    return open(path, "rb")


def read_regular(path: Path, limit: int = MAX_READ_BYTES) -> bytes:
    """All bytes of a regular file of at most `limit` bytes, else InputError."""
    with open_regular(path) as f:
        size = os.fstat(f.fileno()).st_size
        if size > limit:
            raise InputError(
                f"{path}: too large", expected=f"at most {limit:,} bytes", found=f"{size:,} bytes"
            )
        return f.read(size)


def check_link(path: Path) -> Path:
    """`path`, if it lies in its folder also when links are followed, or in the blobs of a Hugging
    Face cache. InputError otherwise: what it leads to would become part of a file that may be
    published."""
    real = Path(os.path.realpath(path))  # unlike `resolve`, also of links that lead in a circle
    if path.parent.resolve() not in real.parents and not _BLOB.fullmatch(real.as_posix()):
        raise InputError(
            f"{path}: a link that leads out of its folder",
            fix="put the file itself there, if it belongs there",
        )
    return path
