"""IQ3_S: 256 values in 8 groups of 32, two groups a byte of 4-bit scales; 3.44 bits a value.

Layout: half-precision d; 64 bytes, the lower 8 bits of indices of codebook entries of 4 values; 8
bytes, their ninth bits; 32 bytes of signs; 4 bytes of scales. A value is
d * (1 + 2 * scale) * sign * entry.
Source: ggml `block_iq3_s`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK, GROUPS = 256, 8
DTYPE = np.dtype(
    [
        ("d", "<f2"),
        ("q", "u1", (GROUPS, 8)),
        ("high", "u1", GROUPS),
        ("signs", "u1", (GROUPS, 4)),
        ("scales", "u1", 4),
    ]
)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    high = np.unpackbits(blocks["high"][..., None], axis=2, bitorder="little")
    index = blocks["q"] | high.astype(np.uint16) << 8
    scales = np.stack((blocks["scales"] & 15, blocks["scales"] >> 4), axis=2).reshape(-1, GROUPS)
    factor = blocks["d"].astype(np.float32)[:, None] * (1 + 2 * scales).astype(np.float32)
    values = codebook.grid("iq3_s")[index].reshape(-1, GROUPS, 4, 8)
    return codebook.scale_values(factor, values, codebook.signs(blocks["signs"]))


FORMAT = Format(
    "iq3_s",
    type=21,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=26,
    decode=decode,
    fallback="iq4_nl",
    factors=ScaleFactors(half_factors(0), 31 * 15),
)
