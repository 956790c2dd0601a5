"""Checks a download from the Hugging Face hub against its digest."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from g4spec.errors import InputError


def check_digest(path: Path, digest: str | None, what: str) -> None:
    """Compare a download with the digest from the hub's headers, or else with the name of its blob
    in the cache: sha256 for large files, git's sha1 for small ones. Removes a damaged file and
    raises InputError."""
    blob = Path(os.path.join(path.parent, os.readlink(path))) if path.is_symlink() else path
    expected = digest or blob.name
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", expected):
        raise InputError(f"{what}: no digest to compare with", found=expected)
    found = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(usedforsecurity=False)
    with open(blob, "rb") as f:
        if len(expected) == 40:
            found.update(f"blob {os.fstat(f.fileno()).st_size}\0".encode())
        while chunk := f.read(1 << 22):
            found.update(chunk)
    if found.hexdigest() != expected:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise InputError(
            f"{what}: damaged download, removed",
            expected=f"{found.name} {expected}",
            found=found.hexdigest(),
            fix="run the command again",
        )
