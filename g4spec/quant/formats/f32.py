"""F32: IEEE single precision."""

import numpy as np

from g4spec.quant.format import Bytes, Floats, Format


def encode(x: Floats) -> Bytes:
    return x.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    return raw.view("<f4")


FORMAT = Format(
    "f32",
    type=0,
    block=1,
    block_bytes=4,
    file_type=0,
    encode=encode,
    decode=decode,
    stored="<f4",
    exponent_mask=0x7F800000,
)
