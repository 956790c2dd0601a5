"""Q5_K: 256 values in 8 groups of 32, each with a 6-bit scale and minimum; 5 bits a value.

Layout: half-precision d and dmin, 12 bytes of scales and minima, 32 bytes whose bit g is the fifth
bit of a value in group g, 128 bytes of the lower four bits as in Q4_K. A value is
d * scale * code - dmin * minimum.
Source: ggml `block_q5_K`; search for scales: `g4spec.quant.affine`.
"""

import numpy as np

from g4spec.quant import affine, affine_blocks
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

LAYOUT = affine.Layout(top=31, rounds=1)
DTYPE = np.dtype(
    [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", (4, 32))]
)
_GROUP = np.arange(affine.GROUPS, dtype=np.uint8)


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    out, codes = affine_blocks.blocks(x, DTYPE, LAYOUT, weights)
    high = codes >> 4 << _GROUP[:, None]
    out["high"] = np.bitwise_or.reduce(high, axis=1).T
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    codes = affine_blocks.low_bits(blocks["q"])
    codes |= (blocks["high"][:, None] >> _GROUP[:, None] & np.uint8(1)) << np.uint8(4)
    return affine_blocks.values(blocks["d"], blocks["dmin"], blocks["scales"], codes)


def bound(x: Floats) -> Floats:
    return affine.bound(x, LAYOUT)


FORMAT = Format(
    "q5_k",
    type=13,
    block=affine.BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=16,
    encode=encode,
    batch=affine.BLOCK * affine.BATCH,
    decode=decode,
    bound=bound,
    fallback="q5_1",
    weighted=True,
    factors=ScaleFactors(half_factors(0, 2), 63 * 31),
)
