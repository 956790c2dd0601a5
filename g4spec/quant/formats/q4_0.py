"""Q4_0: 32 values of 4 bits with a scale. Without an importance matrix,
bytes equal those of ggml's C reference.

Layout: half-precision scale d, 16 bytes of codes: value j in the lower half of byte j, value j + 16
in the upper. A value is d * (code - 8).
Source: ggml `block_q4_0`; rounding: `g4spec.quant.legacy`.
"""

import numpy as np

from g4spec.quant import legacy
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

DTYPE = np.dtype([("d", "<f2"), ("q", "u1", 16)])


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, codes = legacy.encode_symmetric(x, 8, weights)
    out = np.empty(len(d), DTYPE)
    out["d"] = d
    out["q"] = legacy.pack_nibbles(codes)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    out = legacy.unpack_codes(blocks["q"]).astype(np.float32)
    out -= np.float32(8)
    out *= blocks["d"].astype(np.float32)[:, None]
    return out.reshape(-1)


def bound(x: Floats) -> Floats:
    return legacy.symmetric_bound(x, 8)


FORMAT = Format(
    "q4_0",
    type=2,
    block=legacy.BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=2,
    encode=encode,
    batch=legacy.BATCH,
    decode=decode,
    bound=bound,
    weighted=True,
    factors=ScaleFactors(half_factors(0), 8, b"\x88" * 16),
)
