"""Tensors of any source, read and converted to another type in blocks of rows."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec.errors import InputError
from g4spec.quant import Format, Unrepresentable
from g4spec.quant.format import Bytes, Floats

BLOCK_VALUES = 1 << 18
"""Number of values converted at once: the temporaries of a block stay in a core's cache."""
COPY_BYTES = 1 << 23
MAX_PENDING = 4
"""Maximum number of blocks computed ahead of the one being written."""
RowReader = Callable[[int, int], Any]
"""Function (first, last) -> array of the rows first .. last - 1."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a source file.

    Attributes:
        shape: PyTorch order.
        dtype: the source's name of the type, for messages.
        format: quant type that decodes it, None if this version has none.
        raw: the bytes, flat, memory-mapped.
        place: path of the file and offset of the tensor in it, None if it is only in memory.

    Reading a mapped page beyond the end of a file that was truncated meanwhile kills the process
    (SIGBUS). So `read` and `rows` use file reads; use `raw` for small tensors only.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: Format | None
    raw: Bytes
    place: tuple[Path, int] | None = None

    @property
    def nbytes(self) -> int:
        """Size in the source in bytes."""
        return self.raw.size

    @property
    def note(self) -> str:
        """Remark for the plan, may be empty."""
        return ""

    def read(self, start: int, stop: int) -> Bytes:
        """Read bytes start .. stop - 1. Raises InputError if the file was truncated meanwhile."""
        if self.place is None:
            return self.raw[start:stop]
        path, begin = self.place
        out = np.empty(stop - start, np.uint8)
        try:
            with open(path, "rb", buffering=0) as f:
                f.seek(begin + start)
                done = 0
                while done < out.size and (got := f.readinto(out.data[done:])):
                    done += got
        except OSError as e:
            raise InputError(f"{path}: {e.strerror}") from e
        if done < out.size:
            raise InputError(
                f"{path}: became shorter while it was read",
                fix="run the command again when it is whole",
            )
        return out

    def rows(self, first: int, last: int) -> Bytes:
        """Read rows first .. last - 1 of the tensor as a matrix, bytes [last - first, row size]."""
        size = self.nbytes // max(prod(self.shape[:-1]), 1)
        return self.read(first * size, last * size).reshape(last - first, size)

    def first_rows(self, n: int) -> StoredTensor:
        """Return the tensor cut to its first `n` rows."""
        size = self.raw.size // self.shape[0] * n
        return StoredTensor(
            self.name, (n, *self.shape[1:]), self.dtype, self.format, self.raw[:size], self.place
        )

    def array(self) -> NDArray[Any]:
        """Decode all values: float32, or integers as stored."""
        assert self.format is not None, self.name
        return self.format.array(self.raw, self.shape)


class LazyTensor(StoredTensor):
    """A tensor that is computed when it is read, in blocks of rows.

    Args:
        read: returns the bytes of rows first .. last - 1 in `format`, [last - first, row_bytes].
        note: remark for the plan about how the tensor is computed.
        size: size in the source in bytes.
    """

    __slots__ = ("_note", "_read", "_size")
    _note: str
    _read: RowReader
    _size: int

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        format: Format,
        read: RowReader,
        note: str,
        size: int,
    ) -> None:
        fields = {
            "name": name,
            "shape": shape,
            "dtype": dtype,
            "format": format,
            "place": None,
            "_read": read,
            "_note": note,
            "_size": size,
        }
        for key, value in fields.items():
            object.__setattr__(self, key, value)

    @property
    def raw(self) -> Bytes:
        """All bytes, computed in memory."""
        return self.rows(0, prod(self.shape[:-1])).reshape(-1)

    @property
    def nbytes(self) -> int:
        return self._size

    @property
    def note(self) -> str:
        return self._note

    def rows(self, first: int, last: int) -> Bytes:
        out: Bytes = self._read(first, last)
        return out

    def first_rows(self, n: int) -> StoredTensor:
        assert self.format is not None
        return LazyTensor(
            self.name,
            (n, *self.shape[1:]),
            self.dtype,
            self.format,
            self._read,
            self.note,
            self._size,
        )


def worker_pool() -> ThreadPoolExecutor:
    """Create the threads for `recode`; numpy releases the GIL while it computes."""
    # os.cpu_count() ignores the CPU limits of containers and of taskset.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ThreadPoolExecutor(max_workers=min(cores or 1, 8))


def recode(
    tensor: StoredTensor, to: Format, pool: ThreadPoolExecutor, weights: Floats | None
) -> Iterator[Bytes]:
    """Yield the bytes of a tensor in format `to`, in order, computed by `pool`.

    Args:
        weights: weights of the squared errors of each column, [1 or experts, columns]; see
            `g4spec.quant.Format.quantize`.

    Raises InputError for a value that `to` cannot hold.
    """
    source = tensor.format
    assert source is not None, tensor.name
    width = tensor.shape[-1] if tensor.shape else 1
    if source is to and not isinstance(tensor, LazyTensor):
        size = COPY_BYTES // to.block_bytes * to.block_bytes
        for at in range(0, tensor.nbytes, size):
            raw = tensor.read(at, min(at + size, tensor.nbytes))
            if (bad := to.first_not_finite(raw)) is not None:
                first = at // to.block_bytes * to.block
                raise _unrepresentable(tensor, to, first + bad.index, width, bad)
            yield raw
        return
    rows = prod(tensor.shape[:-1])
    step = max(1, BLOCK_VALUES // max(width, 1))
    each = rows // len(weights) if weights is not None else rows

    def block(first: int) -> Bytes:
        raw = tensor.rows(first, min(first + step, rows))
        if source is to:
            if (bad := to.first_not_finite(raw.reshape(-1))) is not None:
                raise _unrepresentable(tensor, to, first * width + bad.index, width, bad)
            return raw.reshape(-1)
        try:
            of = None if weights is None else weights[np.arange(first, first + len(raw)) // each]
            return to.quantize(source.dequantize(raw), of).reshape(-1)
        except Unrepresentable as e:
            raise _unrepresentable(tensor, to, first * width + e.index, width, e) from e

    yield from _map_in_order(pool, block, range(0, rows, step))


def _unrepresentable(
    tensor: StoredTensor, to: Format, index: int, width: int, e: Unrepresentable
) -> InputError:
    row, column = divmod(index, max(width, 1))
    return InputError(
        f"tensor {tensor.name} cannot be stored as {to.name.upper()}: value at row {row}, "
        f"column {column}",
        expected="a finite number within its range",
        found=e.value,
    )


def _map_in_order(pool: ThreadPoolExecutor, work: Any, items: Iterable[int]) -> Iterator[Bytes]:
    """Yield `work(item)` for each item in order; the pool computes up to MAX_PENDING ahead."""
    pending: deque[Future[Bytes]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > MAX_PENDING:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    """True if two tensors have the same shape, type and bytes."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return all(
        np.array_equal(a.read(at, end), b.read(at, end))
        for at in range(0, a.nbytes, COPY_BYTES)
        for end in (min(at + COPY_BYTES, a.nbytes),)
    )
