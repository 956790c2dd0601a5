"""TQ2_0: 256 ternary values of one half-precision scale; 2 bits a value.

Layout: 64 bytes of codes: of each half of 128 values, value l + 32 k in bits 2 k and 2 k + 1 of
byte l; half-precision d. A value is d * (code - 1); files of llama.cpp have codes 0 to 2.
Source: ggml `block_tq2_0`.
"""

import numpy as np

from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK = 256
F = np.float32
DTYPE = np.dtype([("q", "u1", (2, 32)), ("d", "<f2")])
_PLACES = np.arange(0, 8, 2, dtype=np.uint8)[:, None]


def decode(raw: Bytes) -> Floats:
    """Dequantize in the order of operations of ggml's `dequantize_row_tq2_0`."""
    blocks = raw.view(DTYPE)
    out = (blocks["q"][:, :, None] >> _PLACES & 3).reshape(-1, BLOCK).astype(F)
    out -= 1
    out *= blocks["d"].astype(F)[:, None]
    return out.reshape(-1)


FORMAT = Format(
    "tq2_0",
    type=35,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=37,
    decode=decode,
    fallback="q4_0",
    factors=ScaleFactors(half_factors(64), 2),
)
