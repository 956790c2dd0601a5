"""IQ4_NL: 32 values of 4 bits, codes of a table, with a scale.

Layout: half-precision scale d, 16 bytes of codes: value j in the lower half of byte j, value j + 16
in the upper. A value is d * LINEAR_4[code].
Source: ggml `block_iq4_nl`.
"""

import numpy as np

from g4spec.quant import codebook
from g4spec.quant.format import Bytes, Factors, Floats, Format, halves

BLOCK = 32
DTYPE = np.dtype([("d", "<f2"), ("q", "u1", 16)])


def decode(raw: Bytes) -> Floats:
    blocks = raw.view(DTYPE)
    values = codebook.LINEAR_4[codebook.nibbles(blocks["q"])]
    return codebook.spread(blocks["d"].astype(np.float32), values)


FORMAT = Format("iq4_nl", 20, BLOCK, DTYPE.itemsize, 25, decode=decode,
                factors=Factors(halves(0), 127, b"\x88" * 16))  # fmt: skip
