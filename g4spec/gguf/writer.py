"""Writes GGUF files: streaming, and atomically (`g4spec.gguf.replacing`)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from g4spec import quant
from g4spec.errors import InputError
from g4spec.gguf.reader import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, MAX_NAME, NUMBERS, pad
from g4spec.gguf.replacing import replacing
from g4spec.gguf.values import KV, T, Value

VERSION = 3
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_CODES = {T.U8: "B", T.I8: "b", T.U16: "H", T.I16: "h", T.U32: "I", T.I32: "i", T.F32: "f",
          T.BOOL: "?", T.U64: "Q", T.I64: "q", T.F64: "d"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor to be written.

    Attributes:
        shape: PyTorch order. `type`: ggml type number.
        chunks: its bytes, in order, as buffers of any size; consumed once.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    chunks: Iterable[Any]

    @property
    def nbytes(self) -> int:
        return quant.by_type(self.type, self.name).nbytes(self.shape, self.name)


def write(path: str | Path, kv: KV, tensors: Iterable[TensorData],
          progress: Progress | None = None,
          check: Callable[[], None] | None = None) -> int:  # fmt: skip
    """Write a file; returns its size in bytes. An existing file is replaced at the end, unless
    `check` raises: it is called when all is written.

    Raises:
        InputError: a value or name that the format cannot hold, or a path that cannot be a file.
        EnvironmentProblem: the disk is full, or not writable.
    """
    path, tensors = Path(path), list(tensors)
    align = int(kv["general.alignment"].data) if "general.alignment" in kv else DEFAULT_ALIGNMENT
    head = header(kv, tensors, align)
    total = len(head) + sum(pad(t.nbytes, align) for t in tensors)
    with replacing(path, total) as f:
        f.write(head)
        done = len(head)
        for tensor in tensors:
            size = 0
            for chunk in tensor.chunks:
                f.write(chunk)
                size += memoryview(chunk).nbytes
                if progress:
                    progress(done + size, total)
            assert size == tensor.nbytes, f"{tensor.name}: {size} bytes, not {tensor.nbytes}"
            f.write(bytes(pad(size, align) - size))
            done += pad(size, align)
        if check:
            check()
    return total


def header(kv: KV, tensors: list[TensorData], align: int) -> bytes:
    """Everything before the data section, padded to it."""
    parts = [MAGIC, struct.pack("<Iqq", VERSION, len(tensors), len(kv))]
    for key, value in kv.items():
        parts += [_string(key), _value(key, value)]
    offset, seen = 0, set()
    for t in tensors:
        name = t.name.encode()
        if len(name) > MAX_NAME or len(t.shape) > MAX_DIMS or t.name in seen:
            raise InputError(f"tensor {t.name!r} of shape {t.shape} cannot be written",
                             expected=f"a new name of at most {MAX_NAME} bytes and at most "
                                      f"{MAX_DIMS} dimensions")  # fmt: skip
        seen.add(t.name)
        dims = struct.pack(f"<I{len(t.shape)}q", len(t.shape), *reversed(t.shape))
        parts += [_string(t.name), dims, struct.pack("<iQ", t.type, offset)]
        offset += pad(t.nbytes, align)
    head = b"".join(parts)
    return head + bytes(pad(len(head), align) - len(head))


def _string(text: str) -> bytes:
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InputError(f"{text!r:.80} cannot be written: not valid Unicode") from e
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Value) -> bytes:
    try:
        if value.type is T.ARRAY:
            assert value.item is not None and value.item is not T.ARRAY, key
            start = struct.pack("<iiQ", T.ARRAY, value.item, len(value.data))
            return start + _items(value.item, value.data)
        kind = struct.pack("<i", value.type)
        if value.type is T.STRING:
            return kind + _string(value.data)
        return kind + struct.pack("<" + _CODES[value.type], value.data)
    except (struct.error, OverflowError) as e:
        found = f"{value.data!r:.60}"
        raise InputError(f"metadata {key}", expected=value.type.name, found=found) from e


def _items(item: T, data: Any) -> bytes:
    if item is T.STRING:
        return b"".join(map(_string, data))
    given = np.asarray(data)
    packed = given.astype(NUMBERS[item])
    if NUMBERS[item].kind in "iu" and not np.array_equal(given, packed):
        raise OverflowError(f"does not fit {item.name}")
    return packed.tobytes()
