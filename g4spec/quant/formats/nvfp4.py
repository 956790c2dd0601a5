"""NVFP4 as llama.cpp writes it: 64 4-bit floats (E2M1) in 4 groups of 16, each with an unsigned
8-bit float (E4M3) as its scale.

Layout: 4 bytes of scales, 8 bytes of codes per group: value j in the lower half of byte j, value
j + 8 in the upper. A value is scale / 2 * E2M1[code], where E2M1 holds twice the floats. The scale
code of NaN counts as 0. The scale of a whole matrix, which published files have, is a tensor of its
own (g4spec/runtime/loading.py).
Source: ggml `block_nvfp4`, `ggml_ue4m3_to_fp32`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors

BLOCK = 64
DTYPE = np.dtype([("scale", "u1", 4), ("q", "u1", (4, 8))])


def _half_scales() -> Floats:
    """Return half the scale for each of the 256 bytes; the sign bit is ignored, but byte 127
    (NaN) is 0 and byte 255 is not."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    value = np.where(
        exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0)
    )
    value[127] = 0
    return (value / 2).astype(np.float32)


HALF_SCALES = _half_scales()


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    values = codebook.E2M1[codebook.nibbles(blocks["q"])]
    return codebook.scale_values(HALF_SCALES[blocks["scale"]], values)


def _factors(blocks: Bytes) -> Floats:
    factors: Floats = HALF_SCALES[blocks[:, :4].T]
    return factors


FORMAT = Format(
    "nvfp4",
    type=40,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=39,
    decode=decode,
    factors=ScaleFactors(_factors, 12),
)
