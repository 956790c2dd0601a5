"""Read GGUF files by memory mapping. Opening scans the header once; everything else is lazy."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec.errors import EnvironmentProblem, InputError, Unsupported
from g4spec.gguf import fused, parts, regular_files, string_arrays
from g4spec.gguf.header import AGAIN, MAGIC, NUMBERS, Header
from g4spec.gguf.values import Value, ValueType

_U64 = struct.Struct("<Q")


def is_gguf(path: Path) -> bool:
    """True if a file begins with the magic number of GGUF."""
    with path.open("rb") as f:
        return f.read(len(MAGIC)) == MAGIC


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
        tensors: name -> TensorInfo, in file order; of a target with queries, keys and values in one
            tensor (`fused.py`) each of them.
        data_start: byte position of the data section.

    Raises InputError if the file is malformed, Unsupported for big-endian files and version 1.
    """

    def __init__(self, path: str | Path, *, join_parts: bool = True) -> None:
        self.path, self.parts = Path(path), [self]
        self._cache: dict[str, Any] = {}
        self._open()
        try:
            self._header = Header(self.path, self._map, self._view)
            self.version, self.alignment = self._header.version, self._header.alignment
            self.tensors, self.data_start = self._header.tensors, self._header.data_start
            self._locations = self._header.locations
            if join_parts:
                parts.join(self)
                if self.get("general.architecture") == "gemma4":
                    self.tensors = fused.separate(self.tensors)
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
            return self._header.string(location.start, f"key {key!r}")[0]
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
        for at, end, count in self._header.blocks[key]:
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
            raise InputError(
                f"{self.path}: key {key!r}, entry {first + len(out)}: not UTF-8 ({e.reason})"
            ) from e
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
                        raise InputError(
                            f"{self.path}: not a GGUF file",
                            expected="magic GGUF",
                            found=magic or "no data",
                            fix=AGAIN,
                        )
                    raise InputError(
                        f"{self.path}: too short for a GGUF file",
                        expected="24 bytes or more",
                        found=self.size,
                        fix=AGAIN,
                    )
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
