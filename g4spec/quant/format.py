"""What a quant type is: its place in a file, and how values become its blocks and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec.errors import InputError, Unsupported

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


MAX_DIMS = 32
"""What every numpy can hold."""
DECODE_BATCH = 1 << 18
"""Values dequantized together: more, and temporaries take several times the result's memory."""


class Unrepresentable(ValueError):
    """A value that a format cannot hold.

    Attributes:
        index: flat position in the array that was given. `value`: what stands there.
    """

    def __init__(self, index: int, value: float) -> None:
        self.index, self.value = index, value
        super().__init__(f"value {value} at {index}")


@dataclass(frozen=True, slots=True)
class ScaleFactors:
    """How a block's values scale, so that a file can be judged without dequantizing it.

    Attributes:
        read: blocks [n, block_bytes] -> what codes are multiplied by, float32 [k, n]; not
            finite where values would not be.
        largest: the most by which codes, and scales that are whole numbers, multiply a factor.
        zero: what follows the only factor in a block of zeros, where other codes beside a factor of
            zero are values lost; None where that cannot be told.
    """

    read: Callable[[Bytes], Floats]
    max_multiplier: float
    zero_codes: bytes | None = None


def half_factors(*at: int) -> Callable[[Bytes], Floats]:
    """A `ScaleFactors.read` of half-precision factors, `at` so many bytes from a block's start."""

    def read(blocks: Bytes) -> Floats:
        pairs = [np.ascontiguousarray(blocks[:, a : a + 2]).view("<f2").reshape(-1) for a in at]
        return np.stack(pairs).astype(np.float32)

    return read


@dataclass(frozen=True, slots=True)
class Format:
    """One ggml tensor type.

    Attributes:
        name: as people type it, e.g. "q8_0". `type`: its number in the file.
        block: values in a block, `block_bytes`: bytes of a block.
        file_type: `general.file_type` of a file that has this type where `--type` of its name
            puts it, or None if llama.cpp has no number for that.
        encode: float32 [n] (n a multiple of `block`) -> uint8, or None: cannot be written.
        weighted: `encode` takes weights of the squared errors [n], above 0, as a second argument.
            What is minimised are these times the root of rms + |x|. By the weights alone large
            values would be cut off too readily, which costs Q2_K and Q3_K more divergence than
            the weights gain; by rms + |x|, as in ggml, the weighted error is larger than need be.
        decode: uint8 -> float32, or None: cannot be read.
        stored: numpy type of plain numbers, None for blocks.
        bound: values [n] -> largest error of each that quantizing explains, or None if unknown.
        fallback: type for rows that do not divide into blocks; None: F16.
        factors: of blocks; every type with `decode` and blocks has them.
    """

    name: str
    type: int
    block: int
    block_bytes: int
    file_type: int | None = None
    encode: Callable[..., Bytes] | None = None
    decode: Callable[[Bytes], Floats] | None = None
    stored: str | None = None
    bound: Callable[[Floats], Floats] | None = None
    fallback: str | None = None
    factors: ScaleFactors | None = None
    weighted: bool = False

    @property
    def quantized(self) -> bool:
        """Whether values lose precision in blocks that share a scale."""
        return self.block > 1

    @property
    def integer(self) -> bool:
        return self.stored is not None and np.dtype(self.stored).kind == "i"

    def row_bytes(self, n: int, name: str = "a tensor") -> int:
        """Bytes of a row of `n` values; InputError if they do not divide into blocks."""
        if n % self.block:
            raise InputError(
                f"{name}: a row of {self.name.upper()} must divide into blocks",
                expected=f"a multiple of {self.block}",
                found=n,
            )
        return n // self.block * self.block_bytes

    def nbytes(self, shape: Sequence[int], name: str = "a tensor") -> int:
        """Bytes of a tensor of `shape` (PyTorch order)."""
        row = shape[-1] if shape else 1
        return prod(shape[:-1]) * self.row_bytes(row, name)

    def quantize(self, x: Floats, weights: Floats | None = None) -> Bytes:
        """Values [..., n] -> bytes [..., row_bytes]. Raises Unrepresentable.

        Args:
            weights: of the values' squared errors, above 0, broadcast to x; without a meaning for
                types that are not `weighted`.
        """
        if self.encode is None:
            raise Unsupported(f"type {self.name.upper()} cannot be written")
        rows = x.shape[:-1]
        size = self.row_bytes(x.shape[-1])
        flat = np.ascontiguousarray(x, np.float32).reshape(-1)
        if not self.quantized and not (good := np.isfinite(flat)).all():
            raise first_invalid(flat, good)  # blocks refuse by themselves
        if weights is None or not self.weighted:
            return self.encode(flat).reshape(*rows, size)
        spread = np.ascontiguousarray(np.broadcast_to(weights, x.shape), np.float32)
        return self.encode(flat, spread.reshape(-1)).reshape(*rows, size)

    def first_not_finite(self, raw: Bytes) -> Unrepresentable | None:
        """The first value that is NaN or infinite in flat bytes of whole blocks, or None. Blocks
        are judged by their factors."""
        if self.integer or self.decode is None or not len(raw):
            return None
        if self.quantized:
            assert self.factors is not None, self.name
            blocks = raw.reshape(-1, self.block_bytes)
            good: NDArray[np.bool_] = np.isfinite(self.factors.read(blocks)).min(axis=0)
            at = int(np.argmin(good))
            if good[at]:
                return None
            with np.errstate(all="ignore"):
                x = self.decode(np.ascontiguousarray(blocks[at]))
            bad = first_invalid(x, np.isfinite(x))
            return Unrepresentable(at * self.block + bad.index, bad.value)
        ones = {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F800000}[self.name]  # all of the exponent
        if int((raw.view(f"<u{self.block_bytes}") & ones).max()) < ones:
            return None
        x = self.decode(raw)
        return first_invalid(x, np.isfinite(x))

    def dequantize(self, raw: Bytes) -> Floats:
        """Bytes [..., row_bytes] -> float32 [..., n]."""
        if self.decode is None:
            raise Unsupported(
                f"type {self.name.upper()} has no dequantizer here",
                fix="use a file of another type: F16, BF16 and Q8_0 are always read",
            )
        shape = (*raw.shape[:-1], raw.shape[-1] // self.block_bytes * self.block)
        flat = np.ascontiguousarray(raw).reshape(-1)
        step = DECODE_BATCH // self.block * self.block_bytes
        if not self.quantized or len(flat) <= step:
            return self.decode(flat).reshape(shape)
        out = np.empty(prod(shape), np.float32)
        for at in range(0, len(flat), step):
            part = self.decode(flat[at : at + step])
            first = at // self.block_bytes * self.block
            out[first : first + len(part)] = part
        return out.reshape(shape)

    def array(self, raw: Bytes, shape: Sequence[int]) -> NDArray[Any]:
        """Bytes of a tensor -> float32 of `shape`; integers and F64 keep their type."""
        if self.stored is not None and (self.integer or self.stored == "<f8"):
            return raw.view(self.stored).reshape(shape)
        return self.dequantize(raw.reshape(-1)).reshape(shape)


def is_valid_shape(shape: Sequence[int]) -> bool:
    """Whether there can be an array of this shape, of up to 8 bytes a value; of an empty one the
    other dimensions count too."""
    return (
        len(shape) <= MAX_DIMS
        and min(shape, default=0) >= 0
        and prod(n or 1 for n in shape) < 1 << 60
    )


def first_invalid(x: Floats, good: NDArray[np.bool_]) -> Unrepresentable:
    """The error for the first value of `x` that is not `good`."""
    index = int(np.argmin(good.reshape(-1)))
    return Unrepresentable(index, float(x.reshape(-1)[index]))


def encode_in_batches(
    x: Floats, size: int, encode: Callable[..., Bytes], weights: Floats | None = None
) -> Bytes:
    """`encode` on `size` values at a time, whose temporaries then stay in a core's cache."""
    parts = []
    for at in range(0, max(len(x), 1), size):
        try:
            part = () if weights is None else (weights[at : at + size],)
            parts.append(encode(x[at : at + size], *part))
        except Unrepresentable as e:
            raise Unrepresentable(at + e.index, e.value) from None
    return np.concatenate(parts)


def check_finite(x: Floats, *factors: NDArray[np.float16]) -> None:
    """Raise Unrepresentable for the largest value of the first block that has a factor which is
    not finite: the value is not finite itself, or too large. `factors`: one for each block."""
    bad = ~np.isfinite(factors[0])
    for factor in factors[1:]:
        bad |= ~np.isfinite(factor)
    if bad.any():
        size, first = len(x) // len(bad), int(np.argmax(bad))
        block = np.abs(x[first * size : (first + 1) * size])
        index = first * size + int(np.argmax(block))  # a NaN counts as the largest
        raise Unrepresentable(index, float(x[index]))
