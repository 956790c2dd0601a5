"""Importance matrices (imatrix files): mean squared input of each column of each matrix.

A file holds two F32 tensors per matrix W: `W.in_sum2`, sums of the squared inputs over all rows
that were multiplied by W, and `W.counts`, the number of rows. A stack of experts has both for each
expert. Quantizers use the means as weights of the squared errors of W's columns.
Source: llama.cpp `tools/imatrix` and `common/imatrix-loader.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec import quant
from g4spec.errors import InputError, UsageError
from g4spec.gguf import fused, other_formats, regular_files
from g4spec.gguf.atomic import check_writable
from g4spec.gguf.reader import GGUF, is_gguf
from g4spec.gguf.values import KV, ValueType, array, string, u32
from g4spec.gguf.writer import TensorData, write

SUMS, COUNTS = ".in_sum2", ".counts"
CHUNKS, CHUNK_SIZE, DATASETS = "imatrix.chunk_count", "imatrix.chunk_size", "imatrix.datasets"
MAX_OLDER = 1 << 30
"""Maximum size of a file of the older format in bytes."""
MIN_WEIGHT = 1e-4
"""Minimum weight of a column relative to the mean; a column unused by the text may be needed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Statistics of the inputs of one matrix (n = 1) or of `n` experts.

    Attributes:
        sums: sums of squared inputs, float32 [n, columns].
        counts: number of input rows, int64 [n].
    """

    sums: NDArray[np.float32]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Imatrix:
    """Content of an imatrix file.

    Attributes:
        entries: name of the matrix -> statistics.
        chunks: number of chunks of text that were read.
        chunk_size: tokens per chunk.
        datasets: names of the text files.
        name: name of the imatrix file.
        path: the file that it was read from, or None.
    """

    entries: Mapping[str, Entry]
    chunks: int
    chunk_size: int
    datasets: Sequence[str] = ()
    name: str = field(default="", compare=False)
    path: Path | None = field(default=None, compare=False)

    def weights(self, name: str, shape: Sequence[int]) -> NDArray[np.float32] | None:
        """Return weights of a matrix's columns with mean 1, float32 [1 or experts, columns]; None
        if the file has no entry. An expert that was never chosen gets equal weights, as in
        llama.cpp.

        Args:
            shape: shape of the matrix, PyTorch order.

        Raises InputError for an entry of another shape.
        """
        entry = next((self.entries[n] for n in fused.same_inputs(name) if n in self.entries), None)
        if entry is None:
            return None
        experts, sums = shape[0] if len(shape) > 2 else 1, entry.sums
        if len(sums) == 1 and sums.size == experts * shape[-1]:
            sums = sums.reshape(experts, -1)  # from the older format, which has one count for all
        if sums.shape[1] != shape[-1] or len(entry.counts) not in (1, experts):
            raise InputError(
                f"{self.name}: {name}{SUMS}: shape",
                expected=[experts, shape[-1]],
                found=list(entry.sums.shape),
                fix="use an imatrix of this model",
            )
        mean = sums / np.maximum(entry.counts, 1)[:, None].astype(np.float32)
        mean[np.broadcast_to(entry.counts == 0, len(mean))] = 1
        level = mean.mean(axis=1, keepdims=True, dtype=np.float64)
        level[level == 0] = 1
        out: NDArray[np.float32] = np.maximum(mean / level, MIN_WEIGHT).astype(np.float32)
        return out


def read(path: Path) -> Imatrix:
    """Read an imatrix file, also one of the older format. Raises InputError if it is not one or has
    invalid values."""
    if path.is_file() and not is_gguf(path):
        return _read_older(path)
    with GGUF(path) as file:
        names = [n.removesuffix(SUMS) for n in file.tensors if n.endswith(SUMS)]
        if file.get("general.type") != "imatrix" or not names:
            raise InputError(
                f"{path}: not an importance matrix",
                expected=f"general.type imatrix, and tensors NAME{SUMS}",
                fix="make one with `g4spec imatrix`",
            )
        entries = {name: _entry(file, name) for name in names}
        chunks, size, datasets = (file.get(k) for k in (CHUNKS, CHUNK_SIZE, DATASETS))
        if not isinstance(chunks, int) or not isinstance(size, int):
            raise InputError(f"{path}: {CHUNKS} or {CHUNK_SIZE} is missing or not a number")
        names = [str(x) for x in datasets] if isinstance(datasets, list) else []
        return Imatrix(entries, chunks, size, names, path.name, path)


def is_older(path: Path) -> bool:
    """True if a file begins as one of the older format."""
    with regular_files.open_regular(path) as file:
        return other_formats.is_older_imatrix(file.read(other_formats.BEGIN))


def _read_older(path: Path) -> Imatrix:
    """Read the format of older versions of llama-imatrix, and of ik_llama.cpp: name, number of
    calls and sums of each matrix, with a count for all experts; then, maybe, chunks and dataset."""
    raw, at = regular_files.read_regular(path, MAX_OLDER), 0

    def take(size: int) -> bytes:
        nonlocal at
        if not 0 <= size <= len(raw) - at:
            raise InputError(
                f"{path}: not an importance matrix, or truncated",
                expected="a GGUF file, or the older format of llama-imatrix",
                fix="make one with `g4spec imatrix`",
            )
        at += size
        return raw[at - size : at]

    def number() -> int:
        return int.from_bytes(take(4), "little", signed=True)

    def text() -> str:
        return take(number()).rstrip(b"\0").decode(errors="replace")

    entries = {}
    for _ in range(max(number(), 1)):
        name, calls = text(), number()
        sums = np.frombuffer(take(4 * number()), "<f4").astype(np.float32)
        entries[name] = _checked(path, name, sums, np.array([max(calls, 1)], np.float32))
    chunks = number() if at < len(raw) else 0
    datasets = [text()] if at < len(raw) else []
    return Imatrix(entries, max(chunks, 0), 0, datasets, path.name, path)


def _entry(file: GGUF, name: str) -> Entry:
    found = []
    for suffix in (SUMS, COUNTS):
        info = file.tensors.get(name + suffix)
        if info is None or info.format.name != "f32" or not 1 <= len(info.shape) <= 3:
            raise InputError(
                f"{file.path}: {name}{suffix}",
                expected="an F32 tensor",
                found=info.format.name.upper() if info else "none",
            )
        found.append(file.array(name + suffix))
    return _checked(file.path, name, *found)


def _checked(path: Path, name: str, sums: NDArray[Any], counts: NDArray[Any]) -> Entry:
    """Return the statistics of a matrix. Raises InputError for sizes that do not fit, and for
    values that are negative or not finite."""
    if not counts.size or sums.size % counts.size or not sums.size:
        raise InputError(
            f"{path}: {name}: sums of {sums.size} values do not divide by {counts.size} counts"
        )
    for values in (sums, counts):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise InputError(f"{path}: {name}: a sum or count is negative or not finite")
    return Entry(
        np.array(sums.reshape(counts.size, -1)), np.rint(counts.reshape(-1)).astype(np.int64)
    )


def check_output(path: Path) -> None:
    """Raise an error if no file can be written to `path`, or if it would replace a file that is not
    an imatrix. Call it before expensive work."""
    check_writable(path)
    if not path.exists() or not path.stat().st_size:
        return
    if is_gguf(path):
        with GGUF(path) as file:
            if file.get("general.type") == "imatrix":
                return
    raise UsageError(
        f"{path} exists and is not an importance matrix", fix="choose another name, or remove it"
    )


def save(path: Path, imatrix: Imatrix) -> int:
    """Write an imatrix file for `read` and llama-quantize; return its size in bytes."""
    kv: KV = {
        "general.type": string("imatrix"),
        DATASETS: array(ValueType.STRING, list(imatrix.datasets)),
        CHUNKS: u32(imatrix.chunks),
        CHUNK_SIZE: u32(imatrix.chunk_size),
    }
    f32 = quant.get("f32").type
    tensors = []
    for name, entry in sorted(imatrix.entries.items()):
        counts = entry.counts.astype(np.float32)
        for suffix, values in ((SUMS, entry.sums), (COUNTS, counts[:, None])):
            tensors.append(
                TensorData(name + suffix, values.shape, f32, [np.ascontiguousarray(values)])
            )
    return write(path, kv, tensors)


def keys(imatrix: Imatrix) -> KV:
    """Return the metadata that a file quantized with `imatrix` gets, under llama.cpp's keys."""
    return {
        "quantize.imatrix.file": string(imatrix.name),
        "quantize.imatrix.dataset": string(imatrix.datasets[0] if imatrix.datasets else ""),
        "quantize.imatrix.entries_count": u32(len(imatrix.entries)),
        "quantize.imatrix.chunks_count": u32(imatrix.chunks),
    }
