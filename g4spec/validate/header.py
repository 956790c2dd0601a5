"""A tolerant reader of GGUF headers.

The strict reader stops at the first error. This one records what it can parse and where it had to
stop, so that the container rules can report all errors of a file. It reads no tensor data.

Source: ggml `docs/gguf.md` and `ggml/src/gguf.cpp`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from g4spec import quant
from g4spec.convert import sources
from g4spec.errors import InputError
from g4spec.gguf import ValueType, folder_hint

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 24  # strings per array: 64 times Gemma's vocabulary
MAX_NAME = 64  # ggml's limit, terminating zero included

_SCALARS = {
    ValueType.U8: "<B",
    ValueType.I8: "<b",
    ValueType.U16: "<H",
    ValueType.I16: "<h",
    ValueType.U32: "<I",
    ValueType.I32: "<i",
    ValueType.F32: "<f",
    ValueType.BOOL: "<?",
    ValueType.U64: "<Q",
    ValueType.I64: "<q",
    ValueType.F64: "<d",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One metadata key: its type, for arrays the item type and length, for scalars the value."""

    name: str
    type: ValueType
    item: ValueType | None = None
    count: int = 0
    value: object = None


@dataclass(frozen=True)
class Tensor:
    """One tensor entry as written; `shape` in PyTorch order, `offset` into the data section.
    Properties are computed once: every rule asks for them."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int

    @cached_property
    def format(self) -> quant.Format | None:
        """None when ggml has no such type."""
        return quant.find_type(self.type)

    @cached_property
    def type_name(self) -> str:
        return self.format.name.upper() if self.format is not None else f"type {self.type}"

    @cached_property
    def nbytes(self) -> int | None:
        """Bytes of data, or None when the type is unknown or the row does not divide."""
        row = self.shape[-1] if self.shape else 1
        if self.format is None or row % self.format.block:
            return None
        return self.format.nbytes(self.shape)


@dataclass(slots=True)
class Header:
    """A parsed header. `broken` says where and why parsing stopped; None if it is complete."""

    size: int
    magic: bytes = b""
    version: int = 0
    n_tensors: int = 0
    n_keys: int = 0
    keys: list[Key] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    end: int = 0
    broken: str | None = None
    _by_name: dict[str, Key] = field(default_factory=dict)

    def add(self, key: Key) -> None:
        """Add a key; lookups find the first of several with one name."""
        self.keys.append(key)
        self._by_name.setdefault(key.name, key)

    def key(self, name: str) -> Key | None:
        return self._by_name.get(name)

    def text(self, name: str) -> str | None:
        key = self.key(name)
        return key.value if key is not None and isinstance(key.value, str) else None

    def number(self, name: str, default: int) -> int:
        key = self.key(name)
        return key.value if key is not None and isinstance(key.value, int) else default

    @property
    def alignment(self) -> int:
        return self.number("general.alignment", 32)

    @property
    def data_start(self) -> int:
        return self.pad(self.end)

    def pad(self, n: int) -> int:
        """Return `n` rounded up to the alignment; unchanged if the alignment is not positive."""
        a = self.alignment
        return -(-n // a) * a if a > 0 else n


class _Broken(Exception):
    """The file ends early or has an invalid value."""


def _folder_error(folder: Path) -> InputError:
    """Return the error for a folder given as a file, with the command that converts it."""
    fix = folder_hint(folder)
    if fix is None and (command := sources.conversion_command(folder)) is not None:
        fix = f"convert it first: {command}"
    found = "a folder" if fix else "a folder with neither a GGUF file nor a checkpoint"
    return InputError(str(folder), expected="a GGUF file", found=found, fix=fix)


def read(path: Path) -> Header:
    """Parse the header of `path`. Raise InputError only if the file cannot be read at all."""
    if path.is_dir():
        raise _folder_error(path)
    if path.exists() and not path.is_file():
        raise InputError(f"{path} cannot be read: a device or pipe", expected="a GGUF file")
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if not size:
                return Header(0, broken="the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = Header(size)
                _Parser(data, header).run()
                return header
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


class _Parser:
    def __init__(self, data: mmap.mmap, header: Header) -> None:
        self.data, self.h, self.at, self.what = data, header, 0, "magic"

    def run(self) -> None:
        h = self.h
        try:
            h.magic = self.bytes(4)
            if h.magic != b"GGUF":
                raise _Broken("the magic is wrong")
            self.what = "version"
            h.version = int(self.scalar("<I"))
            self.what = "counts"
            h.n_tensors, h.n_keys = int(self.scalar("<q")), int(self.scalar("<q"))
            if not (0 <= h.n_tensors <= MAX_TENSORS and 0 <= h.n_keys <= MAX_KEYS):
                raise _Broken(f"{h.n_tensors} tensors and {h.n_keys} keys: too many")
            for i in range(h.n_keys):
                self.what = f"metadata key {i}"
                h.add(self.key())
            for i in range(h.n_tensors):
                self.what = f"tensor entry {i}"
                h.tensors.append(self.tensor())
        except _Broken as error:
            h.broken = f"{self.what}, byte {self.at}: {error}"
        h.end = self.at

    def bytes(self, n: int) -> bytes:
        self.skip(n)
        return self.data[self.at - n : self.at]

    def scalar(self, form: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(form, self.bytes(struct.calcsize(form)))[0]
        return value

    def string(self) -> str:
        try:
            return self.bytes(int(self.scalar("<Q"))).decode()
        except UnicodeDecodeError as error:
            raise _Broken("the text is not UTF-8") from error

    def type(self) -> ValueType:
        number = int(self.scalar("<i"))
        if number not in set(ValueType):
            raise _Broken(f"value type {number} does not exist")
        return ValueType(number)

    def key(self) -> Key:
        name = self.string()
        self.what = f"metadata key {name!r:.80}"
        kind = self.type()
        if kind is ValueType.STRING:
            return Key(name, kind, value=self.string())
        if kind is not ValueType.ARRAY:
            return Key(name, kind, value=self.scalar(_SCALARS[kind]))
        item, count = self.type(), int(self.scalar("<Q"))
        if item is ValueType.ARRAY:
            raise _Broken("arrays of arrays are not allowed")
        if item is ValueType.STRING:
            self.skip_strings(count)
        else:
            self.skip(count * struct.calcsize(_SCALARS[item]))
        return Key(name, kind, item, count)

    def skip(self, n: int) -> None:
        if n > self.h.size - self.at:
            raise _Broken("the file ends here")
        self.at += n

    def skip_strings(self, count: int) -> None:
        if count > MAX_STRINGS:
            raise _Broken(f"an array of {count} strings: too many")
        length, data, at, size = struct.Struct("<Q").unpack_from, self.data, self.at, self.h.size
        for _ in range(count):
            if at + 8 > size:
                raise _Broken("the file ends here")
            at += 8 + length(data, at)[0]
        self.skip(at - self.at)

    def tensor(self) -> Tensor:
        name = self.string()
        self.what = f"tensor entry {name!r:.80}"
        n_dims = int(self.scalar("<I"))
        if n_dims > 4:
            raise _Broken(f"{n_dims} dimensions, at most 4 are allowed")
        shape = tuple(int(self.scalar("<q")) for _ in range(n_dims))[::-1]
        return Tensor(name, shape, int(self.scalar("<i")), int(self.scalar("<Q")))
