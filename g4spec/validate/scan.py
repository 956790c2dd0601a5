"""One pass over the tensor data: finds values that are not finite, all zero, or all equal.

Floats are checked by their bits and quantized blocks by their scales, without dequantizing, so the
pass is limited by reading the file. Chunks of a few hundred KB fit into the CPU cache, and numpy
releases the GIL, so tensors are processed in parallel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from g4spec import quant
from g4spec.gguf import GGUF, TensorInfo

CHUNK = 1 << 19  # bytes per chunk
SAMPLE = 4096  # bytes at each end, compared first to find duplicates


@dataclass(frozen=True, slots=True)
class Float:
    """A float format: dtype of its bits, mask of all bits but the sign, bits of infinity."""

    dtype: str
    magnitude: int
    infinity: int


FLOATS = {
    "F32": Float("<u4", 0x7FFFFFFF, 0x7F800000),
    "F16": Float("<u2", 0x7FFF, 0x7C00),
    "BF16": Float("<u2", 0x7FFF, 0x7F80),
}
BLOCKS = {f.name.upper(): f for f in quant.readable().values() if f.quantized}
"""Quantized types, which are checked by the scales of their blocks."""


@dataclass(slots=True)
class Stats:
    """Statistics of one tensor.

    Attributes:
        first_bad: index of the first element (quantized types: block) that is not finite.
        zero, constant: whether all elements are zero; whether all elements (or blocks) are equal.
        blocks, lost_blocks: number of blocks, and of those whose scale underflowed to zero although
            their codes are not zero.
        largest: maximum magnitude; for quantized types the bound given by the largest scale.
        sample: bytes of both ends, to find duplicates.
    """

    first_bad: int | None = None
    zero: bool = True
    constant: bool = True
    blocks: int = 0
    lost_blocks: int = 0
    largest: float = 0.0
    sample: bytes = b""


def scan(file: GGUF, progress: Callable[[int, int], None] | None) -> dict[str, Stats]:
    """Return tensor name -> Stats, for every tensor of a supported type."""
    entries = [t for t in file.tensors.values() if _type_name(t) in (*FLOATS, *BLOCKS)]
    total = sum(t.nbytes for t in entries)
    done, out = 0, {}

    def look(entry: TensorInfo) -> Stats:
        return _tensor(file, entry)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        # Small tensors are faster without a thread.
        ahead = {t.name: pool.submit(look, t) for t in entries if t.nbytes > CHUNK // 16}
        for entry in entries:
            future = ahead.pop(entry.name, None)
            out[entry.name] = future.result() if future else look(entry)
            done += entry.nbytes
            if progress is not None:
                progress(done, total)
    return out


def _type_name(entry: TensorInfo) -> str:
    return entry.format.name.upper()


def _tensor(file: GGUF, entry: TensorInfo) -> Stats:
    raw = file.raw(entry.name).reshape(-1)
    stats = Stats(sample=raw[:SAMPLE].tobytes() + raw[-SAMPLE:].tobytes())
    if (type := _type_name(entry)) in FLOATS:
        _floats(raw, FLOATS[type], stats)
    else:
        _blocks(raw, BLOCKS[type], stats)
    return stats


def _floats(raw: NDArray[np.uint8], form: Float, stats: Stats) -> None:
    bits = raw.view(form.dtype)
    step, most = CHUNK // bits.itemsize, 0
    for start in range(0, bits.size, step):
        part = bits[start : start + step]
        magnitude = part & bits.dtype.type(form.magnitude)
        top = int(magnitude.max())
        most = max(most, top)
        stats.zero &= top == 0
        if stats.first_bad is None and top >= form.infinity:
            stats.first_bad = start + int(np.argmax(magnitude >= form.infinity))
        if stats.constant:
            stats.constant = bool((part == bits[0]).all())
    pattern = np.array(
        [most << 16 if form.infinity == 0x7F80 else most],
        "<u2" if form.infinity == 0x7C00 else "<u4",
    )
    stats.largest = float(pattern.view("<f2" if form.infinity == 0x7C00 else "<f4")[0])


def _blocks(raw: NDArray[np.uint8], form: quant.Format, stats: Stats) -> None:
    factors = form.factors
    assert factors is not None, form.name
    rows = raw.reshape(-1, form.block_bytes)
    step, most = max(1, CHUNK // form.block_bytes), 0.0
    stats.blocks = len(rows)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        with np.errstate(invalid="ignore"):  # a factor may be a signalling NaN
            magnitude = np.abs(factors.read(part))
            top = float(magnitude.max())
        if stats.first_bad is None and not np.isfinite(top):
            stats.first_bad = start + int(np.argmin(np.isfinite(magnitude).all(0)))
        most = max(most, top)
        if factors.zero_codes is not None and not magnitude.all():
            codes = part[magnitude[0] == 0, 2:]
            zero = np.frombuffer(factors.zero_codes, np.uint8)
            stats.lost_blocks += int((codes != zero).any(1).sum())
        stats.zero &= not magnitude.any()
        if stats.constant:
            stats.constant = bool((part == rows[0]).all())
    stats.largest = most * factors.max_multiplier
