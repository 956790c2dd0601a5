"""Q3_K: 256 values in 16 groups of 16, each with a signed 6-bit scale; 3 bits a value.

Layout: 32 bytes, bit g of byte l the upper bit of value l + 32 g; 64 bytes of lower two bits: of
each half of 128 values, value l + 32 k in bits 2 k and 2 k + 1 of byte l; 12 bytes of scales;
half-precision d. A value is d * (scale - 32) * (code - 4). Of the scales, byte l of the first 8 has
the lower four bits of scale l and, above them, of scale l + 8; byte l of the last 4 the upper two
bits of scales l, l + 4, l + 8 and l + 12.
Source: ggml `block_q3_K`; search for scales: `g4spec.quant.symmetric`.
"""

from dataclasses import replace

import numpy as np

from g4spec.quant import symmetric
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK, GROUPS, SIZE = 256, 16, 16
ENDS = (-2.7, -3.0, -3.3, -3.6, -3.9, -4.2, -4.5, -4.8, -5.1)
WEIGHTED = symmetric.CodeSpec(
    groups=GROUPS,
    size=SIZE,
    ends=ENDS,
    end=-4,
    low=-32,
    high=31,
    round=symmetric.integer_codes(-4, 3),
    by_scales=True,
    quarters=1,
    unclipped=3.45,
)
CODES = replace(WEIGHTED, ends=(-3.3, -4.2), refined=4)
"""Search without weights: 1.3 % more error than with all ends and neighbours, 4 times as fast."""
F = np.float32
DTYPE = np.dtype([("high", "u1", 32), ("low", "u1", (2, 32)), ("scales", "u1", 12), ("d", "<f2")])
_GROUP = np.arange(8, dtype=np.uint8)[:, None]
_PLACES = np.arange(0, 8, 2, dtype=np.uint8)[:, None]


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    d, scale, value = symmetric.fit(x, CODES if weights is None else WEIGHTED, weights)
    code = symmetric.to_unsigned(value, -4)  # [16 values, 16 groups, n]
    out = np.empty(len(d), DTYPE)
    out["d"], out["scales"] = d, pack_scales(symmetric.to_unsigned(scale, -32)).T
    # Bits are joined while blocks are innermost, the order of long rows; group g of a half is
    # values 16 * (g % 2) + l of 32 * (g // 2).
    low = _joined((code & np.uint8(3)).reshape(SIZE, 2, 4, 2, -1).transpose(2, 0, 1, 3, 4), 2)
    out["low"] = low.transpose(3, 1, 2, 0).reshape(-1, 2, 32)
    high = _joined((code > 3).view(np.uint8).reshape(SIZE, 8, 2, -1).swapaxes(0, 1), 1)
    out["high"] = high.transpose(2, 1, 0).reshape(-1, 32)
    return out.view(np.uint8)


def _joined(parts: Bytes, bits: int) -> Bytes:
    """Join numbers of `bits` bits [k, ...] to bytes, the first one lowest. Numbers are doubled
    because NumPy shifts bytes one by one."""
    out: Bytes = parts[-1].copy()
    for part in parts[-2::-1]:
        for _ in range(bits):
            out += out
        out |= part
    return out


def pack_scales(scale: Bytes) -> Bytes:
    """Pack 6-bit scales [16, n] into bytes [12, n]."""
    low, high = scale & np.uint8(15), scale >> np.uint8(4)
    return np.concatenate((_joined(low.reshape(2, 8, -1), 4), _joined(high.reshape(4, 4, -1), 2)))


def unpack_scales(packed: Bytes) -> Bytes:
    """Unpack bytes [n, 12] to 6-bit scales [n, 16]."""
    low, high = packed[:, :8], packed[:, 8:, None].transpose(0, 2, 1) >> _PLACES & 3
    out: Bytes = np.concatenate((low & 15, low >> 4), axis=1) | high.reshape(-1, GROUPS) << 4
    return out


def decode(raw: Bytes) -> Floats:
    """Dequantize in the order of operations of ggml's `dequantize_row_q3_K`."""
    blocks = raw.view(DTYPE)
    code = blocks["low"][:, :, None] >> _PLACES & 3  # [n, 2, 4, 32]
    code |= (blocks["high"][:, None] >> _GROUP & 1).reshape(code.shape) << 2
    out = code.reshape(-1, GROUPS, SIZE).astype(F)
    out -= F(4)
    scale = unpack_scales(blocks["scales"]).astype(F) - F(32)
    out *= (blocks["d"].astype(F)[:, None] * scale)[:, :, None]
    return out.reshape(-1)


def bound(x: Floats) -> Floats:
    return symmetric.bound(x, CODES)


FORMAT = Format(
    "q3_k",
    type=11,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=11,
    encode=encode,
    batch=BLOCK * symmetric.BATCH,
    decode=decode,
    bound=bound,
    fallback="q4_0",
    weighted=True,
    factors=ScaleFactors(half_factors(108), 32 * 4),
)
