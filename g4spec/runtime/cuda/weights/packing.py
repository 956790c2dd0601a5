"""Quantized matrices in the order in which warps read them: a bijection of their bytes in memory
(`held`), which for most types are the file's.

Rows are taken in groups of 128, the last one padded with zero bytes, and columns in units of 256 or
64. The unit of a group is contiguous: first the parts that hold codes, then the parts that hold
scales. The result is [groups, units, bytes of a unit]. No value is computed: every bit of the file
has one place, so :func:`unpack` returns the same bytes.

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
from functools import cache
from itertools import product
from math import prod

import numpy as np
import torch

from g4spec import quant
from g4spec.errors import Unsupported
from g4spec.quant import block_dtype
from g4spec.runtime.cuda.build.constants import PACK_ROWS
from g4spec.runtime.cuda.weights import bit_places, held_size
from g4spec.runtime.cuda.weights.bit_places import Index

CHUNK = 1 << 27
"""Values that are rearranged at a time, which bounds the memory needed besides the result."""

_ROWS = {"w": 4, "p": 2, "h": 2, "g": 8}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
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
        known = {**_ROWS, **self.sizes, "c": unit // self.span}
        file = {name: known[name] for name in self.source.split()}
        return file, {name: known[name] for name in self.target.split()}

    def nbytes(self, unit: int) -> int:
        return prod(self.shapes(unit)[1].values()) * self.word


def _moves(bits: Iterator[tuple[Index, int, Index, int]]) -> tuple[Move, ...]:
    """Join single bits (word, bit -> word, bit) to moves of all bits with the same shift."""
    masks: dict[tuple[Index, Index, int], int] = {}
    for source, low, target, high in bits:
        key = source, target, high - low
        masks[key] = masks.get(key, 0) | 1 << high
    return tuple(Move(*key, _signed(mask)) for key, mask in masks.items())


def _signed(mask: int) -> int:
    """Return the 32-bit number with these bits as a signed one, which torch accepts."""
    return mask - (mask >> 31 << 32)


def _codes(
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
        _moves(places()),
        swapped=swapped,
    )


def _numbers(name: str, bits: int, run: int, order: Index = IN_ORDER) -> Part:
    """Return the part for codes that are table indices; see `_codes`."""
    return _codes(name, bits, run, 4, CHOOSING, order)


def _dense(words: range) -> Part:
    """Return the part for these of a lane's three words of 3-bit codes."""
    sizes, moves = {"x": 6, "t": 4, "k": 4, "s": len(words)}, _moves(bit_places.three_bits(words))
    return Part("low", "high", 4, 256, "c x t", "w p c k g t s", sizes, moves, swapped=True)


def _fives(words: range, span: int) -> Part:
    """Return the part for these of a lane's five words of 5-bit codes."""
    lanes = span == 256  # as in `_codes`
    sizes = {"x": 10, "t": 4, "k": span // 64, "s": len(words)}
    moves = _moves(bit_places.five_bits(words, span))
    source = "c x t" if lanes else "c x"
    return Part("high", "q", 4, span, source, "w p c k g t s", sizes, moves, swapped=True)


def _by_row(first: str, last: str, count: int, word: int = 4) -> Part:
    """Return the part for `count` words of each 256 columns of a row."""
    return Part(first, last, word, 256, "c x", "c w p h g x", {"x": count})


def _factors(name: str, word: int, span: int) -> Part:
    """Return the part for one word per `span` columns; those of a group's rows follow each
    other."""
    return Part(name, name, word, span, "c", "c w p h g")


def _rewritten(name: str) -> tuple[np.dtype[np.void], tuple[Part, ...]]:
    """Return the parts of a type whose blocks `held` rewrites."""
    dtype = held_size.BLOCKS[name]
    if name == "tq1_0":
        return dtype, _TERNARY
    fields = dtype.fields
    assert fields is not None
    if name == "iq3_s":
        return dtype, (_codes("q", 4, 16), _NIBBLES, _factors("d", 2, 256))
    three = _numbers("low", 2, 32), _numbers("high", 1, 32)
    if name == "q3_k":
        three = _dense(range(2)), _dense(range(2, 3))
    codes = (_numbers("q", 4, 16),) if "q" in fields else three
    scales = _by_row("scale", "scale", fields["scale"][0].itemsize // 4)
    return dtype, (*codes, scales, _factors("d", 2, 256))


def _plane(name: str) -> Part:
    """Return the part for a half-precision number for each 32 columns: a lane reads those of rows
    g, g + 8, g + 16, g + 24 of its warp at once."""
    return Part(name, name, 2, 32, "c", "c w g p h")


_AFFINE = Part(
    "d", "scales", 4, 256, "c x", "c w p h g y", {"x": 4, "y": 4}, _moves(bit_places.six_bits())
)
_SIX = Part(
    "d", "low", 4, 256, "c x", "c w p h g y", {"x": 2, "y": 2}, _moves(bit_places.six_in_two())
)
_NIBBLES = Part(
    "scale", "scale", 4, 256, "c x", "c w p h g y", {"x": 1, "y": 1}, _moves(bit_places.nibbles())
)
_FIVES = _fives(range(4), 64), _fives(range(4, 5), 64)
_TERNARY = _numbers("q", 2, 32), _factors("d", 2, 256)
_BYTES = Part("q", "q", 2, 32, "c k t e", "w p c g t k e h", {"k": 2, "t": 4, "e": 2}, flip=0x8080)

PARTS: dict[str, tuple[np.dtype[np.void], tuple[Part, ...]]] = {
    "q4_0": (block_dtype("q4_0"), (_codes("q", 4, 16), _plane("d"))),
    "q4_1": (block_dtype("q4_1"), (_codes("q", 4, 16), _plane("d"), _plane("m"))),
    "q5_0": (block_dtype("q5_0"), (*_FIVES, _plane("d"))),
    "q5_1": (block_dtype("q5_1"), (*_FIVES, _plane("d"), _plane("m"))),
    "q8_0": (block_dtype("q8_0"), (_BYTES, _plane("d"))),
    "q4_k": (block_dtype("q4_k"), (_codes("q", 4, 32), _AFFINE)),
    "q5_k": (block_dtype("q5_k"), (_fives(range(4), 256), _fives(range(4, 5), 256), _AFFINE)),
    "q6_k": (
        block_dtype("q6_k"),
        (
            _codes("low", 4, 64),
            _codes("high", 2, 32),
            _by_row("scale", "scale", 4),
            _factors("d", 2, 256),
        ),
    ),
    "iq4_nl": (block_dtype("iq4_nl"), (_numbers("q", 4, 16, PAIRED), _factors("d", 2, 32))),
    "iq4_xs": (block_dtype("iq4_xs"), (_numbers("q", 4, 16, PAIRED), _SIX)),
    "mxfp4": (block_dtype("mxfp4"), (_numbers("q", 4, 16), _factors("e", 1, 32))),
    "nvfp4": (block_dtype("nvfp4"), (_numbers("q", 4, 8), _factors("scale", 4, 64))),
    "q2_k": (
        block_dtype("q2_k"),
        (_numbers("q", 2, 32), _by_row("scales", "scales", 4), _by_row("d", "dmin", 1)),
    ),
    "tq2_0": (block_dtype("tq2_0"), _TERNARY),
    **{name: _rewritten(name) for name in held_size.BLOCKS},
}
"""The block of each type in memory, and the parts of a unit in order."""


def unit_of(name: str, columns: int) -> int:
    """Return the columns of a unit for a matrix of `columns`.

    Raises:
        Unsupported: the columns do not divide into units, or this type is not packed.
    """
    if name not in PARTS:
        raise Unsupported(f"weights of type {name.upper()} are not packed")
    unit = 256 if columns % 256 == 0 else 64
    if columns % unit or unit % quant.get(name).block:
        raise Unsupported(
            f"a matrix of {columns} columns in {name.upper()} has no packing",
            fix="columns must be a multiple of 64",
        )
    return unit


def units_of(name: str) -> tuple[int, ...]:
    """Return the numbers of columns that units of a type may have."""
    return (256,) if quant.get(name).block == 256 else (64, 256)


def spelt(type: str) -> str:
    """Return the name of a type in kernels, for instance "Q80"."""
    return type.upper().replace("_", "")


def format_name(type: str, unit: int) -> str:
    """Return the name of a packed format in kernels, for instance "Q4K" or "Q80<64>"."""
    return spelt(type) if len(units_of(type)) == 1 else f"{spelt(type)}<{unit}>"


@cache
def unit_bytes(name: str, unit: int) -> int:
    """Return the bytes of a unit of 128 rows."""
    return sum(part.nbytes(unit) for part in PARTS[name][1])


def pack(name: str, raw: torch.Tensor, unit: int) -> torch.Tensor:
    """Pack a matrix: uint8 [N, bytes of a row] as in memory -> uint8 [ceil(N / 128), K / unit,
    bytes of a unit], on the same device."""
    units = raw.shape[1] * PACK_ROWS // unit_bytes(name, unit)
    groups = -(-len(raw) // PACK_ROWS)
    out = raw.new_zeros(groups, units, unit_bytes(name, unit))
    step = _groups_at_once(units * unit)
    for at in range(0, groups, step):
        rows = raw[at * PACK_ROWS : (at + step) * PACK_ROWS]
        missing = -len(rows) % PACK_ROWS
        if missing:
            rows = torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))
        packed = out[at : at + step]
        for part, file, place in _pairs(name, rows, packed, unit):
            words = _read(part, file)
            if part.flip:
                words = words ^ _like(words, part.flip)
            source, target = _views(part, words, place, unit)
            _carry(part, source, target, forth=True)
    return out


def unpack(name: str, packed: torch.Tensor, unit: int, rows: int) -> torch.Tensor:
    """Invert :func:`pack`: uint8 [groups, units, bytes of a unit] -> [rows, bytes]."""
    groups, units, size = packed.shape
    raw = packed.new_zeros(groups * PACK_ROWS, units * size // PACK_ROWS)
    step = _groups_at_once(units * unit)
    for at in range(0, groups, step):
        inside, outside = packed[at : at + step], raw[at * PACK_ROWS : (at + step) * PACK_ROWS]
        for part, file, place in _pairs(name, outside, inside, unit):
            words = torch.zeros(file.shape, dtype=torch.uint8, device=file.device).flatten(1)
            words = words.view(_WORDS[part.word])
            source, target = _views(part, words, place, unit)
            _carry(part, source, target, forth=False)
            if part.flip:
                words ^= _like(words, part.flip)
            order = _order(part, file)  # may hold bits of other parts already
            order |= words.view(torch.uint8).view(order.shape)
    return raw[:rows]


def _groups_at_once(columns: int) -> int:
    return max(1, CHUNK // (PACK_ROWS * columns))


def _pairs(
    name: str, raw: torch.Tensor, packed: torch.Tensor, unit: int
) -> Iterator[tuple[Part, torch.Tensor, torch.Tensor]]:
    """Yield each part with its bytes in the file [rows, blocks, bytes] and in the packed matrix
    [groups, units, bytes], both views."""
    dtype, parts = PARTS[name]
    blocks = raw.view(len(raw), -1, dtype.itemsize)
    fields = dtype.fields
    assert fields is not None
    at = 0
    for part in parts:
        start, (last, end) = fields[part.first][1], fields[part.last][:2]
        place = packed[:, :, at : at + part.nbytes(unit)]
        yield part, blocks[:, :, start : end + last.itemsize], place
        at += part.nbytes(unit)


def _order(part: Part, file: torch.Tensor) -> torch.Tensor:
    """Return file bytes in the order in which they form words."""
    return file.view(*file.shape[:2], -1, 2, 2).transpose(3, 4) if part.swapped else file


def _read(part: Part, file: torch.Tensor) -> torch.Tensor:
    """Return file bytes as words [rows, words]."""
    return _order(part, file).reshape(len(file), -1).contiguous().view(_WORDS[part.word])


def _views(
    part: Part, words: torch.Tensor, place: torch.Tensor, unit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both sides as [dimensions that moves index, shared dimensions], with shared dimensions
    in the same order."""
    file, unit_sizes = part.shapes(unit)
    groups, units = place.shape[:2]
    source = {"G": groups, **_ROWS, "U": units, **file}
    target = {"G": groups, "U": units, **unit_sizes}
    shared = [name for name in target if name in source]

    def view(x: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
        names = list(sizes)
        order = [name for name in names if name not in shared] + shared
        return x.view(*sizes.values()).permute([names.index(name) for name in order])

    return view(words, source), view(place.view(_WORDS[part.word]), target)


def _carry(part: Part, source: torch.Tensor, target: torch.Tensor, forth: bool) -> None:
    """Move words from the file's side to the packed side (`forth`), or back."""
    if part.moves is None:
        target.copy_(source) if forth else source.copy_(target)
        return
    for move in part.moves:
        if forth:
            _merge(target[move.target], source[move.source], move.shift, move.mask)
        else:
            mask = _signed((move.mask & 0xFFFFFFFF) << 32 >> 32 + move.shift & 0xFFFFFFFF)
            _merge(source[move.source], target[move.target], -move.shift, mask)


def _merge(into: torch.Tensor, words: torch.Tensor, shift: int, mask: int) -> None:
    """Compute into |= words shifted up by `shift`, at the bits of `mask`."""
    moved = words << shift if shift > 0 else words >> -shift if shift < 0 else words
    into |= moved & mask if moved is words else moved.bitwise_and_(mask)


def _like(words: torch.Tensor, value: int) -> torch.Tensor:
    """Return `value` as a word of the same type."""
    bits = 8 * words.element_size()
    signed = value - (value >> (bits - 1) << bits)
    return torch.tensor(signed, dtype=words.dtype, device=words.device)
