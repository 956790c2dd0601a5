"""Q2_K: 256 values in 16 groups of 16, each with a 4-bit scale and minimum; 2 bits a value.

Layout: 16 bytes, a scale and above it a minimum; 64 bytes of codes: of each half of 128 values,
value l + 32 k in bits 2 k and 2 k + 1 of byte l; half-precision d and dmin. A value is
d * scale * code - dmin * minimum.
Source: ggml `block_q2_K`.
"""

import numpy as np

from g4spec.quant.format import Bytes, Factors, Floats, Format, halves

BLOCK, GROUPS, SIZE = 256, 16, 16
F = np.float32
DTYPE = np.dtype([("scales", "u1", GROUPS), ("q", "u1", (2, 32)), ("d", "<f2"), ("dmin", "<f2")])
_PLACES = np.arange(0, 8, 2, dtype=np.uint8)[:, None]


def decode(raw: Bytes) -> Floats:
    """In the order of operations of ggml's `dequantize_row_q2_K`."""
    blocks = raw.view(DTYPE)
    d, dmin, scales = blocks["d"].astype(F), blocks["dmin"].astype(F), blocks["scales"]
    out = (blocks["q"][:, :, None] >> _PLACES & 3).reshape(-1, GROUPS, SIZE).astype(F)
    out *= (d[:, None] * (scales & 15))[:, :, None]
    out -= (dmin[:, None] * (scales >> 4))[:, :, None]
    return out.reshape(-1)


FORMAT = Format("q2_k", 10, BLOCK, DTYPE.itemsize, 10, decode=decode, fallback="q4_0",
                factors=Factors(halves(80, 82), 15 * 3))  # fmt: skip
