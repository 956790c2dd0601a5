"""Where single bits of a matrix go when it is packed, for codes and headers in another order.

Each function yields bits as (word, bit) in the file and (word, bit) in the packed unit. Words are
indices of the dimensions between which `parts.Part` moves them; parts of a column have the names
of `packing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

Index = tuple[int, ...]
Bits = Iterator[tuple[Index, int, Index, int]]

SWAPPED = (0, 2, 1, 3)
"""Place of each byte of a word of the file once bytes 1 and 2 are exchanged."""


def three_bits(words: range) -> Bits:
    """Yield the bits of these of a lane's three words of 3-bit codes (`dense_word` in
    codebook.cuh). The file has the two low bits of the codes apart from the third."""
    for k, h, bit in product(range(256), range(2), range(3)):
        c, j, t, e1, e0 = k // 64, k // 16 % 4, k // 4 % 4, k // 2 % 2, k % 2
        i = 2 * j + h
        slot, low = ((i + 2 - e1) % 3, i + 8 * e1) if i + e1 else (bit, 0)
        if t == 0 and slot in words:  # the other lanes find their bits at the same places
            x, at = (4 + k % 32 // 16, k // 32) if bit == 2 else (k // 128 * 2 + j % 2, bit)
            at += 8 * SWAPPED[2 * e1 + e0] + (bit < 2) * (k % 128 // 32 * 2)
            yield (h, x), at, (c, slot - words.start), (16 * e0 + low + bit) % 32


def five_bits(words: range, span: int) -> Bits:
    """Yield the bits of these of a lane's five words of 5-bit codes (`five_bit_place` in
    five_bits.cuh). The file has the fifth bits of 256 columns (`span`, Q5_K) or 32 before their
    other bits."""
    for k, h, bit in product(range(span), range(2), range(5)):
        c, j, t, e1, e0 = k // 64, k // 16 % 4, k // 4 % 4, k // 2 % 2, k % 2
        slot, low = _five_bit_place(j, h, e1, bit)
        if slot not in words:
            continue
        target = slot - words.start, 16 * e0 + low
        if span == 256 and t == 0:  # the other lanes find their bits at the same places
            x, at = (
                (k % 32 // 16, k // 32) if bit == 4 else (2 + c * 2 + j % 2, k % 64 // 32 * 4 + bit)
            )
            yield (h, x), 8 * SWAPPED[2 * e1 + e0] + at, (c, target[0]), target[1]
        elif span < 256:  # a word of fifth bits, then one for each lane
            x, byte, at = (
                (0, k % 32 // 8, k % 8) if bit == 4 else (1 + t, 2 * e1 + e0, j % 2 * 4 + bit)
            )
            yield (h, k // 32 * 5 + x), 8 * SWAPPED[byte] + at, (c, t, target[0]), target[1]


def _five_bit_place(j: int, h: int, e1: int, bit: int) -> tuple[int, int]:
    """Return word and bit of a bit of a 5-bit code, for e0 = 0."""
    if not e1:
        return j, 5 * h + bit
    if not h:
        return (j, 10 + bit) if j < 3 else (4, bit)
    if j == 2:
        return bit, 15
    return (3, 10 + bit) if j == 3 else (4, 5 + 5 * j + bit)


def six_bits() -> Bits:
    """Yield the moves of the header of Q4_K and Q5_K. Packed, it is: both factors; then three words
    with pairs of scales and of minima, numbers 2 p and 2 p + 1 in the halves of word p: a scale at
    bit 0, a minimum at bit 6. The remaining 4 bits of each half hold numbers 6 and 7: the lower
    four bits of the scale in word 0, of the minimum in word 1, the upper two of both in word 2."""
    for bit in range(32):
        yield (0,), bit, (0,), bit
    for minimum, i, bit in product(range(2), range(8), range(6)):
        if i < 4:
            byte, low = 4 * minimum + i, bit
        elif bit < 4:
            byte, low = 8 + i - 4, 4 * minimum + bit
        else:
            byte, low = 4 * minimum + i - 4, 6 + bit - 4
        pair, half = i // 2, 16 * (i % 2)
        if pair < 3:
            target = (1 + pair, half + 6 * minimum + bit)
        elif bit < 4:
            target = (1 + minimum, half + 12 + bit)
        else:
            target = (3, half + 12 + 2 * minimum + bit - 4)
        yield (1 + byte // 4,), 8 * (byte % 4) + low, (target[0],), target[1]


def nibbles() -> Bits:
    """Yield the moves of the scales of IQ3_S: numbers 2 p and 2 p + 1 to bit 4 p of the halves."""
    for i, bit in product(range(8), range(4)):
        yield (0,), 4 * i + bit, (0,), i % 2 * 16 + i // 2 * 4 + bit


def six_in_two() -> Bits:
    """Yield the moves of the header of IQ4_XS (`factor` in iq4_xs.cuh)."""
    yield from (((0,), bit, (0,), bit) for bit in range(16))
    for i, bit in product(range(8), range(6)):
        source = bit + (32 + 4 * i if bit < 4 else 12 + 2 * i)
        target = bit + 6 * i + (32 if i < 5 else 16 if i == 7 and bit > 3 else -14)
        yield (source // 32,), source % 32, (target // 32,), target % 32
