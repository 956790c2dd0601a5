"""IQ2_XS: 256 values in 16 groups of 16, each with a 4-bit scale; 2.31 bits a value.

Layout: half-precision d; 32 words of 16 bits: the 9-bit index of a codebook entry of 8 values, and
a 7-bit index of their signs on top; 8 bytes of scales, two groups each. A value is
d * (scale + 1/2) / 4 * sign * entry.
Source: ggml `block_iq2_xs`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK = 256
DTYPE = np.dtype([("d", "<f2"), ("q", "<u2", (8, 4)), ("scales", "u1", 8)])
F = np.float32


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    scales = np.stack((blocks["scales"] & 15, blocks["scales"] >> 4), axis=2)  # [n, 8, 2]
    factor = blocks["d"].astype(F)[:, None, None] * (scales.astype(F) + F(0.5)) * F(0.25)
    values = codebook.grid("iq2_xs")[blocks["q"] & 511].reshape(-1, 8, 2, 16)
    signs = codebook.even_signs(blocks["q"] >> 9)
    return codebook.scale_values(factor, values, signs.reshape(values.shape))


FORMAT = Format(
    "iq2_xs",
    type=17,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=20,
    decode=decode,
    fallback="iq4_nl",
    factors=ScaleFactors(half_factors(0), 3.875 * 43),
)
