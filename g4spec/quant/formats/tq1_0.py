"""TQ1_0: 256 ternary values of one half-precision scale; five values a byte.

Layout: 32 and 16 bytes of five digits, then 4 bytes of four; half-precision d. Digit k of byte l of
such a part of n bytes is value l + n k of the part. A byte is ceil(256 / 243 * number of five
digits, the first one highest): digit k is the integer part of 3 / 256 * (byte * 3^k modulo 256). A
value is d * (digit - 1).
Source: ggml `block_tq1_0`.
"""

import numpy as np

from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

F = np.float32
DTYPE = np.dtype([("q", "u1", 32), ("rest", "u1", 16), ("high", "u1", 4), ("d", "<f2")])
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


def _digits(part: Bytes, count: int) -> Bytes:
    """Return the first `count` digits of bytes [n, m], uint8 [n, count * m]."""
    turned = (part[:, None] * _POWERS[:count]).astype(np.uint16)
    return (turned * 3 >> 8).astype(np.uint8).reshape(len(part), -1)


def decode(raw: Bytes) -> Floats:
    """Dequantize in the order of operations of ggml's `dequantize_row_tq1_0`."""
    blocks = raw.view(DTYPE)
    parts = (("q", 5), ("rest", 5), ("high", 4))
    out = np.concatenate([_digits(blocks[name], n) for name, n in parts], axis=1).astype(F)
    out -= 1
    out *= blocks["d"].astype(F)[:, None]
    return out.reshape(-1)


FORMAT = Format(
    "tq1_0",
    type=34,
    block=256,
    block_bytes=DTYPE.itemsize,
    file_type=36,
    decode=decode,
    fallback="q4_0",
    factors=ScaleFactors(half_factors(52), 1),
)
