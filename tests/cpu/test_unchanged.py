"""Changes of a file between two looks at it that count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from g4spec.convert.unchanged import UnchangedCheck
from g4spec.errors import InputError


def replace(path: Path, data: bytes) -> None:
    """Put another file with the same modification time in the place of `path`."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(data)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert path.stat().st_ino != before.st_ino


def test_only_another_file_is_a_change(tmp_path: Path) -> None:
    """Some network mounts give a file another inode each time they are asked."""
    path, data = tmp_path / "m.gguf", b"head" + bytes(200_000) + b"tail"
    path.write_bytes(data)
    check = UnchangedCheck(path)
    replace(path, data)
    check()
    for other in (b"HEAD" + data[4:], data[:-4] + b"TAIL"):
        replace(path, other)
        with pytest.raises(InputError, match=r"m\.gguf changed while it was read"):
            check()
    replace(path, data)
    check()
    os.utime(path, ns=(0, 0))
    with pytest.raises(InputError):
        check()
