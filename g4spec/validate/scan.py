"""One pass over the tensor data: what is not finite, all zero, or the same everywhere.

Floats are judged by their bits and quantized blocks by their scales, so that nothing is
dequantized; the pass is bound by reading the file. Blocks of a few hundred KB stay in cache, and
numpy lets threads run side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec import quant
from g4spec.gguf import GGUF
from g4spec.validate.header import Header, Tensor

CHUNK = 1 << 19  # bytes looked at together
SAMPLE = 4096  # bytes at either end that stand for a tensor until two of them agree


@dataclass(frozen=True, slots=True)
class Float:
    """A float format by its bits: dtype of the pattern, all bits but the sign, infinity."""

    dtype: str
    magnitude: int
    infinity: int


FLOATS = {
    "F32": Float("<u4", 0x7FFFFFFF, 0x7F800000),
    "F16": Float("<u2", 0x7FFF, 0x7C00),
    "BF16": Float("<u2", 0x7FFF, 0x7F80),
}
SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where the fp16 scales (and minima) of a block are, in bytes from its start."""
LARGEST = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127, "Q4_K": 945, "Q5_K": 1953,
           "Q6_K": 4064}  # fmt: skip
"""The most by which a block's codes multiply its scale."""
ZERO = {"Q8_0": bytes(32), "Q4_0": b"\x88" * 16, "Q5_0": b"\xff" * 4 + bytes(16)}
"""What follows the scale in a block of zeros; other codes beside a zero scale are values lost."""


@dataclass(slots=True)
class Stats:
    """What the pass saw of one tensor.

    Attributes:
        first_bad: index of the first element (or block, of quantized types) that is not finite.
        zero, constant: every element is zero; every element (or block) is the same.
        blocks, lost_blocks: blocks in all, and those whose scale underflowed to zero while their
            codes did not.
        largest: the largest magnitude, of quantized types what the largest scale allows.
        sample: bytes at both ends, to find duplicates.
    """

    first_bad: int | None = None
    zero: bool = True
    constant: bool = True
    blocks: int = 0
    lost_blocks: int = 0
    largest: float = 0.0
    sample: bytes = b""


def scan(
    file: GGUF, header: Header, progress: Callable[[int, int], None] | None
) -> dict[str, Stats]:
    """Stats of every tensor whose type is known here, by name."""
    entries = [t for t in header.tensors if t.type_name in FLOATS or t.type_name in SCALES]
    total = sum(t.nbytes or 0 for t in entries)
    done, out = 0, {}

    def look(entry: Tensor) -> Stats:
        return _tensor(file, entry)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        # Handing a small one to a thread takes longer than it takes.
        ahead = {t.name: pool.submit(look, t) for t in entries if (t.nbytes or 0) > CHUNK // 16}
        for entry in entries:
            future = ahead.pop(entry.name, None)
            out[entry.name] = future.result() if future else look(entry)
            done += entry.nbytes or 0
            if progress is not None:
                progress(done, total)
    return out


def _tensor(file: GGUF, entry: Tensor) -> Stats:
    raw = file.raw(entry.name).reshape(-1)
    stats = Stats(sample=raw[:SAMPLE].tobytes() + raw[-SAMPLE:].tobytes())
    if entry.type_name in FLOATS:
        _floats(raw, FLOATS[entry.type_name], stats)
    else:
        _blocks(raw, entry.type_name, stats)
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
    pattern = np.array([most << 16 if form.infinity == 0x7F80 else most],
                       "<u2" if form.infinity == 0x7C00 else "<u4")  # fmt: skip
    stats.largest = float(pattern.view("<f2" if form.infinity == 0x7C00 else "<f4")[0])


def _blocks(raw: NDArray[np.uint8], name: str, stats: Stats) -> None:
    size = quant.get(name).block_bytes
    rows = raw.reshape(-1, size)
    step, most = max(1, CHUNK // size), 0
    stats.blocks = len(rows)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        scales = np.stack([_fp16(part, at) for at in SCALES[name]])
        magnitude = scales & np.uint16(0x7FFF)
        top = int(magnitude.max())
        most = max(most, top)
        if stats.first_bad is None and top >= 0x7C00:
            stats.first_bad = start + int(np.argmax((magnitude >= 0x7C00).any(0)))
        if name in ZERO and not magnitude.all():
            codes = part[magnitude[0] == 0, 2:]
            zero = np.frombuffer(ZERO[name], np.uint8)
            stats.lost_blocks += int((codes != zero).any(1).sum())
        stats.zero &= not magnitude.any()
        if stats.constant:
            stats.constant = bool((part == rows[0]).all())
    stats.largest = float(np.uint16(most).view(np.float16)) * LARGEST[name]


def _fp16(blocks: NDArray[np.uint8], at: int) -> NDArray[np.uint16]:
    """The fp16 pattern at byte `at` of each block."""
    pairs: NDArray[Any] = np.ascontiguousarray(blocks[:, at : at + 2])
    return pairs.view("<u2").reshape(-1)
