"""Read GGUF files by memory mapping. Opening scans the header once; everything else is lazy.

Files are untrusted: every count, length and offset is checked against the file's size before use,
so a damaged or malicious file costs at most one scan of the file.
Source: ggml `docs/gguf.md`, `ggml/src/gguf.cpp`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec import quant
from g4spec.errors import EnvironmentProblem, InputError, Unsupported
from g4spec.gguf import forks, parts, regular_files, string_arrays
from g4spec.gguf.values import Value, ValueType

MAGIC = b"GGUF"
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
_U64 = struct.Struct("<Q")


def pad(n: int, alignment: int) -> int:
    """Return `n` rounded up to a multiple of `alignment`."""
    return -(-n // alignment) * alignment


def is_gguf(path: Path) -> bool:
    """True if a file begins with the magic number of GGUF."""
    with path.open("rb") as f:
        return f.read(len(MAGIC)) == MAGIC


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
class _ValueLocation:
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


class GGUF(Mapping[str, Any]):
    """An open GGUF file, and a mapping from metadata keys to plain Python values.

    Args:
        path: the file, or the first part of a split model.
        join_parts: open the other parts of a split model too.

    Attributes:
        parts: the files of a split model, this one first.
        size: size of this file in bytes.
        version, alignment: values of the container.
        kv: the metadata (the object itself).
        tensors: name -> TensorInfo, in file order.
        data_start: byte position of the data section.

    Raises InputError if the file is malformed, Unsupported for big-endian files and version 1.
    """

    def __init__(self, path: str | Path, *, join_parts: bool = True) -> None:
        self.path, self.parts = Path(path), [self]
        self._cache: dict[str, Any] = {}
        self._locations: dict[str, _ValueLocation] = {}
        self._blocks: dict[str, list[string_arrays.StringBlock]] = {}  # of string arrays
        self.tensors: dict[str, TensorInfo] = {}
        self._open()
        try:
            self._header()
            if join_parts:
                parts.join(self)
                self._locations = {k: v for k, v in self._locations.items() if k not in parts.KEYS}
                self._cache.clear()
        except BaseException:
            self.close()
            raise

    # ---- metadata

    @property
    def kv(self) -> Mapping[str, Any]:
        return self

    def __getitem__(self, key: str) -> Any:
        if key not in self._cache:
            self._cache[key] = self._read(key)
        return self._cache[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, key: object) -> bool:
        return key in self._locations

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def value(self, key: str) -> Value:
        """Return a value with its exact type; arrays of numbers as numpy arrays."""
        location = self._locations[key]
        if location.type is not ValueType.ARRAY:
            return Value(location.type, self[key])
        data = self[key] if location.item is ValueType.STRING else self.number_array(key)
        return Value(ValueType.ARRAY, data, location.item)

    def value_type(self, key: str) -> ValueType:
        """Return the type of a value, or of the entries of an array."""
        return self._locations[key].item

    def array_type(self, key: str) -> ValueType | None:
        """Return the type of an array's entries; None for other values and missing keys."""
        location = self._locations.get(key)
        return location.item if location and location.type is ValueType.ARRAY else None

    def length(self, key: str) -> int:
        """Return the number of entries of an array without reading it."""
        return self._locations[key].count

    def number_array(self, key: str) -> NDArray[Any]:
        """Return an array of numbers as a numpy array, copied from the file."""
        location = self._locations[key]
        if location.type is not ValueType.ARRAY or location.item is ValueType.STRING:
            raise InputError(f"{self.path}: key {key!r} must be an array of numbers")
        numbers = np.frombuffer(self._map, NUMBERS[location.item], location.count, location.start)
        return numbers.astype(bool) if location.item is ValueType.BOOL else numbers.copy()

    def _read(self, key: str) -> Any:
        location = self._locations[key]
        if location.type is ValueType.ARRAY:
            if location.item is ValueType.STRING:
                return list(chain.from_iterable(self.string_blocks(key)))
            return self.number_array(key).tolist()
        if location.type is ValueType.STRING:
            return self._string(location.start, f"key {key!r}")[0]
        number = np.frombuffer(self._map, NUMBERS[location.type], 1, location.start)[0]
        return bool(number) if location.type is ValueType.BOOL else number.item()

    def first_entries(self, key: str, n: int) -> list[Any]:
        """Return the first `n` entries of an array without reading the rest."""
        location = self._locations[key]
        if location.item is ValueType.STRING:
            return self._strings(key, location.start, min(n, location.count))
        return list(self.number_array(key)[:n].tolist())

    def string_blocks(self, key: str) -> Iterator[list[str]]:
        """Yield the strings of an array in lists of some thousands: all may take 100 MB."""
        first = 0
        for at, end, count in self._blocks[key]:
            raw = np.frombuffer(self._map, np.uint8, end - at, at)
            yield string_arrays.split(raw, count) or self._strings(key, at, count, first)
            first += count

    def _strings(self, key: str, at: int, count: int, first: int = 0) -> list[str]:
        """Read `count` strings one by one, starting at byte `at`.

        Args:
            first: index of the first string in its array, for errors.
        """
        view, out = self._view, list[str]()
        try:
            for _ in range(count):
                end = at + 8 + _U64.unpack_from(view, at)[0]
                out.append(str(view[at + 8 : end], "utf-8"))
                at = end
        except UnicodeDecodeError as e:
            raise self._bad(f"key {key!r}, entry {first + len(out)}: not UTF-8 ({e.reason})") from e
        return out

    # ---- tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of all tensors, PyTorch order."""
        return {name: info.shape for name, info in self.tensors.items()}

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, mapped read-only. Valid while the file is open."""
        info = self.tensors[name]
        file = self.parts[info.part]
        return np.frombuffer(file._map, np.uint8, info.nbytes, file.data_start + info.offset)

    def array(self, name: str) -> NDArray[Any]:
        """Decode a tensor to float32; integers and F64 keep their type. Raises Unsupported if the
        type has no dequantizer."""
        info = self.tensors[name]
        try:
            return info.format.array(self.raw(name), info.shape)
        except Unsupported as e:
            raise Unsupported(f"{self.path}: tensor {name}: {e}") from e

    # ---- opening

    def _open(self) -> None:
        try:
            with regular_files.open_regular(self.path) as f:
                self.size = f.seek(0, 2)
                if self.size < 24:
                    f.seek(0)
                    if (magic := f.read(4)) != MAGIC[: len(magic)] or not magic:
                        raise self._bad("not a GGUF file", "magic GGUF", magic or "no data")
                    raise self._bad("too short for a GGUF file", "24 bytes or more", self.size)
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise InputError(f"{self.path}: no such file") from None
        except IsADirectoryError:
            fix = parts.folder_hint(self.path)
            fix = fix or "convert a checkpoint with `g4spec convert FOLDER -o NAME.gguf`"
            raise InputError(f"{self.path}: a folder", expected="a GGUF file", fix=fix) from None
        except PermissionError as e:
            raise InputError(f"{self.path}: {e.strerror}", fix="check its permissions") from e
        except OSError as e:
            raise EnvironmentProblem(f"{self.path}: {e.strerror}") from e
        self._view = memoryview(self._map)

    def close(self) -> None:
        """Unmap the file, unless arrays made by `raw` or `array` still use it."""
        for part in self.parts[1:]:
            part.close()
        self._view.release()
        with suppress(BufferError):  # unmapped when the last array is freed
            self._map.close()

    def __enter__(self) -> GGUF:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _bad(self, what: str, expected: object = None, found: object = None) -> InputError:
        return InputError(f"{self.path}: {what}", expected=expected, found=found)

    def _take(self, code: str, at: int, what: str) -> tuple[Any, int]:
        """Unpack one number of struct format `code`; return it and the position after it."""
        size = struct.calcsize("<" + code)
        if at + size > self.size:
            raise self._bad(f"the file ends inside {what}, at byte {at}")
        return struct.unpack_from("<" + code, self._view, at)[0], at + size

    def _string(self, at: int, what: str) -> tuple[str, int]:
        length, at = self._take("Q", at, what)
        if length > self.size - at:
            raise self._bad(
                f"the file ends inside {what}, at byte {at}", f"{length} bytes more", self.size - at
            )
        try:
            return str(self._view[at : at + length], "utf-8"), at + length
        except UnicodeDecodeError as e:
            raise self._bad(f"{what} is not UTF-8 ({e.reason})") from e

    def _header(self) -> None:
        regular_files.refuse_lfs_pointer(self.path, bytes(self._view[:64]))
        if self._view[:4] != MAGIC:
            raise self._bad("not a GGUF file", "magic GGUF", bytes(self._view[:4]))
        self.version, at = self._take("I", 4, "the version")
        if self.version & 0xFFFF == 0 and self.version:
            raise Unsupported(
                f"{self.path}: a big-endian GGUF file", fix="convert it on a little-endian machine"
            )
        if self.version not in (2, 3):
            raise Unsupported(f"{self.path}: GGUF version", expected="2 or 3", found=self.version)
        n_tensors, at = self._take("q", at, "the tensor count")
        n_kv, at = self._take("q", at, "the metadata count")
        for what, count in (("metadata", n_kv), ("tensor", n_tensors)):
            if not 0 <= count <= MAX_COUNT:
                raise self._bad(f"impossible {what} count", f"0 to {MAX_COUNT}", count)
        least = at + n_kv * 13 + n_tensors * 24  # bytes of the smallest entry of either kind
        if least > self.size:
            expected = f"{least} bytes or more, for {n_kv} metadata keys and {n_tensors} tensors"
            raise self._bad("truncated, or its header is damaged", expected, self.size)
        for _ in range(n_kv):
            at = self._scan_kv(at)
        self.alignment = self._alignment()
        for _ in range(n_tensors):
            at = self._scan_tensor(at)
        self.data_start = pad(at, self.alignment)
        self._set_clashing_sizes()
        self._check_bounds()

    def _scan_kv(self, at: int) -> int:
        key, at = self._string(at, f"metadata key {len(self._locations)}")
        if not key or key in self._locations:
            raise self._bad(f"metadata key {key!r} is {'empty' if not key else 'repeated'}")
        kind, at = self._kind(at, key)
        if kind is not ValueType.ARRAY:
            self._locations[key] = _ValueLocation(kind, kind, 1, at)
            return self._skip(at, kind, 1, key)
        item, at = self._kind(at, key)
        if item is ValueType.ARRAY:
            raise self._bad(f"key {key!r}: an array of arrays is not allowed")
        count, at = self._take("Q", at, f"key {key!r}")
        if count > MAX_COUNT:
            raise self._bad(f"key {key!r}: array length", f"at most {MAX_COUNT}", count)
        self._locations[key] = _ValueLocation(kind, item, count, at)
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
        if count > (self.size - at) // least:
            raise self._bad(f"the file ends inside key {key!r}", f"{count} entries")
        if item is not ValueType.STRING:
            return at + count * least
        self._blocks[key], at = string_arrays.scan(self._map, at, count)
        if at > self.size:
            raise self._bad(f"the file ends inside key {key!r}")
        return at

    def _alignment(self) -> int:
        location = self._locations.get("general.alignment")
        if location is None:
            return DEFAULT_ALIGNMENT
        value = self["general.alignment"]
        if (
            location.type is not ValueType.U32
            or not 0 < value <= MAX_ALIGNMENT
            or value & (value - 1)
        ):
            expected = f"a power of two up to {MAX_ALIGNMENT}, of type U32"
            raise self._bad("general.alignment", expected, value)
        return int(value)

    def _scan_tensor(self, at: int) -> int:
        name, at = self._string(at, f"tensor name {len(self.tensors)}")
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
        where = f"{self.path}: tensor {name!r}"
        clashing = number >= quant.FIRST_CLASHING_TYPE  # size set later from all offsets
        nbytes = 0 if clashing else quant.by_type(number, where).nbytes(shape, where)
        if offset % self.alignment:
            raise self._bad(f"tensor {name!r}: offset", f"a multiple of {self.alignment}", offset)
        self.tensors[name] = TensorInfo(name, shape, number, offset, nbytes)
        return at

    def _set_clashing_sizes(self) -> None:
        """Set the sizes of tensors whose type number differs between forks of llama.cpp."""
        entries = [(t.name, t.shape, t.type, t.offset) for t in self.tensors.values()]
        data_size = self.size - self.data_start
        for name, nbytes in forks.tensor_sizes(
            entries, data_size, self.alignment, str(self.path)
        ).items():
            self.tensors[name] = replace(self.tensors[name], nbytes=nbytes)

    def _check_bounds(self) -> None:
        """Raise InputError if a tensor is beyond the end of the file or overlaps another: a small
        file could otherwise declare huge tensors."""
        data_size, end, before = self.size - self.data_start, 0, ""
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
