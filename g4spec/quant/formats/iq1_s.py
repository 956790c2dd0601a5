"""IQ1_S: 256 values in 8 groups of 32; 1.56 bits a value.

Layout: half-precision d; 32 bytes, the lower 8 bits of indices of codebook entries of 8 values; for
each group 16 bits: the upper 3 bits of its four indices, a 3-bit scale, and in the highest bit the
sign of DELTA. A value is d * (1 + 2 * scale) * (entry +- DELTA).
Source: ggml `block_iq1_s`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK, GROUPS = 256, 8
DTYPE = np.dtype([("d", "<f2"), ("q", "u1", (GROUPS, 4)), ("high", "<u2", GROUPS)])
_PLACES = np.arange(0, 12, 3, dtype=np.uint16)
F = np.float32


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    high = blocks["high"]
    index = blocks["q"] | (high[..., None] >> _PLACES & 7) << 8
    factor = blocks["d"].astype(F)[:, None] * (2 * (high >> 12 & 7) + 1).astype(F)
    values = codebook.grid("iq1")[index]
    values += np.where(high & 0x8000, -codebook.DELTA, codebook.DELTA)[..., None, None]
    return codebook.scale_values(factor, values)


FORMAT = Format(
    "iq1_s",
    type=19,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=24,
    decode=decode,
    fallback="iq4_nl",
    factors=ScaleFactors(half_factors(0), 15 * 1.125),
)
