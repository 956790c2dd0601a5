"""Compiled kernels on disk, one file each, in the user's cache folder.

An entry is written under a temporary name and then renamed, so a reader never sees part of one. It
begins with a checksum of the rest; damaged entries are ignored. So are entries that another user
could have written, because a checksum does not prove who wrote them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path

from g4spec.errors import G4Error, InputError
from g4spec.gguf import regular_files, user_cache
from g4spec.gguf.atomic import atomic_write, remove_stale
from g4spec.runtime.cuda.build.nvrtc import Cubin, Resources

MAGIC = b"g4spec-cubin-1\n"
STARTS = (b"\x7fELF", b"//")
"""First bytes of machine code (ELF) and of PTX."""


def folder() -> Path:
    """Return the folder of compiled kernels."""
    return user_cache.folder("kernels")


def encode(cubin: Cubin) -> bytes:
    """Return magic, SHA-256 of the rest, length of a JSON header (8 bytes), header, code."""
    header = asdict(cubin)
    del header["code"]
    text = json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + cubin.code
    return MAGIC + hashlib.sha256(body).digest() + body


def decode(data: bytes) -> Cubin | None:
    """Decode the result of `encode`; return None for anything else, whatever its checksum."""
    start = len(MAGIC) + 32
    body = data[start:]
    if data[:start] != MAGIC + hashlib.sha256(body).digest():
        return None
    end = 8 + int.from_bytes(body[:8], "little")
    try:
        header = json.loads(body[8:end])
        cubin = Cubin(**header | {"resources": Resources(**header["resources"])}, code=body[end:])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    numbers = asdict(cubin.resources).values()
    texts = (cubin.arch, cubin.symbol, cubin.log)
    if not all(isinstance(text, str) for text in texts) or not cubin.code.startswith(STARTS):
        return None
    return cubin if all(type(n) is int and n >= 0 for n in numbers) else None


def _path(key: str, arch: str) -> Path:
    return folder() / arch / f"{key}.cubin"


def _ours(path: Path) -> bool:
    """Return whether a file or folder belongs to this user and nobody else may write to it. Machine
    code from it runs in this process."""
    if not hasattr(os, "getuid"):  # Windows: folders of a user are private
        return True
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _make_private(folder: Path) -> None:
    """Set the mode of a folder to 0700; raise PermissionError if it belongs to another user."""
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    folder.chmod(0o700)


def load(key: str, arch: str) -> Cubin | None:
    """Return the entry of this key, or None if it is missing, damaged, or writable by others."""
    path = _path(key, arch)
    remove_stale(path)  # temporary files of a killed process
    try:
        if not all(_ours(each) for each in (folder(), path.parent, path)):
            return None
        cubin = decode(regular_files.read_regular(path))
    except (OSError, InputError):
        return None
    return cubin if cubin is not None and cubin.arch == arch else None


def store(key: str, cubin: Cubin) -> None:
    """Store an entry, in folders of mode 0700. If they cannot be written or belong to another user,
    warn and go on: the next start compiles again."""
    path, data = _path(key, cubin.arch), encode(cubin)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for each in (folder(), path.parent):
            _make_private(each)
        with atomic_write(path, len(data)) as file:
            os.chmod(file.fileno(), 0o600)
            file.write(data)
    except (OSError, G4Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        warnings.warn(
            f"compiled kernels cannot be stored in {folder()} ({why}); "
            "set XDG_CACHE_HOME to a folder that you own and can write to",
            stacklevel=2,
        )
