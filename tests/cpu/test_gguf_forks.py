"""Type numbers from 41 on: forks are recognised by the size of the tensors, and refused by name."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from g4spec.errors import Unsupported
from g4spec.gguf import GGUF
from g4spec.gguf.forks import FORKS, IK_TYPES
from g4spec.quant.sizes import REMOVED
from tests.cpu.test_gguf_reader import file, tensor

WIDTH = 256


def write(path: Path, types: list[tuple[int, int, int]], tail: int = 0) -> Path:
    """Write a file of 64 x 256 tensors of (type number, values per block, bytes per block)."""
    entries, at = [], 0
    for i, (number, block, size) in enumerate(types):
        entries.append(tensor(b"t%d" % i, (WIDTH, 64), number, at))
        at += -(-64 * WIDTH // block * size // 32) * 32
    return file(path, tensors=tuple(entries), data=bytes(at + tail))


@pytest.mark.parametrize("number,block,size", [(41, 128, 18), (42, 64, 18)])
def test_upstreams_types_open(number: int, block: int, size: int, tmp_path: Path) -> None:
    with GGUF(write(tmp_path / "a.gguf", [(number, block, size), (0, 1, 4)])) as g:
        assert g.tensors["t0"].nbytes == 64 * WIDTH // block * size
        assert g.tensors["t0"].format.type == number


@pytest.mark.parametrize("fork,number", [(f, n) for f, table in FORKS.items() for n in table])
def test_forks_types_are_named(fork: str, number: int, tmp_path: Path) -> None:
    name, block, size = FORKS[fork][number]
    path = write(tmp_path / "a.gguf", [(number, block, size), (0, 1, 4)])
    if number == 41 and size == 18:
        GGUF(path).close()  # upstream's Q1_0 under another name
        return
    with pytest.raises(Unsupported, match=rf"type number {number}.*{name} of .*by its size"):
        GGUF(path)


@pytest.mark.parametrize("number", [98, 139, 144, 202, 230, 352, 399])
def test_types_of_ik_llama_cpp_are_named(number: int, tmp_path: Path) -> None:
    """Rows of some of them begin with a scale, so that their size is no multiple of a block's."""
    path = write(tmp_path / "a.gguf", [(41, 128, 18), (number, 32, 19), (0, 1, 4)])
    with pytest.raises(
        Unsupported, match=rf"'t1'.*number {number}.*found {IK_TYPES[number]} of ik"
    ):
        GGUF(path)


@pytest.mark.parametrize("number,name", REMOVED.items())
def test_types_that_upstream_removed_are_named(number: int, name: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=rf"'t0'.*number {number}\. Use a .* file.*{name}"):
        GGUF(write(tmp_path / "a.gguf", [(number, 32, 18)]))


def test_several_tensors_single_out_a_fork(tmp_path: Path) -> None:
    types = [(43, 128, 66), (44, 128, 34), (45, 128, 52)]
    with pytest.raises(Unsupported, match="found TURBO4_0 of beellama, by"):
        GGUF(write(tmp_path / "a.gguf", types))


def test_a_size_that_matches_no_type(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no known type"):
        GGUF(write(tmp_path / "a.gguf", [(42, 32, 20), (0, 1, 4)]))
    with pytest.raises(Unsupported, match="no known type"):
        GGUF(write(tmp_path / "b.gguf", [(100, 32, 20)]))


def test_impossible_offsets_do_not_crash(tmp_path: Path) -> None:
    entries = (tensor(b"a", (256,), 42, 1 << 62), tensor(b"b", (256,), 42, 0))
    with pytest.raises(Unsupported):
        GGUF(file(tmp_path / "a.gguf", tensors=entries, data=bytes(72)))
    raw = bytearray((tmp_path / "a.gguf").read_bytes())
    raw[24 + 8 + 1 + 4 : 24 + 8 + 1 + 12] = struct.pack("<q", 0)
    (tmp_path / "b.gguf").write_bytes(raw)
    with pytest.raises(Unsupported):
        GGUF(tmp_path / "b.gguf")
