"""Q4_1: 32 values of 4 bits with a scale and a minimum. Without an importance matrix,
bytes equal those of ggml's C reference.

Layout: half-precision scale d and minimum m, 16 bytes of codes: value j in the lower half of byte
j, value j + 16 in the upper. A value is d * code + m.
Source: ggml `block_q4_1`; rounding: `g4spec.quant.legacy`.
"""

import numpy as np

from g4spec.quant import legacy
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

DTYPE = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, m, codes = legacy.encode_affine(x, 15, weights)
    out = np.empty(len(d), DTYPE)
    out["d"], out["m"] = d, m
    out["q"] = legacy.pack_nibbles(codes)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    out = legacy.unpack_codes(blocks["q"]).astype(np.float32)
    out *= blocks["d"].astype(np.float32)[:, None]
    out += blocks["m"].astype(np.float32)[:, None]
    return out.reshape(-1)


def bound(x: Floats) -> Floats:
    return legacy.affine_bound(x, 15)


FORMAT = Format(
    "q4_1",
    type=3,
    block=legacy.BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=3,
    encode=encode,
    batch=legacy.BATCH,
    decode=decode,
    bound=bound,
    weighted=True,
    factors=ScaleFactors(half_factors(0, 2), 15),
)
