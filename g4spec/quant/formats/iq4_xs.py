"""IQ4_XS: 256 values in 8 groups of 32, each with a signed 6-bit scale; 4-bit indices of a table.

Layout: half-precision d, 16 bits with the upper two bits of each scale, 4 bytes with their lower
four bits, two groups a byte, 16 bytes of codes a group as in IQ4_NL. A value is
d * (scale - 32) * LINEAR_4[code].
Source: ggml `block_iq4_xs`; search for scales: `g4spec.quant.symmetric`.
"""

import numpy as np

from g4spec.quant import codebook, symmetric
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors
from g4spec.quant.formats import iq4_nl

BLOCK, GROUPS, SIZE = 256, 8, 32
DTYPE = np.dtype([("d", "<f2"), ("high", "<u2"), ("low", "u1", 4), ("q", "u1", (GROUPS, 16))])
CODES = symmetric.CodeSpec(
    groups=GROUPS, size=SIZE, ends=iq4_nl.ENDS, end=-127, low=-32, high=31, round=iq4_nl.CODES.round
)
_GROUP = np.arange(GROUPS, dtype=np.uint16)


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, scale, value = symmetric.fit(x, CODES, weights)
    whole = symmetric.to_unsigned(scale, -32).T  # [n, groups]
    out = np.empty(len(d), DTYPE)
    out["d"] = d
    out["low"] = whole[:, 0::2] & 15 | (whole[:, 1::2] & 15) << 4
    out["high"] = np.bitwise_or.reduce((whole >> 4).astype(np.uint16) << 2 * _GROUP, axis=1)
    out["q"] = iq4_nl.packed(value.transpose(2, 1, 0))
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    low = np.stack((blocks["low"] & 15, blocks["low"] >> 4), axis=2).reshape(-1, GROUPS)
    scale = (blocks["high"][:, None] >> 2 * _GROUP & 3) << 4 | low
    factor = blocks["d"].astype(np.float32)[:, None] * (scale.astype(np.float32) - np.float32(32))
    return codebook.scale_values(factor, codebook.LINEAR_4[codebook.nibbles(blocks["q"])])


def bound(x: Floats) -> Floats:
    out: Floats = symmetric.bound(x, CODES) * iq4_nl.WIDEST
    return out


FORMAT = Format(
    "iq4_xs",
    type=23,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=30,
    encode=encode,
    batch=BLOCK * symmetric.BATCH,
    decode=decode,
    bound=bound,
    fallback="iq4_nl",
    weighted=True,
    factors=ScaleFactors(half_factors(0), 32 * 127),
)
