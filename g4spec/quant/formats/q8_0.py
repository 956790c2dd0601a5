"""Q8_0: 32 signed bytes and one half-precision scale. Bytes equal those of ggml's C
reference.

The scale is amax / 127. Values are divided by the scale before it is rounded to half precision,
and rounded to the nearest integer, halves away from zero (C `roundf`).
Source: ggml `quantize_row_q8_0_ref`.
"""

import numpy as np

from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, first_invalid, half_factors

BLOCK = 32
DTYPE = np.dtype([("d", "<f2"), ("q", "i1", BLOCK)])
_SIGN = np.uint32(0x80000000)
_HALF = np.nextafter(np.float32(0.5), np.float32(0)).view(np.uint32)
"""Bits of the largest float below 0.5. Adding it and truncating is `roundf`; adding 0.5 would round
0.49999997 to 1."""


def encode(x: Floats) -> Bytes:
    work = np.abs(x)
    amax = work
    while len(amax) * BLOCK > len(x):  # halving flat arrays is 3 times faster than max(axis=1)
        amax = np.maximum(amax[0::2], amax[1::2])
    d = amax / np.float32(127)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        half = d.astype("<f2")
        inverse = np.float32(1) / d
        if not np.isfinite(half).all():
            raise first_invalid(x, np.isfinite((np.abs(x) / np.float32(127)).astype("<f2")))
    # 0 for all-zero blocks; and for scales below 2**-128, which have no finite inverse (there C
    # multiplies by infinity and the cast to a byte yields 0 on x86).
    inverse[~np.isfinite(inverse)] = 0
    np.multiply(x.reshape(-1, BLOCK), inverse[:, None], out=work.reshape(-1, BLOCK))
    bits = work.view(np.uint32) & _SIGN  # copysign(_HALF, work), 4 times faster
    bits |= _HALF
    work += bits.view(np.float32)
    out = np.empty(len(d), DTYPE)
    out["d"] = half
    out["q"] = work.reshape(-1, BLOCK)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    values = blocks["q"].astype(np.float32)
    values *= blocks["d"].astype(np.float32)[:, None]
    return values.reshape(-1)


def bound(x: Floats) -> Floats:
    """Return the error bound: half a step, plus 127 times the error of a scale rounded to 11 bits
    (below the normal range of half precision, to a multiple of 2**-24)."""
    step = np.abs(x.reshape(-1, BLOCK)).max(axis=1) / np.float32(127)
    return np.repeat(step * np.float32(0.5 + 127 * 2.0**-11) + np.float32(127 * 2.0**-25), BLOCK)


FORMAT = Format(
    "q8_0",
    type=8,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=7,
    encode=encode,
    decode=decode,
    bound=bound,
    factors=ScaleFactors(half_factors(0), 127, bytes(32)),
)
