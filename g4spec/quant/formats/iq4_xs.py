"""IQ4_XS: 256 values in 8 groups of 32, each with a signed 6-bit scale; codes of a table, 4 bits.

Layout: half-precision d, 16 bits with the upper two bits of each scale, 4 bytes with their lower
four bits, two groups a byte, 16 bytes of codes a group as in IQ4_NL. A value is
d * (scale - 32) * LINEAR_4[code].
Source: ggml `block_iq4_xs`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Factors, Floats, Format, halves

BLOCK, GROUPS, SIZE = 256, 8, 32
DTYPE = np.dtype([("d", "<f2"), ("high", "<u2"), ("low", "u1", 4), ("q", "u1", (GROUPS, 16))])
_GROUP = np.arange(GROUPS, dtype=np.uint16)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    low = np.stack((blocks["low"] & 15, blocks["low"] >> 4), axis=2).reshape(-1, GROUPS)
    scale = (blocks["high"][:, None] >> 2 * _GROUP & 3) << 4 | low
    factor = blocks["d"].astype(np.float32)[:, None] * (scale.astype(np.float32) - np.float32(32))
    return codebook.spread(factor, codebook.LINEAR_4[codebook.nibbles(blocks["q"])])


FORMAT = Format("iq4_xs", 23, BLOCK, DTYPE.itemsize, 30, decode=decode, fallback="iq4_nl",
                factors=Factors(halves(0), 32 * 127))  # fmt: skip
