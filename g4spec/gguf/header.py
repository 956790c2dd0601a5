"""Scan the header of a GGUF file: positions of its metadata, and its tensors.

Files are untrusted: every count, length and offset is checked against the file's size before use,
so a damaged or malicious file costs at most one scan of the file.
Source: ggml `docs/gguf.md`, `ggml/src/gguf.cpp`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from g4spec import quant
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import forks, other_formats, regular_files, string_arrays
from g4spec.gguf.values import ValueType

MAGIC = b"GGUF"
AGAIN = "download or convert it again"
MAX_DIMS = 4
MAX_NAME = 63
MAX_COUNT = 1 << 30
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16
NUMBERS: dict[ValueType, np.dtype[Any]] = {
    ValueType.U8: np.dtype("<u1"),
    ValueType.I8: np.dtype("<i1"),
    ValueType.U16: np.dtype("<u2"),
    ValueType.I16: np.dtype("<i2"),
    ValueType.U32: np.dtype("<u4"),
    ValueType.I32: np.dtype("<i4"),
    ValueType.F32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("<u1"),
    ValueType.U64: np.dtype("<u8"),
    ValueType.I64: np.dtype("<i8"),
    ValueType.F64: np.dtype("<f8"),
}


def pad(n: int, alignment: int) -> int:
    """Return `n` rounded up to a multiple of `alignment`."""
    return -(-n // alignment) * alignment


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        name: name in the file.
        shape: PyTorch order, the contiguous dimension last.
        type: ggml type number.
        offset: bytes from the start of the data section.
        nbytes: size in bytes.
        part: index of the part of a split model that holds it.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int
    part: int = 0

    @property
    def format(self) -> quant.Format:
        return quant.by_type(self.type, self.name)


@dataclass(frozen=True, slots=True)
class ValueLocation:
    """Type and position of a metadata value.

    Attributes:
        type: type of the value.
        item: type of the entries of an array; for other values `type`.
        count: number of entries of an array; for other values 1.
        start: byte position of the data.
    """

    type: ValueType
    item: ValueType
    count: int
    start: int


class Header:
    """The header of a mapped file.

    Attributes:
        version, alignment: values of the container.
        locations: metadata key -> type and position of its value, in file order.
        blocks: key -> blocks of an array of strings.
        tensors: name -> TensorInfo, in file order.
        data_start: byte position of the data section.

    Raises InputError if the file is malformed, Unsupported for big-endian files and version 1.
    """

    def __init__(self, path: Path, map: mmap.mmap, view: memoryview) -> None:
        self._path, self._map, self._view, self._size = path, map, view, len(view)
        self.locations: dict[str, ValueLocation] = {}
        self.blocks: dict[str, list[string_arrays.StringBlock]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._scan()

    def _bad(self, what: str, expected: object = None, found: object = None) -> InputError:
        return InputError(f"{self._path}: {what}", expected=expected, found=found, fix=AGAIN)

    def _take(self, code: str, at: int, what: str) -> tuple[Any, int]:
        """Unpack one number of struct format `code`; return it and the position after it."""
        size = struct.calcsize("<" + code)
        if at + size > self._size:
            raise self._bad(f"the file ends inside {what}, at byte {at}")
        return struct.unpack_from("<" + code, self._view, at)[0], at + size

    def string(self, at: int, what: str) -> tuple[str, int]:
        """Return the string at byte `at`, and the position after it. `what`: its name in errors."""
        length, at = self._take("Q", at, what)
        if length > self._size - at:
            raise self._bad(
                f"the file ends inside {what}, at byte {at}",
                f"{length} bytes more",
                self._size - at,
            )
        try:
            return str(self._view[at : at + length], "utf-8"), at + length
        except UnicodeDecodeError as e:
            raise self._bad(f"{what} is not UTF-8 ({e.reason})") from e

    def _scan(self) -> None:
        regular_files.refuse_lfs_pointer(self._path, bytes(self._view[:64]))
        if self._view[:4] != MAGIC:
            raise InputError(
                f"{self._path}: not a GGUF file",
                expected="magic GGUF",
                found=bytes(self._view[:4]),
                fix=other_formats.fix(self._path, bytes(self._view[: other_formats.BEGIN])),
            )
        self.version, at = self._take("I", 4, "the version")
        if self.version & 0xFFFF == 0 and self.version:
            raise Unsupported(
                f"{self._path}: a big-endian GGUF file", fix="convert it on a little-endian machine"
            )
        if self.version not in (2, 3):
            older = "download or convert the model again: llama.cpp does not read it either"
            newer = f"{AGAIN}; if it is of a later version, it needs a newer g4spec"
            raise Unsupported(
                f"{self._path}: GGUF version",
                expected="2 or 3",
                found=self.version,
                fix=older if self.version < 2 else newer,
            )
        n_tensors, at = self._take("q", at, "the tensor count")
        n_kv, at = self._take("q", at, "the metadata count")
        for what, count in (("metadata", n_kv), ("tensor", n_tensors)):
            if not 0 <= count <= MAX_COUNT:
                raise self._bad(f"impossible {what} count", f"0 to {MAX_COUNT}", count)
        least = at + n_kv * 13 + n_tensors * 24  # bytes of the smallest entry of either kind
        if least > self._size:
            expected = f"{least} bytes or more, for {n_kv} metadata keys and {n_tensors} tensors"
            raise self._bad("truncated, or its header is damaged", expected, self._size)
        for _ in range(n_kv):
            at = self._scan_kv(at)
        self.alignment = self._alignment()
        for _ in range(n_tensors):
            at = self._scan_tensor(at)
        self.data_start = pad(at, self.alignment)
        self._set_clashing_sizes()
        self._check_bounds()

    def _scan_kv(self, at: int) -> int:
        """Note the metadata entry at byte `at`; return the position after it."""
        key, at = self.string(at, f"metadata key {len(self.locations)}")
        if not key or key in self.locations:
            raise self._bad(f"metadata key {key!r} is {'empty' if not key else 'repeated'}")
        kind, at = self._kind(at, key)
        if kind is not ValueType.ARRAY:
            self.locations[key] = ValueLocation(kind, kind, 1, at)
            return self._skip(at, kind, 1, key)
        item, at = self._kind(at, key)
        if item is ValueType.ARRAY:
            raise self._bad(f"key {key!r}: an array of arrays is not allowed")
        count, at = self._take("Q", at, f"key {key!r}")
        if count > MAX_COUNT:
            raise self._bad(f"key {key!r}: array length", f"at most {MAX_COUNT}", count)
        self.locations[key] = ValueLocation(kind, item, count, at)
        return self._skip(at, item, count, key)

    def _kind(self, at: int, key: str) -> tuple[ValueType, int]:
        number, at = self._take("i", at, f"key {key!r}")
        try:
            return ValueType(number), at
        except ValueError:
            raise self._bad(f"key {key!r}: value type", "0 to 12", number) from None

    def _skip(self, at: int, item: ValueType, count: int, key: str) -> int:
        """Return the position after `count` values of type `item`."""
        least = 8 if item is ValueType.STRING else NUMBERS[item].itemsize
        if count > (self._size - at) // least:
            raise self._bad(f"the file ends inside key {key!r}", f"{count} entries")
        if item is not ValueType.STRING:
            return at + count * least
        self.blocks[key], at = string_arrays.scan(self._map, at, count)
        if at > self._size:
            raise self._bad(f"the file ends inside key {key!r}")
        return at

    def _alignment(self) -> int:
        location = self.locations.get("general.alignment")
        if location is None:
            return DEFAULT_ALIGNMENT
        expected = f"a power of two up to {MAX_ALIGNMENT}, of type U32"
        if location.type is not ValueType.U32:
            raise self._bad("general.alignment", expected, f"type {location.type.name}")
        value, _ = self._take("I", location.start, "general.alignment")
        if not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._bad("general.alignment", expected, value)
        return int(value)

    def _scan_tensor(self, at: int) -> int:
        """Note the tensor entry at byte `at`; return the position after it."""
        name, at = self.string(at, f"tensor name {len(self.tensors)}")
        if name in self.tensors:
            raise self._bad(f"tensor {name!r} is repeated")
        if len(name.encode()) > MAX_NAME:
            raise self._bad(f"tensor name {name[:80]!r}", f"at most {MAX_NAME} bytes")
        n_dims, at = self._take("I", at, f"tensor {name!r}")
        if n_dims > MAX_DIMS:
            raise self._bad(f"tensor {name!r}: dimensions", f"at most {MAX_DIMS}", n_dims)
        dims = []
        for _ in range(n_dims):
            n, at = self._take("q", at, f"tensor {name!r}")
            dims.append(n)
        number, at = self._take("i", at, f"tensor {name!r}")
        offset, at = self._take("Q", at, f"tensor {name!r}")
        shape = tuple(reversed(dims))
        if not quant.is_valid_shape(shape):
            raise self._bad(f"tensor {name!r}: impossible shape {shape}")
        where = f"{self._path}: tensor {name!r}"
        clashing = number >= quant.FIRST_CLASHING_TYPE  # size set later from all offsets
        nbytes = 0 if clashing else quant.by_type(number, where).nbytes(shape, where)
        if offset % self.alignment:
            raise self._bad(f"tensor {name!r}: offset", f"a multiple of {self.alignment}", offset)
        self.tensors[name] = TensorInfo(name, shape, number, offset, nbytes)
        return at

    def _set_clashing_sizes(self) -> None:
        """Set the sizes of tensors whose type number differs between forks of llama.cpp."""
        entries = [(t.name, t.shape, t.type, t.offset) for t in self.tensors.values()]
        data_size = self._size - self.data_start
        for name, nbytes in forks.tensor_sizes(
            entries, data_size, self.alignment, str(self._path)
        ).items():
            self.tensors[name] = replace(self.tensors[name], nbytes=nbytes)

    def _check_bounds(self) -> None:
        """Raise InputError if a tensor is beyond the end of the file or overlaps another: a small
        file could otherwise declare huge tensors."""
        data_size, end, before = self._size - self.data_start, 0, ""
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if info.offset + info.nbytes > data_size:
                raise self._bad(
                    f"tensor {name!r} reaches beyond the end of the file; it is "
                    "truncated or damaged",
                    f"{max(data_size, 0)} bytes of data at most",
                    info.offset + info.nbytes,
                )
            if info.offset < end and info.nbytes:
                raise self._bad(
                    f"tensor {name!r} overlaps {before!r}", f"offset {end} or more", info.offset
                )
            end, before = max(end, info.offset + info.nbytes), name
