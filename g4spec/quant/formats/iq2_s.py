"""IQ2_S: 256 values in 16 groups of 16, each with a 4-bit scale; 2.56 bits a value.

Layout: half-precision d; 32 bytes, the lower 8 bits of indices of codebook entries of 8 values; 32
bytes of signs; 8 bytes, the upper 2 bits of four indices each; 8 bytes of scales, two groups each.
A value is d * (scale + 1/2) / 4 * sign * entry.
Source: ggml `block_iq2_s`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK = 256
DTYPE = np.dtype(
    [
        ("d", "<f2"),
        ("q", "u1", (8, 4)),
        ("signs", "u1", (8, 4)),
        ("high", "u1", 8),
        ("scales", "u1", 8),
    ]
)
_PLACES = np.arange(0, 8, 2, dtype=np.uint8)
F = np.float32


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    high = blocks["high"][..., None] >> _PLACES & 3
    index = blocks["q"] | high.astype(np.uint16) << 8
    scales = np.stack((blocks["scales"] & 15, blocks["scales"] >> 4), axis=2)  # [n, 8, 2]
    factor = blocks["d"].astype(F)[:, None, None] * (scales.astype(F) + F(0.5)) * F(0.25)
    values = codebook.grid("iq2_s")[index].reshape(-1, 8, 2, 16)
    return codebook.scale_values(
        factor, values, codebook.signs(blocks["signs"]).reshape(values.shape)
    )


FORMAT = Format(
    "iq2_s",
    type=22,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=28,
    decode=decode,
    fallback="iq4_nl",
    factors=ScaleFactors(half_factors(0), 3.875 * 43),
)
