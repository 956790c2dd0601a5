"""A written file is complete, or does not exist."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4spec.errors import EnvironmentProblem, InputError
from g4spec.gguf import (
    GGUF,
    TensorData,
    Value,
    ValueType,
    array,
    check_writable,
    f32,
    is_gguf,
    string,
    u32,
    write,
)

ROW = np.ones(8, np.float32)


def chunks(n: int, fail_at: int | None = None, error: BaseException | None = None) -> Iterator[Any]:
    for i in range(n):
        if i == fail_at and error is not None:
            raise error
        yield ROW


def data(n: int = 4, **kw: Any) -> list[TensorData]:
    return [TensorData("t", (n, 8), 0, chunks(n, **kw))]


@pytest.mark.parametrize("old", [None, b"older file"])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("error", [KeyboardInterrupt(), InputError("bad"), ValueError("bug")])
def test_a_failure_at_any_chunk_leaves_nothing(
    tmp_path: Path, old: bytes | None, at: int, error: BaseException
) -> None:
    out = tmp_path / "a.gguf"
    if old:
        out.write_bytes(old)
    with pytest.raises(type(error)):
        write(out, {}, data(fail_at=at, error=error))
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([old] if old else [])


def test_a_full_disk_is_the_machines_problem(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(EnvironmentProblem, match="No space"):
        write(tmp_path / "a.gguf", {}, data(fail_at=2, error=full))
    assert not list(tmp_path.iterdir())


def test_a_failing_rename_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(a: object, b: object) -> None:
        raise OSError(errno.EACCES, "denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(EnvironmentProblem):
        write(tmp_path / "a.gguf", {}, data())
    assert not list(tmp_path.iterdir())


def test_too_large_for_the_disk_is_said_before_writing(tmp_path: Path) -> None:
    huge = TensorData("t", (1 << 40, 8), 0, chunks(1, 0, AssertionError("was written")))
    with pytest.raises(EnvironmentProblem, match="not enough room"):
        write(tmp_path / "a.gguf", {}, [huge])


def test_overwrites_in_one_step_and_reports_progress(tmp_path: Path) -> None:
    out = tmp_path / "a.gguf"
    out.write_bytes(b"old")
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        assert out.read_bytes() == b"old"
        seen.append((done, total))

    size = write(out, {"k": u32(1)}, data(), progress)
    assert size == out.stat().st_size and len(seen) == 4 and seen[-1][0] <= size
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    with GGUF(out) as g:
        assert np.array_equal(g.array("t"), np.ones((4, 8)))


def test_offsets_are_the_running_padded_sum(tmp_path: Path) -> None:
    tensors = [TensorData(f"t{n}", (n,), 0, [np.full(n, n, np.float32)]) for n in (1, 9, 8, 3)]
    write(tmp_path / "a.gguf", {}, tensors)
    with GGUF(tmp_path / "a.gguf") as g:
        assert [t.offset for t in g.tensors.values()] == [0, 32, 96, 128]
        assert all((g.array(f"t{n}") == n).all() for n in (1, 9, 8, 3))


def test_a_wrong_number_of_bytes_is_our_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="t: "):
        write(tmp_path / "a.gguf", {}, [TensorData("t", (4, 8), 0, chunks(3))])
    assert not list(tmp_path.iterdir())


MISFITS = [
    u32(-1),
    u32(2**32),
    Value(ValueType.I8, 128),
    array(ValueType.I32, [2**31]),
    array(ValueType.U32, [-1]),
    array(ValueType.I32, np.array([1 << 40])),
]


@pytest.mark.parametrize("value", MISFITS)
def test_values_that_do_not_fit_are_named(tmp_path: Path, value: Value) -> None:
    with pytest.raises(InputError, match=r"some\.key"):
        write(tmp_path / "a.gguf", {"some.key": value}, [])


def test_names_and_places_that_cannot_be_written(tmp_path: Path) -> None:
    for name, shape in (("n" * 64, (1,)), ("n", (1,) * 5)):
        with pytest.raises(InputError, match="cannot be written"):
            write(tmp_path / "a.gguf", {}, [TensorData(name, shape, 0, [np.ones(1, np.float32)])])
    with pytest.raises(InputError, match="cannot be written"):
        write(tmp_path / "a.gguf", {}, [TensorData("n", (1,), 0, [])] * 2)
    with pytest.raises(InputError, match="is a folder"):
        write(tmp_path, {}, [])
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "absent" / "a.gguf")
    with pytest.raises(InputError, match="no such folder"):
        write(link, {"a": f32(1), "b": string("x")}, [])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_place_where_nobody_can_create_a_file() -> None:
    """It said that there is not enough room."""
    with pytest.raises(EnvironmentProblem, match=r"cannot (create|write) /proc"):
        write(Path("/proc/a.gguf"), {"a": f32(1)}, [])


def test_new_folders_are_created(tmp_path: Path) -> None:
    """Only bench and recipe created them."""
    path = tmp_path / "new" / "folder" / "a.gguf"
    check_writable(path)
    assert not path.parent.exists()
    write(path, {"a": f32(1)}, [])
    assert is_gguf(path)
