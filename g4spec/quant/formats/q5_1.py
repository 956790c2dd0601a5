"""Q5_1: 32 values of 5 bits with a scale and a minimum, byte for byte as ggml's C reference
without an importance matrix.

Layout: half-precision scale d and minimum m, the fifth bits (value j at bit j of 32), 16 bytes of
lower four bits: value j in the lower half of byte j, value j + 16 in the upper. A value is
d * code + m.
Source: ggml `block_q5_1`; rounding: `g4spec.quant.plain`.
"""

import numpy as np

from g4spec.quant import plain
from g4spec.quant.format import Bytes, Factors, Floats, Format, halves, in_batches

DTYPE = np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("q", "u1", 16)])


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    return in_batches(x, plain.BATCH, _encode, weights)


def _encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, m, codes = plain.shifted(x, 31, weights)
    out = np.empty(len(d), DTYPE)
    out["d"], out["m"] = d, m
    out["high"], out["q"] = plain.fifths(codes), plain.nibbles(codes)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    out = plain.codes_of(blocks["q"], blocks["high"]).astype(np.float32)
    out *= blocks["d"].astype(np.float32)[:, None]
    out += blocks["m"].astype(np.float32)[:, None]
    return out.reshape(-1)


def bound(x: Floats) -> Floats:
    return plain.shifted_bound(x, 31)


FORMAT = Format(
    "q5_1",
    7,
    plain.BLOCK,
    DTYPE.itemsize,
    9,
    encode,
    decode,
    bound=bound,
    weighted=True,
    factors=Factors(halves(0, 2), 31),
)
