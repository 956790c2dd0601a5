"""Cache of converted drafts, so that a draft folder is converted once.

The name of an entry contains a digest of both sources, their sizes and modification times. A
`.sha256` file next to the entry holds the digest of its content. An entry that does not match its
digest is converted again.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from g4spec import __version__
from g4spec.convert import provenance, sources
from g4spec.convert.pipeline import convert
from g4spec.convert.unchanged import file_stamps
from g4spec.errors import EnvironmentProblem, InputError
from g4spec.gguf import GGUF
from g4spec.gguf.atomic import atomic_write, remove_stale
from g4spec.gguf.writer import Progress

TYPE = "q8_0"
"""Quant type of conversions, a part of their names."""


def convert_cached(
    source: Path,
    target: Path,
    cache_dir: Path,
    progress: Progress | None = None,
) -> tuple[Path, str]:
    """Return the GGUF of a draft and a note about its origin: the folder, `cache_dir`, or a new
    conversion.

    A changed checkpoint is converted again: the cache key contains size and modification time of
    each file, because `provenance.digest` only reads samples.
    """
    with sources.detect(source, prefer_gguf=True) as found:
        if isinstance(found.source, GGUF) and found.dialect is None:
            return found.path, f"{source} holds a GGUF: took {found.path.name}"
        parts = [__version__, TYPE, provenance.digest(found.source)]
    with sources.detect(target, weights=False) as pair:
        parts.append(provenance.digest(pair.source))
    parts += [f"{path.name} {size} {time}" for path, (size, time, _) in file_stamps(source).items()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    out = Path(cache_dir) / f"{source.resolve().name}-{key}-{TYPE}.gguf"
    for path in (out, _digest_path(out)):
        remove_stale(path)  # left by a killed process
    exists = os.path.exists(out)  # False in a folder of another user, unlike `Path.exists`
    if exists and _is_intact(out):
        return out, f"{source}: using its conversion {out}"
    _create(out.parent)
    if exists and not os.access(out, os.R_OK):
        raise _unusable(out, "read", os.strerror(errno.EACCES))
    convert(source, out, target=target, type=TYPE, progress=progress)
    digest = _sha256(out).encode()
    with atomic_write(_digest_path(out), len(digest)) as f:
        f.write(digest)
    again = "damaged in the cache, " if exists else ""
    return out, f"{source}: {again}converted into {out}"


def _create(folder: Path) -> None:
    """Create the folder of the cache; raise EnvironmentProblem if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unusable(folder, "written to", error.strerror or str(error)) from error


def _unusable(path: Path, what: str, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{path}: the cache of converted drafts cannot be {what}",
        found=why.lower(),
        fix="set XDG_CACHE_HOME to another folder, or give a file made by `g4spec convert`",
    )


def _digest_path(out: Path) -> Path:
    return out.with_name(out.name + ".sha256")


def _is_intact(out: Path) -> bool:
    """True if the entry opens as GGUF and its content has the recorded digest."""
    try:
        expected = _digest_path(out).read_bytes()
        with GGUF(out):
            return _sha256(out).encode() == expected
    except (OSError, InputError):
        return False


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            sha.update(chunk)
    return sha.hexdigest()
