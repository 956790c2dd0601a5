"""IQ3_XXS: 256 values in 8 groups of 32; 3.06 bits a value.

Layout: half-precision d; 64 bytes, indices of codebook entries of 4 values; for each group 32 bits:
four 7-bit indices of signs of 8 values, and a 4-bit scale on top. A value is
d * (scale + 1/2) / 2 * sign * entry.
Source: ggml `block_iq3_xxs`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK, GROUPS = 256, 8
DTYPE = np.dtype([("d", "<f2"), ("q", "u1", (GROUPS, 8)), ("word", "<u4", GROUPS)])
_PLACES = np.arange(0, 28, 7, dtype=np.uint32)
F = np.float32


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    word = blocks["word"]
    factor = blocks["d"].astype(F)[:, None] * ((word >> 28).astype(F) + F(0.5)) * F(0.5)
    values = codebook.grid("iq3_xxs")[blocks["q"]].reshape(-1, GROUPS, 4, 8)
    return codebook.scale_values(
        factor, values, codebook.even_signs(word[..., None] >> _PLACES & 127)
    )


FORMAT = Format(
    "iq3_xxs",
    type=18,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=23,
    decode=decode,
    fallback="iq4_nl",
    factors=ScaleFactors(half_factors(0), 7.75 * 62),
)
