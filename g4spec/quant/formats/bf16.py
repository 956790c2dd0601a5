"""BF16: the upper half of a float32, rounded to nearest even; a NaN stays a quiet NaN."""

import numpy as np

from g4spec.quant.format import Bytes, Floats, Format


def encode(x: Floats) -> Bytes:
    bits = x.view(np.uint32)
    out = bits >> 16
    nan = out | 64 if np.isnan(x).any() else None
    out &= 1
    out += 0x7FFF
    out += bits  # overflows for NaN only, which is replaced below
    out >>= 16
    if nan is not None:
        out = np.where(np.isnan(x), nan, out)
    return out.astype("<u2").view(np.uint8)


def decode(raw: Bytes) -> Floats:
    wide = raw.view("<u2").astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


FORMAT = Format(
    "bf16",
    type=30,
    block=1,
    block_bytes=2,
    file_type=32,
    encode=encode,
    decode=decode,
    exponent_mask=0x7F80,
)
