"""Q5_0: 32 values of 5 bits with a scale. Without an importance matrix,
bytes equal those of ggml's C reference.

Layout: half-precision scale d, the fifth bits (value j at bit j of 32), 16 bytes with the lower
four bits: value j in the lower half of byte j, value j + 16 in the upper. A value is
d * (code - 16).
Source: ggml `block_q5_0`; rounding: `g4spec.quant.legacy`.
"""

import numpy as np

from g4spec.quant import legacy
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

DTYPE = np.dtype([("d", "<f2"), ("high", "u1", 4), ("q", "u1", 16)])


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, codes = legacy.encode_symmetric(x, 16, weights)
    out = np.empty(len(d), DTYPE)
    out["d"] = d
    out["high"], out["q"] = legacy.pack_fifth_bits(codes), legacy.pack_nibbles(codes)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    out = legacy.unpack_codes(blocks["q"], blocks["high"]).astype(np.float32)
    out -= np.float32(16)
    out *= blocks["d"].astype(np.float32)[:, None]
    return out.reshape(-1)


def bound(x: Floats) -> Floats:
    return legacy.symmetric_bound(x, 16)


FORMAT = Format(
    "q5_0",
    type=6,
    block=legacy.BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=8,
    encode=encode,
    batch=legacy.BATCH,
    decode=decode,
    bound=bound,
    weighted=True,
    factors=ScaleFactors(half_factors(0), 16, b"\xff" * 4 + bytes(16)),
)
