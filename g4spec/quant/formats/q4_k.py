"""Q4_K: 256 values in 8 groups of 32, each with a 6-bit scale and minimum; 4 bits a value.

Layout: half-precision d and dmin, 12 bytes of scales and minima, 128 bytes of codes: of each two
groups, the first in the lower halves of 32 bytes, the second in the upper halves. A value is
d * scale * code - dmin * minimum.
Source: ggml `block_q4_K`; search for scales: `g4spec.quant.affine`.
"""

import numpy as np

from g4spec.quant import affine, affine_blocks
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

LAYOUT = affine.Layout(top=15, rounds=2)
DTYPE = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("q", "u1", (4, 32))])


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    out, _ = affine_blocks.blocks(x, DTYPE, LAYOUT, weights)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    codes = affine_blocks.low_bits(blocks["q"])
    return affine_blocks.values(blocks["d"], blocks["dmin"], blocks["scales"], codes)


def bound(x: Floats) -> Floats:
    return affine.bound(x, LAYOUT)


FORMAT = Format(
    "q4_k",
    type=12,
    block=affine.BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=None,
    encode=encode,
    batch=affine.BLOCK * affine.BATCH,
    decode=decode,
    bound=bound,
    fallback="q5_0",
    weighted=True,
    factors=ScaleFactors(half_factors(0, 2), 63 * 15),
)
