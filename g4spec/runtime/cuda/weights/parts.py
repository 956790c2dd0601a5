"""Parts of a packed unit: which bits of a block's fields go where.

Row r of a group is row 8 h + g of tile 2 w + p, with w < 4 (warps), p, h < 2 and g < 8. Column k of
a unit is 64 c + 16 j + 4 t + 2 e1 + e0. Lane 4 g + t of the tensor cores' operand holds rows g and
g + 8 of a tile and columns 4 t .. 4 t + 3 of each 16. So codes are ordered [tile, c, g, t], and
then, in 32-bit words, the lane's codes of h, j, e1, e0 at the bits that :data:`PLACE` names. e0
always selects the half of the word, because both halves become operands in one instruction. Codes
that are indices into a table are ordered as :data:`CHOOSING` says: in nibbles that one instruction
reads. `codebook.cuh` (`Order`) and `five_bits.cuh` describe types whose codes differ from both.

Each part of a unit is described by its dimensions on both sides and by moves, i.e. which bits of a
word go to which bits of another. Dimensions of both sides are permuted; moves index the others.
Both directions follow from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod

from g4spec.runtime.cuda.weights import bit_places
from g4spec.runtime.cuda.weights.bit_places import Index

ROWS = {"w": 4, "p": 2, "h": 2, "g": 8}
Places = dict[int, Callable[[int, int, int], tuple[int, int]]]

PLACE: Places = {
    4: lambda j, h, e1: (j, 8 * e1 + 4 * h),
    2: lambda j, h, e1: (j // 2, (2 - 2 * (j % 2) if h else 4 + 2 * (j % 2)) + 8 * e1),
}
"""Bits of a code -> word among the lane's words of 64 columns, and lowest bit in it (for e0 = 0).
"""

CHOOSING: Places = {
    4: lambda j, h, e1: (j, 16 * e1 + 8 * h),
    2: lambda j, h, e1: (j // 2, 16 * e1 + 8 * h + 2 * (j % 2)),
    1: lambda j, h, e1: (0, 16 * e1 + 8 * h + j),
}
"""The same for codes that are table indices; those with e0 = 1 are 4 bits higher."""

IN_ORDER, PAIRED = (0,), (3, 0, 1, 2)
"""Where the bits of each field of a word go: see `Order` in codebook.cuh."""


@dataclass(frozen=True, slots=True)
class Move:
    """Bits of word `source` go to `mask` of word `target`, `shift` bits higher."""

    source: Index
    target: Index
    shift: int
    mask: int


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a unit.

    Attributes:
        first, last: fields of the format's block that it holds.
        word: bytes of a word, on both sides.
        span: columns after which its pattern repeats; they are one c.
        source: dimensions of a row's words in the file, from c on.
        target: dimensions of the unit's words, rows included.
        sizes: sizes of the dimensions that are neither rows nor c.
        moves: which bits go where. None: every dimension is shared, and words are only permuted.
        swapped: bytes 1 and 2 of each word of the file are exchanged first, so that e0 is separate.
        flip: bits of a word that are inverted.
    """

    first: str
    last: str
    word: int
    span: int
    source: str
    target: str
    sizes: dict[str, int] = field(default_factory=dict)
    moves: tuple[Move, ...] | None = None
    swapped: bool = False
    flip: int = 0

    def shapes(self, unit: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return sizes by name, in order: of the file's words of a group and unit, and of the
        packed words."""
        known = {**ROWS, **self.sizes, "c": unit // self.span}
        file = {name: known[name] for name in self.source.split()}
        return file, {name: known[name] for name in self.target.split()}

    def nbytes(self, unit: int) -> int:
        return prod(self.shapes(unit)[1].values()) * self.word


def join_bits(bits: Iterator[tuple[Index, int, Index, int]]) -> tuple[Move, ...]:
    """Join single bits (word, bit -> word, bit) to moves of all bits with the same shift."""
    masks: dict[tuple[Index, Index, int], int] = {}
    for source, low, target, high in bits:
        key = source, target, high - low
        masks[key] = masks.get(key, 0) | 1 << high
    return tuple(Move(*key, signed(mask)) for key, mask in masks.items())


def signed(value: int, bits: int = 32) -> int:
    """Return the number with these bits as a signed one, which torch accepts."""
    return value - (value >> (bits - 1) << bits)


def codes(
    name: str, bits: int, run: int, at_e0: int = 16, place: Places = PLACE, order: Index = IN_ORDER
) -> Part:
    """Return the part for codes, or upper bits of codes, of less than 8 bits: `run` bytes hold the
    lowest bits of `run` values in order, above them those of the next `run` values, and so on.
    `order`: how bits of packed words are ordered, see `PAIRED`."""
    span = max(64, run * 8 // bits)
    lanes = run > 8  # else the four lanes of a column of g find their bits in words they share
    swapped = lanes and at_e0 == 16

    def places() -> Iterator[tuple[Index, int, Index, int]]:
        for k, h, bit in product(range(span), range(2), range(bits)):
            c, j, t, e1, e0 = k // 64, k // 16 % 4, k // 4 % 4, k // 2 % 2, k % 2
            if lanes and t:
                continue
            chunk, rest = divmod(k, run * 8 // bits)
            shift, byte = divmod(rest, run)
            word, byte = divmod(chunk * run + byte, 4)
            at = 8 * ((2 * e0 + e1) if swapped else byte) + bits * shift + bit
            slot, low = place[bits](j, h, e1)
            target = (c, slot) if lanes else (c, t, slot)
            high = at_e0 * e0 + low + bit
            high += order[high % len(order)] - high % len(order)
            yield (h, word // 4 if lanes else word), at, target, high

    per_row = span * bits // 32
    sizes = {"x": per_row // 4 if lanes else per_row, "t": 4, "k": span // 64, "s": bits}
    return Part(
        name,
        name,
        4,
        span,
        "c x t" if lanes else "c x",
        "w p c k g t s",
        sizes,
        join_bits(places()),
        swapped=swapped,
    )


def numbers(name: str, bits: int, run: int, order: Index = IN_ORDER) -> Part:
    """Return the part for codes that are table indices; see `codes`."""
    return codes(name, bits, run, 4, CHOOSING, order)


def dense(words: range) -> Part:
    """Return the part for these of a lane's three words of 3-bit codes."""
    sizes, moves = (
        {"x": 6, "t": 4, "k": 4, "s": len(words)},
        join_bits(bit_places.three_bits(words)),
    )
    return Part("low", "high", 4, 256, "c x t", "w p c k g t s", sizes, moves, swapped=True)


def fives(words: range, span: int) -> Part:
    """Return the part for these of a lane's five words of 5-bit codes."""
    lanes = span == 256  # as in `codes`
    sizes = {"x": 10, "t": 4, "k": span // 64, "s": len(words)}
    moves = join_bits(bit_places.five_bits(words, span))
    source = "c x t" if lanes else "c x"
    return Part("high", "q", 4, span, source, "w p c k g t s", sizes, moves, swapped=True)


def by_row(first: str, last: str, count: int, span: int = 256) -> Part:
    """Return the part for `count` words of each `span` columns of a row."""
    return Part(first, last, 4, span, "c x", "c w p h g x", {"x": count})


def factors(name: str, word: int, span: int) -> Part:
    """Return the part for one word per `span` columns; those of a group's rows follow each
    other."""
    return Part(name, name, word, span, "c", "c w p h g")


def plane(name: str) -> Part:
    """Return the part for a half-precision number for each 32 columns: a lane reads those of rows
    g, g + 8, g + 16, g + 24 of its warp at once."""
    return Part(name, name, 2, 32, "c", "c w g p h")
