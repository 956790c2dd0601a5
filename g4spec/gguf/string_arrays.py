"""Arrays of short strings, thousands at a time: a vocabulary has three quarters of a million.

A string is its length in 8 bytes, then its text. What is faster for many is only for texts of 1
to 255 bytes without a NUL; for any others, or where a file is damaged, they are read in turn.
"""

from __future__ import annotations

import mmap
import struct

import numpy as np
from numpy.typing import NDArray

WINDOW = 1 << 16
"""Bytes searched at once: enough for it to pay, few enough to stay in the CPU's cache."""
BLOCK, LEAST = 2048, 1024
"""Strings read in turn before the fast way is tried again; how many it must find to be one."""
_U64 = struct.Struct("<Q")
Block = tuple[int, int, int]
"""Where some strings begin and end, and how many they are."""


def scan(file: mmap.mmap | bytes, at: int, count: int) -> tuple[list[Block], int]:
    """Blocks of the `count` strings from byte `at` on, and where they end.

    The end lies beyond the file if the strings do.
    """
    blocks = []
    while count and at < len(file):
        n, end = _leap(file, at, count) if count >= LEAST else (0, at)
        if n < LEAST:
            n = min(BLOCK, count)
            end = _walk(file, at, n)
        blocks.append((at, end, n))
        at, count = end, count - n
    return blocks, at if not count else len(file) + 1


def _leap(file: mmap.mmap | bytes, at: int, count: int) -> tuple[int, int]:
    found = lengths(np.frombuffer(file, np.uint8, min(WINDOW, len(file) - at), at))
    n = min(len(found) - 1, count)
    return n, at + int(found[n]) if n > 0 else at


def _walk(file: mmap.mmap | bytes, at: int, count: int) -> int:
    try:
        for _ in range(count):
            at += 8 + _U64.unpack_from(file, at)[0]
    except (struct.error, OverflowError):
        return len(file) + 1
    return at


def split(raw: NDArray[np.uint8], count: int) -> list[str] | None:
    """The `count` strings that fill `raw`; None if they must be read in turn."""
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
    """Where the lengths of the first strings in `raw` stand; the last text may reach beyond it.

    A length below 256 ends in 7 zero bytes. Any place before 7 zeros may be one; those to which
    the first leads, one after the other, are.
    """
    zeros = raw == 0
    for n in (1, 2, 3):
        zeros = zeros[:-n] & zeros[n:]  # 2 in a row from here on, then 4, then 7
    at = np.flatnonzero(zeros) - 1
    if not len(at) or at[0] != 0:
        return at[:0]
    leads = at[:-1] + 8 + raw[at[:-1]] == at[1:]
    return at if leads.all() else at[: leads.argmin() + 1]
