"""Write GGUF files: streaming, atomically (`g4spec.gguf.atomic`), optionally split into parts."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from g4spec import quant
from g4spec.errors import InputError
from g4spec.gguf import parts
from g4spec.gguf.atomic import atomic_write
from g4spec.gguf.header import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, MAX_NAME, NUMBERS, pad
from g4spec.gguf.values import KV, Value, ValueType

VERSION = 3
Progress = Callable[[int, int], None]
"""Callback that receives bytes written and total bytes."""

_CODES = {
    ValueType.U8: "B",
    ValueType.I8: "b",
    ValueType.U16: "H",
    ValueType.I16: "h",
    ValueType.U32: "I",
    ValueType.I32: "i",
    ValueType.F32: "f",
    ValueType.BOOL: "?",
    ValueType.U64: "Q",
    ValueType.I64: "q",
    ValueType.F64: "d",
}


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor to write.

    Attributes:
        name: name in the file.
        shape: PyTorch order.
        type: ggml type number.
        chunks: the bytes in order, as buffers of any size; consumed once.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    chunks: Iterable[Any]

    @property
    def nbytes(self) -> int:
        return quant.by_type(self.type, self.name).nbytes(self.shape, self.name)


def write(
    path: str | Path,
    kv: KV,
    tensors: Iterable[TensorData],
    progress: Progress | None = None,
    check: Callable[[], None] | None = None,
) -> int:
    """Write a file; return its size in bytes. An existing file is replaced at the end.

    Args:
        progress: called after each chunk.
        check: called when all data are written; if it raises, nothing is replaced.

    Raises:
        InputError: the format cannot hold a value or name, or `path` cannot be a file.
        EnvironmentProblem: the disk is full or not writable.
    """
    return _write([(Path(path), kv, list(tensors))], progress, check)


def write_split(
    path: str | Path,
    kv: KV,
    tensors: Iterable[TensorData],
    max_size: int,
    progress: Progress | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[list[Path], int]:
    """Write a model in parts of at most `max_size` bytes, named after `path`; or only the file
    `path` if it is small enough. Returns the paths of the parts and their total size.

    All parts appear when the last one is complete. Raises InputError if a tensor does not fit into
    a part.
    """
    files = _split(Path(path), kv, list(tensors), max_size)
    return [path for path, _, _ in files], _write(files, progress, check)


def planned_sizes(
    path: Path, kv: KV, tensors: list[TensorData], max_size: int | None
) -> dict[Path, int]:
    """Return the files that `write_split`, or without `max_size` `write`, would write, with their
    sizes in bytes. Reads no tensor data."""
    files = [(path, kv, tensors)] if max_size is None else _split(path, kv, tensors, max_size)
    return {path: _size(kv, tensors) for path, kv, tensors in files}


def _split(
    path: Path, kv: KV, tensors: list[TensorData], max_size: int
) -> list[tuple[Path, KV, list[TensorData]]]:
    """Return the files of `write_split`, each with its metadata and tensors."""
    kv = {key: value for key, value in kv.items() if key not in parts.KEYS}
    if _size(kv, tensors) <= max_size:
        return [(path, kv, tensors)]
    groups = _groups(kv, tensors, max_size)
    count = len(groups)
    if count > parts.MAX_PARTS:
        raise InputError(
            f"{path}: too many parts",
            expected=f"at most {parts.MAX_PARTS}",
            found=count,
            fix="allow larger parts",
        )
    paths = [
        path.with_name(parts.part_name(path.name.removesuffix(".gguf"), no, count))
        for no in range(count)
    ]
    return [
        (paths[no], _part(kv, no, count, len(tensors)), group) for no, group in enumerate(groups)
    ]


def _size(kv: KV, tensors: list[TensorData]) -> int:
    """Return the size of a file in bytes."""
    align = alignment(kv)
    return len(header(kv, tensors, align)) + sum(pad(t.nbytes, align) for t in tensors)


def _groups(kv: KV, tensors: list[TensorData], max_size: int) -> list[list[TensorData]]:
    """Distribute the tensors to parts in order; each part takes all tensors that fit. The first
    part is empty if the metadata leave no room."""
    align, groups = alignment(kv), [list[TensorData]()]
    empty = len(header({}, [], 1))
    used, later = (len(header(_part(kv, no, 0, 0), [], 1)) + align for no in (0, 1))
    if used > max_size:
        raise InputError(
            f"the metadata do not fit into a part of {max_size:,} bytes",
            found=f"{used:,} bytes",
            fix="allow larger parts",
        )
    for tensor in tensors:
        size = len(header({}, [tensor], 1)) - empty + pad(tensor.nbytes, align)
        if used + size > max_size and used != later:
            groups.append([])
            used = later
        if used + size > max_size:
            raise InputError(
                f"tensor {tensor.name} does not fit into a part of {max_size:,} bytes",
                found=f"{used + size:,} bytes with its header",
                fix="allow larger parts",
            )
        groups[-1].append(tensor)
        used += size
    return groups


def _part(kv: KV, no: int, count: int, tensors: int) -> KV:
    """Return the metadata of part `no`; only the first part has the metadata of the model."""
    split_keys = {
        parts.NO: Value(ValueType.U16, no),
        parts.COUNT: Value(ValueType.U16, count),
        parts.TENSORS: Value(ValueType.I32, tensors),
    }
    kept = {k: v for k, v in kv.items() if k == "general.alignment"}
    return {**(kept if no else kv), **split_keys}


def alignment(kv: KV) -> int:
    """Return the alignment in bytes to which tensors are padded."""
    return int(kv["general.alignment"].data) if "general.alignment" in kv else DEFAULT_ALIGNMENT


def _write(
    files: list[tuple[Path, KV, list[TensorData]]],
    progress: Progress | None,
    check: Callable[[], None] | None,
) -> int:
    """Write files that appear together, unless `check` raises; return their total size."""
    heads = [header(kv, tensors, alignment(kv)) for _, kv, tensors in files]
    sizes = [
        len(head) + sum(pad(t.nbytes, alignment(kv)) for t in tensors)
        for head, (_, kv, tensors) in zip(heads, files, strict=True)
    ]
    total, done = sum(sizes), 0
    with ExitStack() as stack:
        for no, (path, kv, tensors) in enumerate(files):
            f = stack.enter_context(atomic_write(path, sum(sizes[no:])))
            f.write(heads[no])
            done += len(heads[no])
            for tensor in tensors:
                done += _stream(f, tensor, alignment(kv), done, total, progress)
        if check:
            check()
    return total


def _stream(
    f: IO[bytes], tensor: TensorData, align: int, done: int, total: int, progress: Progress | None
) -> int:
    """Write a tensor and its padding; return the number of bytes."""
    size = 0
    for chunk in tensor.chunks:
        f.write(chunk)
        size += memoryview(chunk).nbytes
        if progress:
            progress(done + size, total)
    assert size == tensor.nbytes, f"{tensor.name}: {size} bytes, not {tensor.nbytes}"
    f.write(bytes(pad(size, align) - size))
    return pad(size, align)


def header(kv: KV, tensors: list[TensorData], align: int) -> bytes:
    """Return everything before the data section, with padding."""
    out = [MAGIC, struct.pack("<Iqq", VERSION, len(tensors), len(kv))]
    for key, value in kv.items():
        out += [_string(key), _value(key, value)]
    offset, seen = 0, set()
    for t in tensors:
        name = t.name.encode()
        if len(name) > MAX_NAME or len(t.shape) > MAX_DIMS or t.name in seen:
            raise InputError(
                f"tensor {t.name!r} of shape {t.shape} cannot be written",
                expected=f"a unique name of at most {MAX_NAME} bytes and at most "
                f"{MAX_DIMS} dimensions",
            )
        seen.add(t.name)
        dims = struct.pack(f"<I{len(t.shape)}q", len(t.shape), *reversed(t.shape))
        out += [_string(t.name), dims, struct.pack("<iQ", t.type, offset)]
        offset += pad(t.nbytes, align)
    head = b"".join(out)
    return head + bytes(pad(len(head), align) - len(head))


def _string(text: str) -> bytes:
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InputError(f"{text!r:.80} cannot be written: not valid Unicode") from e
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Value) -> bytes:
    try:
        if value.type is ValueType.ARRAY:
            assert value.item is not None and value.item is not ValueType.ARRAY, key
            start = struct.pack("<iiQ", ValueType.ARRAY, value.item, len(value.data))
            return start + _items(value.item, value.data)
        kind = struct.pack("<i", value.type)
        if value.type is ValueType.STRING:
            return kind + _string(value.data)
        return kind + struct.pack("<" + _CODES[value.type], value.data)
    except (struct.error, OverflowError) as e:
        found = f"{value.data!r:.60}"
        raise InputError(f"metadata {key}", expected=value.type.name, found=found) from e


def _items(item: ValueType, data: Any) -> bytes:
    if item is ValueType.STRING:
        return b"".join(map(_string, data))
    numbers = np.asarray(data)
    packed = numbers.astype(NUMBERS[item])
    if NUMBERS[item].kind in "iu" and not np.array_equal(numbers, packed):
        raise OverflowError(f"does not fit {item.name}")
    return packed.tobytes()
