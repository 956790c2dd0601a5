"""Quantized matrices in the order in which warps read them: a bijection of their bytes in memory
(`held`), which for most types are the file's.

Rows are taken in groups of 128, the last one padded with zero bytes, and columns in units of 256 or
64. The unit of a group is contiguous: first the parts that hold codes, then the parts that hold
scales. The result is [groups, units, bytes of a unit]. No value is computed: every bit of the file
has one place (`parts`), so :func:`unpack` returns the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch

from g4spec import quant
from g4spec.errors import Unsupported
from g4spec.quant import block_dtype
from g4spec.runtime.cuda.build.constants import PACK_ROWS
from g4spec.runtime.cuda.weights import bit_places, held_size
from g4spec.runtime.cuda.weights.parts import (
    PAIRED,
    ROWS,
    Part,
    by_row,
    codes,
    dense,
    factors,
    fives,
    join_bits,
    numbers,
    plane,
    signed,
)

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

CHUNK = 1 << 27
"""Values that are rearranged at a time, which bounds the memory needed besides the result."""


def _rewritten(name: str) -> tuple[np.dtype[np.void], tuple[Part, ...]]:
    """Return the parts of a type whose blocks `held` rewrites."""
    dtype = held_size.BLOCKS[name]
    if name == "tq1_0":
        return dtype, _TERNARY
    if name == "nvfp4":
        return dtype, (numbers("q", 4, 8), by_row("scale", "d", 2, span=64))
    fields = dtype.fields
    assert fields is not None
    if name == "iq3_s":
        return dtype, (codes("q", 4, 16), _NIBBLES, factors("d", 2, 256))
    three = numbers("low", 2, 32), numbers("high", 1, 32)
    if name == "q3_k":
        three = dense(range(2)), dense(range(2, 3))
    coded = (numbers("q", 4, 16),) if "q" in fields else three
    scales = by_row("scale", "scale", fields["scale"][0].itemsize // 4)
    return dtype, (*coded, scales, factors("d", 2, 256))


_AFFINE = Part(
    "d", "scales", 4, 256, "c x", "c w p h g y", {"x": 4, "y": 4}, join_bits(bit_places.six_bits())
)
_SIX = Part(
    "d", "low", 4, 256, "c x", "c w p h g y", {"x": 2, "y": 2}, join_bits(bit_places.six_in_two())
)
_NIBBLES = Part(
    "scale",
    "scale",
    4,
    256,
    "c x",
    "c w p h g y",
    {"x": 1, "y": 1},
    join_bits(bit_places.nibbles()),
)
_FIVES = fives(range(4), 64), fives(range(4, 5), 64)
_TERNARY = numbers("q", 2, 32), factors("d", 2, 256)
_BYTES = Part("q", "q", 2, 32, "c k t e", "w p c g t k e h", {"k": 2, "t": 4, "e": 2}, flip=0x8080)

PARTS: dict[str, tuple[np.dtype[np.void], tuple[Part, ...]]] = {
    "q4_0": (block_dtype("q4_0"), (codes("q", 4, 16), plane("d"))),
    "q4_1": (block_dtype("q4_1"), (codes("q", 4, 16), plane("d"), plane("m"))),
    "q5_0": (block_dtype("q5_0"), (*_FIVES, plane("d"))),
    "q5_1": (block_dtype("q5_1"), (*_FIVES, plane("d"), plane("m"))),
    "q8_0": (block_dtype("q8_0"), (_BYTES, plane("d"))),
    "q4_k": (block_dtype("q4_k"), (codes("q", 4, 32), _AFFINE)),
    "q5_k": (block_dtype("q5_k"), (fives(range(4), 256), fives(range(4, 5), 256), _AFFINE)),
    "q6_k": (
        block_dtype("q6_k"),
        (
            codes("low", 4, 64),
            codes("high", 2, 32),
            by_row("scale", "scale", 4),
            factors("d", 2, 256),
        ),
    ),
    "iq4_nl": (block_dtype("iq4_nl"), (numbers("q", 4, 16, PAIRED), factors("d", 2, 32))),
    "iq4_xs": (block_dtype("iq4_xs"), (numbers("q", 4, 16, PAIRED), _SIX)),
    "mxfp4": (block_dtype("mxfp4"), (numbers("q", 4, 16), factors("e", 1, 32))),
    "q2_k": (
        block_dtype("q2_k"),
        (numbers("q", 2, 32), by_row("scales", "scales", 4), by_row("d", "dmin", 1)),
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
    source = {"G": groups, **ROWS, "U": units, **file}
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
            mask = signed((move.mask & 0xFFFFFFFF) << 32 >> 32 + move.shift & 0xFFFFFFFF)
            _merge(source[move.source], target[move.target], -move.shift, mask)


def _merge(into: torch.Tensor, words: torch.Tensor, shift: int, mask: int) -> None:
    """Compute into |= words shifted up by `shift`, at the bits of `mask`."""
    moved = words << shift if shift > 0 else words >> -shift if shift < 0 else words
    into |= moved & mask if moved is words else moved.bitwise_and_(mask)


def _like(words: torch.Tensor, value: int) -> torch.Tensor:
    """Return `value` as a word of the same type."""
    number = signed(value, 8 * words.element_size())
    return torch.tensor(number, dtype=words.dtype, device=words.device)
