"""Fast reading of string arrays: a vocabulary has about 750,000 strings (tokens and merges).

A string is stored as its length in 8 bytes and its text. The vectorized path handles texts of 1 to
255 bytes without NUL. All others, and damaged files, are read string by string.
"""

from __future__ import annotations

import mmap
import struct

import numpy as np
from numpy.typing import NDArray

WINDOW = 1 << 16
"""Bytes searched at once: large enough to be efficient, small enough for the CPU's cache."""
BLOCK = 2048
"""Strings read one by one before the vectorized path is tried again."""
MIN_FAST = 1024
"""Minimum number of strings that the vectorized path must find to be used."""
_U64 = struct.Struct("<Q")
StringBlock = tuple[int, int, int]
"""First byte, end and number of some consecutive strings."""


def scan(file: mmap.mmap | bytes, at: int, count: int) -> tuple[list[StringBlock], int]:
    """Divide `count` strings that start at byte `at` into blocks; return the blocks and the end.

    The end is beyond the file if the strings are.
    """
    blocks = []
    while count and at < len(file):
        n, end = _find_fast(file, at, count) if count >= MIN_FAST else (0, at)
        if n < MIN_FAST:
            n = min(BLOCK, count)
            end = _skip_one_by_one(file, at, n)
        blocks.append((at, end, n))
        at, count = end, count - n
    return blocks, at if not count else len(file) + 1


def _find_fast(file: mmap.mmap | bytes, at: int, count: int) -> tuple[int, int]:
    found = lengths(np.frombuffer(file, np.uint8, min(WINDOW, len(file) - at), at))
    n = min(len(found) - 1, count)
    return n, at + int(found[n]) if n > 0 else at


def _skip_one_by_one(file: mmap.mmap | bytes, at: int, count: int) -> int:
    try:
        for _ in range(count):
            at += 8 + _U64.unpack_from(file, at)[0]
    except (struct.error, OverflowError):
        return len(file) + 1
    return at


def split(raw: NDArray[np.uint8], count: int) -> list[str] | None:
    """Decode the `count` strings in `raw`; None if they must be read one by one."""
    if len(raw) > count * (8 + 255):  # it may be gigabytes
        return None
    at = lengths(raw)
    if len(at) != count:
        return None
    text = raw.copy()
    text[at] = 0
    if len(text) - np.count_nonzero(text) != 8 * count:  # a text has a NUL
        return None
    try:
        return text[8:].tobytes().decode("utf-8").split("\0" * 8)
    except UnicodeDecodeError:
        return None


def lengths(raw: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Return the positions of the lengths of the first strings in `raw`, whose last text may be
    incomplete.

    A length below 256 is a byte followed by 7 zero bytes, so all such positions are candidates. The
    chain of strings that starts at the first candidate selects the real ones.
    """
    zeros = raw == 0
    for n in (1, 2, 3):
        zeros = zeros[:-n] & zeros[n:]  # 2 in a row from here on, then 4, then 7
    at = np.flatnonzero(zeros) - 1
    if not len(at) or at[0] != 0:
        return at[:0]
    leads = at[:-1] + 8 + raw[at[:-1]] == at[1:]
    return at if leads.all() else at[: leads.argmin() + 1]
