"""IQ4_NL: 32 values of 4 bits, codes of a table, with a scale.

Layout: half-precision scale d, 16 bytes of codes: value j in the lower half of byte j, value j + 16
in the upper. A value is d * LINEAR_4[code].
Source: ggml `block_iq4_nl`; how scales are found: `g4spec.quant.symmetric`.
"""

import numpy as np

from g4spec.quant import codebook, symmetric
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, encode_in_batches, half_factors

BLOCK = 32
DTYPE = np.dtype([("d", "<f2"), ("q", "u1", 16)])
ENDS = (*range(-139, -106, 3), *range(101, 125, 4))
"""Around either end of the table: its values lie closer to each other on the negative side of 0."""
CODES = symmetric.CodeSpec(1, BLOCK, ENDS, -127, -1, 1, symmetric.table_codes(codebook.LINEAR_4))
WIDEST = np.float32(24)
"""Largest distance of two values in the table, which lie up to so many steps apart."""


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    return encode_in_batches(x, BLOCK * 8 * symmetric.BATCH, _encode, weights)


def _encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, value = symmetric.fit_single_group(x, CODES, weights)
    out = np.empty(len(d), DTYPE)
    out["d"], out["q"] = d, packed(value.T)
    return out.view(np.uint8)


def packed(value: Floats) -> Bytes:
    """Values of the table [..., 32] -> bytes [..., 16]: code j below code j + 16."""
    code: Bytes = np.searchsorted(codebook.LINEAR_4, value).astype(np.uint8)
    out: Bytes = code[..., :16] | code[..., 16:] << np.uint8(4)
    return out


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    values = codebook.LINEAR_4[codebook.nibbles(blocks["q"])]
    return codebook.spread(blocks["d"].astype(np.float32), values)


def bound(x: Floats) -> Floats:
    """Half the largest distance in the table, and the error of the scale."""
    step = np.abs(x.reshape(-1, BLOCK)).max(axis=1) / np.float32(100)
    allowed = step * (WIDEST / 2 + np.float32(127 * 2.0**-11)) + np.float32(127 * 2.0**-25)
    return np.repeat(allowed, BLOCK)


FORMAT = Format(
    "iq4_nl",
    20,
    BLOCK,
    DTYPE.itemsize,
    25,
    encode,
    decode,
    bound=bound,
    weighted=True,
    factors=ScaleFactors(half_factors(0), 127, b"\x88" * 16),
)
