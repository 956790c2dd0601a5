"""F16: IEEE half precision, rounded to nearest even."""

import numpy as np

from g4spec.quant.format import Bytes, Floats, Format, first_invalid


def encode(x: Floats) -> Bytes:
    """Raise Unrepresentable for values that round beyond 65504: they would become infinite."""
    with np.errstate(over="ignore"):
        half = x.astype("<f2")
    if not (good := np.isfinite(half)).all():
        raise first_invalid(x, good)
    return half.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    return raw.view("<f2").astype(np.float32)


FORMAT = Format(
    "f16",
    type=1,
    block=1,
    block_bytes=2,
    file_type=1,
    encode=encode,
    decode=decode,
    stored="<f2",
    exponent_mask=0x7C00,
)
