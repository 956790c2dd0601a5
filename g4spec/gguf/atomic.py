"""Replace files atomically, and remove temporary files of killed processes.

A file is written under a temporary name in the same folder, which is created if necessary, synced
to disk and renamed. Only SIGKILL or a power failure leave the temporary file behind. Its writer
holds a lock on it, which the system releases when the process ends. The next write to the same
output removes the temporary files that are not locked.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from g4spec.errors import EnvironmentProblem, InputError, UsageError, permitted, unexpanded

try:
    import fcntl
except ImportError:  # Windows: no locks, and no removal of stale files
    fcntl = None  # type: ignore[assignment]


def check_writable(path: Path) -> None:
    """Raise UsageError or EnvironmentProblem if no file can be written to `path`, which the caller
    was given. Call it before expensive work."""
    if str(path) == "-":
        raise UsageError(
            "the output cannot be standard output", expected="the name of a file to write"
        )
    try:
        _check_place(path)
    except InputError as error:
        raise UsageError(error.what, expected=error.expected, fix=error.fix) from None


def _check_place(path: Path) -> None:
    """Raise InputError, UsageError or EnvironmentProblem if no file can be written to `path`."""
    with permitted(path):
        if path.is_dir():
            raise InputError(f"{path} is a folder", expected="the name of a file to write")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is a device or pipe", expected="the name of a file to write")
        if path.exists() and not path.stat().st_mode & 0o222:
            raise EnvironmentProblem(
                f"cannot write {path}: it is read-only",
                fix="choose another name, or make it writable",
            )
        folder = path.resolve().parent
        if not folder.is_dir() and (path.is_symlink() or unexpanded(path)):
            shown = folder if path.is_symlink() else path.parent
            raise InputError(f"{shown}: no such folder", fix=unexpanded(path) or "create it first")
    check_folder(folder if path.is_symlink() else path.parent)


def check_folder(folder: Path) -> None:
    """Raise UsageError if a folder for outputs, or a folder above it, is a file, and
    EnvironmentProblem if it cannot be written to, or created."""
    with permitted(folder):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir():
            raise UsageError(
                f"{existing} is a file",
                expected="a folder, which may be new",
                fix="choose another folder",
            )
        if not os.access(existing, os.W_OK):
            raise PermissionError


def has_mark(path: Path, marks: Sequence[bytes]) -> bool:
    """Return True if one of `marks` is near the beginning of a file."""
    with path.open("rb") as file:
        head = file.read(4096)
    return any(mark in head for mark in marks)


def check_replaceable(path: Path, marks: Sequence[bytes], what: str) -> None:
    """Raise UsageError if `path` is a file that g4spec did not write.

    Args:
        marks: bytes of which one is near the beginning of such a file; an empty file may be
            replaced, too.
        what: what the file should be, for the message.
    """
    if path.is_file() and path.stat().st_size and not has_mark(path, marks):
        raise UsageError(
            f"{path} exists and is not {what}", fix="choose another name, or remove it"
        )


@contextmanager
def atomic_write(path: Path, size: int) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` if the block succeeds and is deleted otherwise.

    The target of a link is replaced, not the link. The new file keeps the mode of the old one.

    Args:
        size: bytes that will be written; raises EnvironmentProblem if the disk has less room.
    """
    _check_place(path)
    path = path.resolve()
    temporary = _name(path)
    try:
        with ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                remove_stale(path)
                f = stack.enter_context(open(temporary, "xb", buffering=1 << 20))
                # Another process may have removed it before it was locked.
                while _lock(f.fileno()) is False or not temporary.exists():
                    temporary = _name(path)
                    f = stack.enter_context(open(temporary, "xb", buffering=1 << 20))
            except (FileNotFoundError, PermissionError) as e:  # also of root in /proc
                why = (e.strerror or str(e)).lower()
                raise EnvironmentProblem(
                    f"cannot create {path}: {why}", fix="choose another folder"
                ) from e
            _check_room(path.parent, size)
            if path.exists():
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            yield f
            f.flush()
            os.fsync(f.fileno())
            if fcntl is None:
                f.close()  # Windows renames no open file
            os.replace(temporary, path)  # still locked
        _sync(path.parent)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        if e.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EACCES,
            errno.EROFS,
            errno.EIO,
            errno.EFBIG,
        ):
            raise EnvironmentProblem(f"cannot write {path}: {e.strerror}") from e
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _check_room(folder: Path, size: int) -> None:
    """Raise EnvironmentProblem if the disk of a folder has less than `size` bytes of room."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise EnvironmentProblem(
            f"not enough room on the disk of {folder}",
            expected=f"{size:,} bytes",
            found=f"{free:,} bytes",
        )


def _sync(folder: Path) -> None:
    """Sync a rename to disk, where folders can be opened (not on Windows)."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_stale(path: Path) -> None:
    """Remove temporary files of `path` whose writers have ended."""
    if fcntl is None:
        return
    pattern, names = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp"), list[str]()
    with suppress(OSError):  # a folder that may be written but not listed
        names = os.listdir(path.parent)
    for name in names:
        if pattern.fullmatch(name):
            with suppress(OSError):  # owned by another user, or removed meanwhile
                _clear(path.parent / name)


def _clear(temporary: Path) -> None:
    handle = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode) and _lock(handle):
            temporary.unlink()
    finally:
        os.close(handle)


def _name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _lock(handle: int) -> bool | None:
    """Lock an open file until it is closed. Returns False if another process holds the lock, None
    if files cannot be locked here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
