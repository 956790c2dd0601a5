"""Q4_1: 32 values of 4 bits with a scale and a minimum, byte for byte as ggml's C reference
without an importance matrix.

Layout: half-precision scale d and minimum m, 16 bytes of codes: value j in the lower half of byte
j, value j + 16 in the upper. A value is d * code + m.
Source: ggml `block_q4_1`; rounding: `g4spec.quant.plain`.
"""

import numpy as np

from g4spec.quant import plain
from g4spec.quant.format import Bytes, Factors, Floats, Format, halves, in_batches

DTYPE = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    return in_batches(x, plain.BATCH, _encode, weights)


def _encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, m, codes = plain.shifted(x, 15, weights)
    out = np.empty(len(d), DTYPE)
    out["d"], out["m"] = d, m
    out["q"] = plain.nibbles(codes)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    out = plain.codes_of(blocks["q"]).astype(np.float32)
    out *= blocks["d"].astype(np.float32)[:, None]
    out += blocks["m"].astype(np.float32)[:, None]
    return out.reshape(-1)


def bound(x: Floats) -> Floats:
    return plain.shifted_bound(x, 15)


FORMAT = Format(
    "q4_1",
    3,
    plain.BLOCK,
    DTYPE.itemsize,
    3,
    encode,
    decode,
    bound=bound,
    weighted=True,
    factors=Factors(halves(0, 2), 15),
)
