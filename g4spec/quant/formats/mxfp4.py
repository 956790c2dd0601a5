"""MXFP4: 32 4-bit floats (E2M1) with a power of two (E8M0), as OCP Microscaling defines them.

Layout: one byte e, 16 bytes of codes: value j in the lower half of byte j, value j + 16 in the
upper. A value is 2 ** (e - 128) * E2M1[code], where E2M1 holds twice the floats; e = 255 is NaN.
There is no `general.file_type` for it: llama.cpp's MXFP4_MOE has only experts in MXFP4, else Q8_0.
Source: ggml `block_mxfp4`, `ggml_e8m0_to_fp32_half`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors

BLOCK = 32
DTYPE = np.dtype([("e", "u1"), ("q", "u1", 16)])
MAX_EXPONENT = 252
"""Largest e for which no code overflows float32."""


def power(e: Bytes) -> Floats:
    """Return 2 ** (e - 128); for e = 255 this is 2 ** 127, as in ggml."""
    out: Floats = np.ldexp(np.float32(1), e.astype(np.int32) - 128)
    return out


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    return codebook.scale_values(power(blocks["e"]), codebook.E2M1[codebook.nibbles(blocks["q"])])


def _factors(blocks: Bytes) -> Floats:
    e = blocks[:, 0]
    return np.where(e > MAX_EXPONENT, np.float32(np.inf), power(e))[None]


FORMAT = Format(
    "mxfp4",
    type=39,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    decode=decode,
    factors=ScaleFactors(_factors, 12),
)
