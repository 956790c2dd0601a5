"""IQ2_XXS: 256 values in 8 groups of 32; 2.06 bits a value.

Layout: half-precision d; for each group four bytes, indices of codebook entries of 8 values, and 32
bits: four 7-bit indices of signs of 8 values, and a 4-bit scale on top. A value is
d * (scale + 1/2) / 4 * sign * entry.
Source: ggml `block_iq2_xxs`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK, GROUPS = 256, 8
GROUP = np.dtype([("q", "u1", 4), ("word", "<u4")])
DTYPE = np.dtype([("d", "<f2"), ("groups", GROUP, GROUPS)])
_PLACES = np.arange(0, 28, 7, dtype=np.uint32)
F = np.float32


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    word = blocks["groups"]["word"]
    factor = blocks["d"].astype(F)[:, None] * ((word >> 28).astype(F) + F(0.5)) * F(0.25)
    values = codebook.grid("iq2_xxs")[blocks["groups"]["q"]]
    return codebook.scale_values(
        factor, values, codebook.even_signs(word[..., None] >> _PLACES & 127)
    )


FORMAT = Format(
    "iq2_xxs",
    type=16,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=19,
    decode=decode,
    fallback="iq4_nl",
    factors=ScaleFactors(half_factors(0), 3.875 * 43),
)
