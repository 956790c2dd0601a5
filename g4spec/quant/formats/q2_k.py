"""Q2_K: 256 values in 16 groups of 16, each with a 4-bit scale and minimum; 2 bits a value.

Layout: 16 bytes, a scale and above it a minimum; 64 bytes of codes: of each half of 128 values,
value l + 32 k in bits 2 k and 2 k + 1 of byte l; half-precision d and dmin. A value is
d * scale * code - dmin * minimum.
Source: ggml `block_q2_K`; search for scales: `g4spec.quant.affine`.
"""

from dataclasses import replace

import numpy as np

from g4spec.quant import affine
from g4spec.quant.format import Bytes, Floats, Format, ScaleFactors, half_factors

BLOCK, GROUPS, SIZE = 256, 16, 16
STEPS = (-1.0, -1.3, -0.7, -0.35, 0.0, 0.4, 0.8, 1.2)
LAYOUT = affine.Layout(top=3, rounds=1, groups=GROUPS, size=SIZE, most=15, steps=STEPS)
WEIGHTED = replace(
    LAYOUT,
    rounds=2,
    steps=(0.0, *(s / 10 for s in range(-9, 10) if s), -1.3, -1.0),
    starts=((0.0, -0.25, 0.25), (-1.0, -1.25, -1.5), (-2.0, -2.5, -3.0)),
    quarters=3,
)
"""Search with weights: with few codes and uneven weights, the best scales are farther from the
first guess, and clipping the largest values costs more divergence than in other types."""
F = np.float32
DTYPE = np.dtype([("scales", "u1", GROUPS), ("q", "u1", (2, 32)), ("d", "<f2"), ("dmin", "<f2")])
_PLACES = np.arange(0, 8, 2, dtype=np.uint8)[:, None]


def encode(x: Floats, weights: Floats | None = None) -> Bytes:
    found = affine.fit(x, LAYOUT if weights is None else WEIGHTED, weights)
    code = found.codes.astype(np.uint8).transpose(2, 1, 0).reshape(-1, 2, 4, 32)
    out = np.empty(len(found.d), DTYPE)
    out["d"], out["dmin"] = found.d, found.dmin
    out["scales"] = (found.scale.astype(np.uint8) | found.least.astype(np.uint8) << 4).T
    out["q"] = np.bitwise_or.reduce(code << _PLACES, axis=2)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    """Dequantize in the order of operations of ggml's `dequantize_row_q2_K`."""
    blocks = raw.view(DTYPE)
    d, dmin, scales = blocks["d"].astype(F), blocks["dmin"].astype(F), blocks["scales"]
    out = (blocks["q"][:, :, None] >> _PLACES & 3).reshape(-1, GROUPS, SIZE).astype(F)
    out *= (d[:, None] * (scales & 15))[:, :, None]
    out -= (dmin[:, None] * (scales >> 4))[:, :, None]
    return out.reshape(-1)


def bound(x: Floats) -> Floats:
    return affine.bound(x, LAYOUT)


FORMAT = Format(
    "q2_k",
    type=10,
    block=BLOCK,
    block_bytes=DTYPE.itemsize,
    file_type=10,
    encode=encode,
    batch=BLOCK * affine.BATCH,
    decode=decode,
    bound=bound,
    fallback="q4_0",
    weighted=True,
    factors=ScaleFactors(half_factors(80, 82), 15 * 3),
)
