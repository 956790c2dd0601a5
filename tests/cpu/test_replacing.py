"""A file is replaced completely or not at all, and files of killed runs are removed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from g4spec.convert import convert
from g4spec.gguf import atomic, write
from tests.support import tiny

KILLED = (
    "import os, signal, sys\n"
    "from pathlib import Path\n"
    "import numpy as np\n"
    "from g4spec.gguf import TensorData, write\n"
    "def chunks():\n"
    "    yield np.ones((100, 100), np.float32)\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
    "write(Path(sys.argv[1]), {}, [TensorData('a', (300, 100), 0, chunks())])\n"
)


def test_files_of_a_killed_run_are_removed_by_the_next(tmp_path: Path) -> None:
    target, out = tiny.target(tmp_path / "t"), tmp_path / "out" / "o.gguf"
    out.parent.mkdir()
    for name in (out, out.with_name("other.gguf")):
        done = subprocess.run([sys.executable, "-c", KILLED, str(name)], check=False, timeout=60)
        assert done.returncode == -signal.SIGKILL
    left = sorted(out.parent.iterdir())
    assert [p.name.split(".")[1] for p in left] == ["o", "other"]
    convert(target, out)
    assert sorted(out.parent.iterdir()) == [left[1], out], "another output is left alone"


def test_the_file_of_a_running_writer_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    with atomic.atomic_write(out, 9) as first:
        first.write(b"first")
        with atomic.atomic_write(out, 9) as second:
            second.write(b"second")
        assert out.read_bytes() == b"second" and len(list(tmp_path.iterdir())) == 2
    assert out.read_bytes() == b"first" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("cleared", [True, False])
def test_another_run_finds_the_file_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleared: bool
) -> None:
    """The other run has removed the file, or has locked it and is going to remove it."""
    out, lock, met = tmp_path / "o.gguf", atomic._lock, list[int]()

    def late(handle: int) -> bool | None:
        met.append(handle)
        if len(met) > 1:
            return lock(handle)
        atomic.remove_stale(out)
        return lock(handle) if cleared else False

    monkeypatch.setattr(atomic, "_lock", late)
    with atomic.atomic_write(out, 9) as f:
        f.write(b"whole")
    assert len(met) > 2 and out.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [out]


def test_files_that_resemble_temporary_files_are_kept(tmp_path: Path) -> None:
    out, keep = tmp_path / "o.gguf", tmp_path / "keep"
    keep.write_text("x")
    os.mkfifo(tmp_path / ".o.gguf.00000001.tmp")
    (tmp_path / ".o.gguf.00000002.tmp").symlink_to(keep)
    (tmp_path / ".o.gguf.00000003.tmp").mkdir()
    for name in (
        ".o.gguf.0000000g.tmp",
        ".o.gguf.tmp",
        "o.gguf.00000004.tmp",
        ".oxgguf.00000005.tmp",
    ):
        (tmp_path / name).write_text("x")
    before = set(tmp_path.iterdir())
    write(out, {}, [])
    assert set(tmp_path.iterdir()) == before | {out} and keep.read_text() == "x"


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is still written, and no file is taken for a leftover."""

    def refuse(handle: int, what: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    left = tmp_path / ".o.gguf.00000001.tmp"
    left.touch()
    write(tmp_path / "o.gguf", {}, [])
    assert left.exists() and (tmp_path / "o.gguf").stat().st_size


def test_file_and_folder_are_on_disk_before_a_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is synced before it is renamed, the folder afterwards: a power loss keeps one of the
    two files."""
    out, done, names = tmp_path / "o.gguf", list[str](), {tmp_path.stat().st_ino: "folder"}
    sync, rename = os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append(names.get(os.fstat(handle).st_ino, "file"))
        sync(handle)

    def renamed(source: Path, target: Path) -> None:
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(atomic.os, "fsync", synced)
    monkeypatch.setattr(atomic.os, "replace", renamed)
    with atomic.atomic_write(out, 3) as f:
        f.write(b"new")
    assert done == ["file", "rename", "folder"] and out.read_bytes() == b"new"
