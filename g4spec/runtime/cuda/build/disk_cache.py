"""Compiled kernels on disk, one file each, in the user's cache folder.

An entry is written under a temporary name and renamed, so that a reader finds a whole entry or
none; it begins with the checksum of the rest, so that a damaged one counts as none. Entries that
another user could have written are not used: a checksum proves no origin.
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
from g4spec.gguf import regular_files
from g4spec.gguf.atomic import atomic_write, remove_stale
from g4spec.runtime.cuda.build.nvrtc import Cubin, Resources

MAGIC = b"g4spec-cubin-1\n"
STARTS = (b"\x7fELF", b"//")
"""Of machine code, and of PTX."""


def folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "g4spec" / "kernels"


def encode(cubin: Cubin) -> bytes:
    """Magic, SHA-256 of what follows, length of a JSON header (8 bytes), header, code."""
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
        found = Cubin(**header | {"resources": Resources(**header["resources"])}, code=body[end:])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    numbers = asdict(found.resources).values()
    texts = (found.arch, found.symbol, found.log)
    if not all(isinstance(text, str) for text in texts) or not found.code.startswith(STARTS):
        return None
    return found if all(type(n) is int and n >= 0 for n in numbers) else None


def _path(key: str, arch: str) -> Path:
    return folder() / arch / f"{key}.cubin"


def _ours(path: Path) -> bool:
    """Whether a file or folder belongs to this user and nobody else may write to it: machine code
    from it runs in this process."""
    if not hasattr(os, "getuid"):  # Windows: folders of a user are private
        return True
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _make_private(folder: Path) -> None:
    """Give a folder mode 0700. PermissionError if it is another user's."""
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    folder.chmod(0o700)


def load(key: str, arch: str) -> Cubin | None:
    """The entry of this key; None where there is none, it is damaged, or others may write it."""
    path = _path(key, arch)
    remove_stale(path)  # what a run that was killed left
    try:
        if not all(_ours(each) for each in (folder(), path.parent, path)):
            return None
        found = decode(regular_files.read_regular(path))
    except (OSError, InputError):
        return None
    return found if found is not None and found.arch == arch else None


def store(key: str, cubin: Cubin) -> None:
    """Keeps an entry, in folders of mode 0700. Where they cannot be written, or belong to somebody
    else, it says so and the work goes on: the next start compiles again."""
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
            f"compiled kernels cannot be kept in {folder()} ({why}); "
            "set XDG_CACHE_HOME to a folder of your own that can be written",
            stacklevel=2,
        )
