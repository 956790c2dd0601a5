"""Q6_K: 256 values in 16 groups of 16, each with a signed 8-bit scale; 6 bits a value.

Layout: 128 bytes with the lower four bits of the codes, 64 bytes with the upper two, 16 scales,
half-precision d. A value is d * scale * (code - 32). Each half of the block, 128 values, has 64
bytes of lower bits and 32 of upper bits. Value l + 32 k of a half (l < 32) has its lower bits in
byte l + 32 (k % 2), in the lower nibble for k < 2; its upper bits are bits 2 k and 2 k + 1 of byte
l.
Source: ggml `block_q6_K`; search for scales: `g4spec.quant.symmetric`.
"""

import numpy as np
from numpy.typing import NDArray

from g4spec.quant import symmetric
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK, GROUPS, SIZE = 256, 16, 16
ENDS = (-29.6, -30.2, -30.8, -31.4, -31.7, -32.0, -32.3, -32.6, -32.9)
CODES = symmetric.CodeSpec(
    groups=GROUPS,
    size=SIZE,
    ends=ENDS,
    end=-32,
    low=-128,
    high=127,
    round=symmetric.integer_codes(-32, 31),
    rms=False,
    unclipped=31.45,
)
F = np.float32
DTYPE = np.dtype(
    [("low", "u1", (2, 2, 32)), ("high", "u1", (2, 32)), ("scale", "i1", GROUPS), ("d", "<f2")]
)


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, scale, code = symmetric.fit(x, CODES, weights)
    return _packed(d, scale, symmetric.to_unsigned(code, -32))


def _packed(d: NDArray[np.float16], scale: Floats, code: Bytes) -> Bytes:
    """Pack d [n], scales [16, n] and codes [16, 16, n] (value of a group, group, block)."""
    out = np.empty(len(d), DTYPE)
    out["d"], out["scale"] = d, scale.T
    # index of a value = 128 half + 64 (upper nibble) + 32 (second byte) + 16 (group) + (its place)
    parts = code.reshape(SIZE, 2, 2, 2, 2, len(d)).transpose(1, 2, 3, 4, 0, 5)
    parts = parts.reshape(2, 2, 2, 32, len(d))
    low, high = parts & 15, parts >> 4
    out["low"] = np.moveaxis(low[:, 0] | low[:, 1] << 4, -1, 0)
    high = high[:, 0, 0] | high[:, 0, 1] << 2 | high[:, 1, 0] << 4 | high[:, 1, 1] << 6
    out["high"] = np.moveaxis(high, -1, 0)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    """Dequantize in the order of operations of ggml's `dequantize_row_q6_K`."""
    blocks = raw.view(DTYPE)
    low, high = blocks["low"], blocks["high"]
    code = np.empty((len(blocks), 2, 4, 32), np.uint8)
    code[:, :, :2], code[:, :, 2:] = low & 15, low >> 4
    upper = high[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    code |= upper << np.uint8(4)
    out = code.reshape(len(blocks), GROUPS, SIZE).astype(F)
    out -= F(32)
    out *= (blocks["d"].astype(F)[:, None] * blocks["scale"])[:, :, None]
    return out.reshape(-1)


def bound(x: Floats) -> Floats:
    return symmetric.bound(x, CODES)


FORMAT = Format(
    "q6_k",
    type=14,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=18,
    encode=encode,
    batch=BLOCK * symmetric.BATCH,
    decode=decode,
    bound=bound,
    fallback="q8_0",
    weighted=True,
    factors=ScaleFactors(half_factors(208), 127 * 32),
)
