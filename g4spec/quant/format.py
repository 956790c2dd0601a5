"""Format: the description of one quant type, with its sizes, encoder and decoder."""

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
"""Maximum number of dimensions that every numpy version supports."""
DECODE_BATCH = 1 << 18
"""Number of values dequantized at once, so that temporaries are small compared to the result."""


class Unrepresentable(ValueError):
    """Error for a value that a format cannot hold.

    Attributes:
        index: flat index in the array of values.
        value: the value.
    """

    def __init__(self, index: int, value: float) -> None:
        self.index, self.value = index, value
        super().__init__(f"value {value} at {index}")


@dataclass(frozen=True, slots=True)
class ScaleFactors:
    """Floating-point factors of the blocks of a type, to check files without dequantizing them.

    Attributes:
        read: blocks [n, block_bytes] -> factors, float32 [k, n]. A factor is not finite if values
            of its block are not.
        max_multiplier: maximum absolute product of code and integer scale, by which a factor is
            multiplied.
        zero_codes: bytes after the factor in a block of zeros; a zero factor with other codes means
            that values were lost. None if the type has no such bytes.
    """

    read: Callable[[Bytes], Floats]
    max_multiplier: float
    zero_codes: bytes | None = None


def half_factors(*at: int) -> Callable[[Bytes], Floats]:
    """Return a `ScaleFactors.read` of half-precision factors at these byte offsets in a block."""

    def read(blocks: Bytes) -> Floats:
        pairs = [np.ascontiguousarray(blocks[:, a : a + 2]).view("<f2").reshape(-1) for a in at]
        return np.stack(pairs).astype(np.float32)

    return read


@dataclass(frozen=True, slots=True)
class Format:
    """One ggml tensor type.

    Attributes:
        name: lower-case name, e.g. "q8_0".
        type: ggml type number.
        block: values per block.
        block_bytes: bytes per block.
        file_type: `general.file_type` of a file made with `--type NAME`; None if llama.cpp has no
            number for it.
        encode: float32 [n] (n a multiple of `block`) -> uint8; None if it cannot be written.
        batch: number of values that `encode` is given at a time, so that temporaries stay in a
            core's cache; 0: all.
        decode: uint8 -> float32; None if it cannot be read.
        stored: numpy type of unquantized values; None for blocks.
        bound: values [n] -> maximum error of each value that quantization explains; None if
            unknown.
        fallback: type for rows that do not divide into blocks; None for F16.
        factors: floating-point factors of blocks; required if the type has `decode` and blocks.
        exponent_mask: exponent bits of unquantized floats, all set in NaN and infinity; else 0.
        weighted: `encode` takes weights of the squared errors [n], above 0, as second argument. It
            minimizes the errors weighted by weight * (rms + |x|)^p, with p = 1/2 in most types. The
            weight alone (p = 0) would clip large values too readily, which costs types of few bits
            more divergence than the weights gain. With p = 1, as in ggml, the weighted error is
            larger than needed. Q2_K, which clips most, has p = 3/4, Q3_K 1/4 (its divergence is
            that of 1/2 within 1 %, its error never above ggml's), Q5_1 0.
    """

    name: str
    type: int
    block: int
    block_bytes: int
    file_type: int | None = None
    encode: Callable[..., Bytes] | None = None
    batch: int = 0
    decode: Callable[[Bytes], Floats] | None = None
    stored: str | None = None
    bound: Callable[[Floats], Floats] | None = None
    fallback: str | None = None
    factors: ScaleFactors | None = None
    weighted: bool = False
    exponent_mask: int = 0

    @property
    def quantized(self) -> bool:
        """True if values are stored in blocks that share a scale."""
        return self.block > 1

    @property
    def integer(self) -> bool:
        return self.stored is not None and np.dtype(self.stored).kind == "i"

    def row_bytes(self, n: int, name: str = "a tensor") -> int:
        """Return the bytes of a row of `n` values. Raises InputError unless `n` is a multiple of
        the block size."""
        if n % self.block:
            raise InputError(
                f"{name}: a row of {self.name.upper()} must divide into blocks",
                expected=f"a multiple of {self.block}",
                found=n,
            )
        return n // self.block * self.block_bytes

    def nbytes(self, shape: Sequence[int], name: str = "a tensor") -> int:
        """Return the bytes of a tensor of `shape` (PyTorch order)."""
        row = shape[-1] if shape else 1
        return prod(shape[:-1]) * self.row_bytes(row, name)

    def quantize(self, x: Floats, weights: Floats | None = None) -> Bytes:
        """Quantize values [..., n] to bytes [..., row_bytes].

        Args:
            weights: weights of the squared errors, above 0, broadcast to x; ignored by types that
                are not `weighted`.

        Raises Unrepresentable for a value that the type cannot hold.
        """
        if self.encode is None:
            raise Unsupported(f"type {self.name.upper()} cannot be written")
        rows = x.shape[:-1]
        size = self.row_bytes(x.shape[-1])
        flat = np.ascontiguousarray(x, np.float32).reshape(-1)
        if not self.quantized and not (good := np.isfinite(flat)).all():
            raise first_invalid(flat, good)  # encoders of blocks check by themselves
        spread = None
        if weights is not None and self.weighted:
            spread = np.ascontiguousarray(np.broadcast_to(weights, x.shape), np.float32).reshape(-1)
        batch = self.batch or max(len(flat), 1)
        return _encode_in_batches(flat, batch, self.encode, spread).reshape(*rows, size)

    def first_not_finite(self, raw: Bytes) -> Unrepresentable | None:
        """Return the first NaN or infinite value in the flat bytes of whole blocks, or None. Only
        the factors of blocks are checked."""
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
        assert self.exponent_mask, self.name
        bits = raw.view(f"<u{self.block_bytes}") & self.exponent_mask
        if int(bits.max()) < self.exponent_mask:
            return None
        x = self.decode(raw)
        return first_invalid(x, np.isfinite(x))

    def dequantize(self, raw: Bytes) -> Floats:
        """Dequantize bytes [..., row_bytes] to float32 [..., n]."""
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
        """Decode the bytes of a tensor to float32 of `shape`; integers and F64 keep their type."""
        if self.stored is not None and (self.integer or self.stored == "<f8"):
            return raw.view(self.stored).reshape(shape)
        return self.dequantize(raw.reshape(-1)).reshape(shape)


def is_valid_shape(shape: Sequence[int]) -> bool:
    """True if an array of this shape with 8 bytes per value can be addressed. Dimensions of 0 count
    as 1: numpy checks the others even if an array is empty."""
    return (
        len(shape) <= MAX_DIMS
        and min(shape, default=0) >= 0
        and prod(n or 1 for n in shape) < 1 << 60
    )


def first_invalid(x: Floats, good: NDArray[np.bool_]) -> Unrepresentable:
    """Return the error for the first value of `x` that is not `good`."""
    index = int(np.argmin(good.reshape(-1)))
    return Unrepresentable(index, float(x.reshape(-1)[index]))


def raise_to(x: Floats, quarters: int) -> Floats:
    """Return positive x to the power quarters / 4 (0 to 3), by roots: ten times as fast as
    `np.power`. `x` is overwritten."""
    if quarters == 0:
        x.fill(1)
        return x
    root = np.sqrt(x, out=x)
    if quarters == 1:
        np.sqrt(root, out=root)
    elif quarters == 3:
        root *= np.sqrt(root)
    return root


def columns(x: Floats, groups: int, size: int) -> Floats:
    """Transpose whole blocks to [size, groups * blocks]; groups of a block are `blocks` apart."""
    blocks = x.reshape(-1, groups, size)
    return np.ascontiguousarray(blocks.transpose(2, 1, 0)).reshape(size, -1)


def _encode_in_batches(
    x: Floats, size: int, encode: Callable[..., Bytes], weights: Floats | None
) -> Bytes:
    """Encode `size` values at a time; see `Format.batch`."""
    out: Bytes | None = None
    written = 0
    for at in range(0, max(len(x), 1), size):
        try:
            part = () if weights is None else (weights[at : at + size],)
            encoded = encode(x[at : at + size], *part)
        except Unrepresentable as e:
            raise Unrepresentable(at + e.index, e.value) from None
        if len(x) <= size:
            return encoded
        if out is None:  # the first batch tells the bytes per value
            out = np.empty(len(x) * len(encoded) // size, np.uint8)
        out[written : written + len(encoded)] = encoded
        written += len(encoded)
    assert out is not None
    return out


def check_finite(x: Floats, *factors: NDArray[np.float16]) -> None:
    """Raise Unrepresentable if a factor of a block is not finite, because a value of the block is
    not finite or too large. The error names the largest value of the first such block.

    Args:
        factors: arrays of one factor per block.
    """
    bad = ~np.isfinite(factors[0])
    for factor in factors[1:]:
        bad |= ~np.isfinite(factor)
    if bad.any():
        size, first = len(x) // len(bad), int(np.argmax(bad))
        block = np.abs(x[first * size : (first + 1) * size])
        index = first * size + int(np.argmax(block))  # a NaN counts as the largest
        raise Unrepresentable(index, float(x[index]))
