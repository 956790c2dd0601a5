"""IQ1_M: 256 values in 16 groups of 16, each with a 3-bit scale; 1.75 bits a value.

Layout: 32 bytes with the lower 8 bits of indices of codebook entries of 8 values; 16 bytes, for two
indices each: upper 3 bits and sign of DELTA; four words of 16 bits: four scales each, and in the
upper 4 bits a part of the half-precision d, lowest part first. A value is
d * (1 + 2 * scale) * (entry +- DELTA).
Source: ggml `block_iq1_m`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors

BLOCK = 256
DTYPE = np.dtype([("q", "u1", (8, 4)), ("high", "u1", (8, 2)), ("scales", "<u2", 4)])
_QUARTERS = np.arange(0, 16, 4, dtype=np.uint16)
_PLACES = np.arange(0, 12, 3, dtype=np.uint16)
F = np.float32


def factor(words: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]) -> Floats:
    """Return d [n], assembled from the upper 4 bits of each word [n, 4]."""
    bits = np.bitwise_or.reduce(words >> 12 << _QUARTERS, axis=1)
    out: Floats = bits.astype("<u2").view("<f2").astype(F)
    return out


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    words = blocks["scales"]
    high = np.stack((blocks["high"] & 15, blocks["high"] >> 4), axis=3).reshape(-1, 8, 4)
    index = blocks["q"] | (high & 7).astype(np.uint16) << 8
    scale = (2 * (words[..., None] >> _PLACES & 7) + 1).reshape(-1, 8, 2)
    values = codebook.grid("iq1")[index]
    values += np.where(high & 8, -codebook.DELTA, codebook.DELTA)[..., None]
    return codebook.scale_values(
        factor(words)[:, None, None] * scale.astype(F), values.reshape(-1, 8, 2, 16)
    )


def _factors(blocks: Bytes) -> Floats:
    return factor(np.ascontiguousarray(blocks).view(DTYPE)["scales"].reshape(-1, 4))[None]


FORMAT = Format(
    "iq1_m",
    type=29,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=31,
    decode=decode,
    fallback="iq4_nl",
    factors=ScaleFactors(_factors, 15 * 1.125),
)
