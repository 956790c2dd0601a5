"""Q3_K: 256 values in 16 groups of 16, each with a signed 6-bit scale; 3 bits a value.

Layout: 32 bytes, bit g of byte l the upper bit of value l + 32 g; 64 bytes of lower two bits: of
each half of 128 values, value l + 32 k in bits 2 k and 2 k + 1 of byte l; 12 bytes of scales;
half-precision d. A value is d * (scale - 32) * (code - 4). Of the scales, byte l of the first 8 has
the lower four bits of scale l and, above them, of scale l + 8; byte l of the last 4 the upper two
bits of scales l, l + 4, l + 8 and l + 12.
Source: ggml `block_q3_K`.
"""

import numpy as np

from g4spec.quant.format import Bytes, Factors, Floats, Format, halves

BLOCK, GROUPS, SIZE = 256, 16, 16
F = np.float32
DTYPE = np.dtype([("high", "u1", 32), ("low", "u1", (2, 32)), ("scales", "u1", 12), ("d", "<f2")])
_GROUP = np.arange(8, dtype=np.uint8)[:, None]
_PLACES = np.arange(0, 8, 2, dtype=np.uint8)[:, None]


def unpack_scales(packed: Bytes) -> Bytes:
    """Bytes [n, 12] -> scales [n, 16], below 64."""
    low, high = packed[:, :8], packed[:, 8:, None].transpose(0, 2, 1) >> _PLACES & 3
    out: Bytes = np.concatenate((low & 15, low >> 4), axis=1) | high.reshape(-1, GROUPS) << 4
    return out


def decode(raw: Bytes) -> Floats:
    """In the order of operations of ggml's `dequantize_row_q3_K`."""
    blocks = raw.view(DTYPE)
    code = blocks["low"][:, :, None] >> _PLACES & 3  # [n, 2, 4, 32]
    code |= (blocks["high"][:, None] >> _GROUP & 1).reshape(code.shape) << 2
    out = code.reshape(-1, GROUPS, SIZE).astype(F)
    out -= F(4)
    scale = unpack_scales(blocks["scales"]).astype(F) - F(32)
    out *= (blocks["d"].astype(F)[:, None] * scale)[:, :, None]
    return out.reshape(-1)


FORMAT = Format("q3_k", 11, BLOCK, DTYPE.itemsize, 11, decode=decode, fallback="q4_0",
                factors=Factors(halves(108), 32 * 4))  # fmt: skip
