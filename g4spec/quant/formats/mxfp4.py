"""MXFP4: 32 4-bit floats (E2M1) with a power of two (E8M0), as OCP Microscaling defines them.

Layout: one byte e, 16 bytes of codes: value j in the lower half of byte j, value j + 16 in the
upper. A value is 2 ** (e - 128) * E2M1[code], E2M1 holding twice the floats; e = 255 is no number.
No `general.file_type` means it: that of llama.cpp's MXFP4_MOE is for experts in it, all else Q8_0.
Source: ggml `block_mxfp4`, `ggml_e8m0_to_fp32_half`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors

BLOCK = 32
DTYPE = np.dtype([("e", "u1"), ("q", "u1", 16)])


LAST = 252
"""From the next power on the largest codes overflow float32."""


def power(e: Bytes) -> Floats:
    """2 ** (e - 128), of e = 255 as ggml has it: 2 ** 127."""
    out: Floats = np.ldexp(np.float32(1), e.astype(np.int32) - 128)
    return out


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    return codebook.spread(power(blocks["e"]), codebook.E2M1[codebook.nibbles(blocks["q"])])


def _factors(blocks: Bytes) -> Floats:
    e = blocks[:, 0]
    return np.where(e > LAST, np.float32(np.inf), power(e))[None]


FORMAT = Format(
    "mxfp4", 39, BLOCK, DTYPE.itemsize, decode=decode, factors=ScaleFactors(_factors, 12)
)
