"""Compiled kernels on disk, one file each, in the user's cache folder.

An entry is written under a temporary name and renamed, so that a reader finds a whole entry or
none; it begins with the checksum of the rest, so that a damaged one counts as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

from g4spec.runtime.cuda.build.nvrtc import Cubin, Resources

MAGIC = b"g4spec-cubin-1\n"


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
    """What `encode` was given; None where anything was changed or cut off."""
    start = len(MAGIC) + 32
    body = data[start:]
    if data[:start] != MAGIC + hashlib.sha256(body).digest():
        return None
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    header["resources"] = Resources(**header["resources"])
    return Cubin(**header, code=body[end:])


def _path(key: str, arch: str) -> Path:
    return folder() / arch / f"{key}.cubin"


def load(key: str, arch: str) -> Cubin | None:
    """The entry of this key; None where there is none or it is damaged."""
    try:
        return decode(_path(key, arch).read_bytes())
    except OSError:
        return None


def store(key: str, cubin: Cubin) -> None:
    """Keeps an entry. Where the folder cannot be written it says so and the work goes on: the
    next start compiles again."""
    path = _path(key, cubin.arch)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(encode(cubin))
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        warnings.warn(
            f"compiled kernels cannot be kept in {folder()} ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that can be written",
            stacklevel=2,
        )
