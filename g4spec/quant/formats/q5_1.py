"""Q5_1: 32 values of 5 bits with a scale and a minimum. Without an importance matrix,
bytes equal those of ggml's C reference.

Layout: half-precision scale d and minimum m, the fifth bits (value j at bit j of 32), 16 bytes of
lower four bits: value j in the lower half of byte j, value j + 16 in the upper. A value is
d * code + m.
Source: ggml `block_q5_1`; rounding: `g4spec.quant.legacy`.
"""

import numpy as np

from g4spec.quant import legacy
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

DTYPE = np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("q", "u1", 16)])


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, m, codes = legacy.encode_affine(x, 31, weights)
    out = np.empty(len(d), DTYPE)
    out["d"], out["m"] = d, m
    out["high"], out["q"] = legacy.pack_fifth_bits(codes), legacy.pack_nibbles(codes)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    out = legacy.unpack_codes(blocks["q"], blocks["high"]).astype(np.float32)
    out *= blocks["d"].astype(np.float32)[:, None]
    out += blocks["m"].astype(np.float32)[:, None]
    return out.reshape(-1)


def bound(x: Floats) -> Floats:
    return legacy.affine_bound(x, 31)


FORMAT = Format(
    "q5_1",
    type=7,
    block=legacy.BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=9,
    encode=encode,
    batch=legacy.BATCH,
    decode=decode,
    bound=bound,
    weighted=True,
    factors=ScaleFactors(half_factors(0, 2), 31),
)
