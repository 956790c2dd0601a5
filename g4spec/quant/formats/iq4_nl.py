"""IQ4_NL: 32 values with a scale; 4-bit codes are indices of a table.

Layout: half-precision scale d, 16 bytes of codes: value j in the lower half of byte j, value j + 16
in the upper. A value is d * LINEAR_4[code].
Source: ggml `block_iq4_nl`; search for the best scale: `g4spec.quant.symmetric`.
"""

import numpy as np

from g4spec.quant import codebook, symmetric
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK = 32
DTYPE = np.dtype([("d", "<f2"), ("q", "u1", 16)])
ENDS = (*range(-139, -106, 3), *range(101, 125, 4))
"""See `CodeSpec.ends`: values near both ends of the table, -127 and 113."""
CODES = symmetric.CodeSpec(
    groups=1,
    size=BLOCK,
    ends=ENDS,
    end=-127,
    low=-1,
    high=1,
    round=symmetric.table_codes(codebook.LINEAR_4),
)
WIDEST = np.float32(24)
"""Largest distance between neighbouring values of the table."""


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, value = symmetric.fit_single_group(x, CODES, weights)
    out = np.empty(len(d), DTYPE)
    out["d"], out["q"] = d, packed(value.T)
    return out.view(np.uint8)


def packed(value: Floats) -> Bytes:
    """Pack values of the table [..., 32] into bytes [..., 16]; code j is the lower half of byte j,
    code j + 16 the upper half."""
    code: Bytes = np.searchsorted(codebook.LINEAR_4, value).astype(np.uint8)
    out: Bytes = code[..., :16] | code[..., 16:] << np.uint8(4)
    return out


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    values = codebook.LINEAR_4[codebook.nibbles(blocks["q"])]
    return codebook.scale_values(blocks["d"].astype(np.float32), values)


def bound(x: Floats) -> Floats:
    """Return the maximum error of each value: half the largest distance in the table, plus the
    rounding error of the scale."""
    step = np.abs(x.reshape(-1, BLOCK)).max(axis=1) / np.float32(100)
    allowed = step * (WIDEST / 2 + np.float32(127 * 2.0**-11)) + np.float32(127 * 2.0**-25)
    return np.repeat(allowed, BLOCK)


FORMAT = Format(
    "iq4_nl",
    type=20,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=25,
    encode=encode,
    batch=BLOCK * 8 * symmetric.BATCH,
    decode=decode,
    bound=bound,
    weighted=True,
    factors=ScaleFactors(half_factors(0), 127, b"\x88" * 16),
)
