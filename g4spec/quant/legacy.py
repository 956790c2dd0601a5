"""What Q4_0, Q4_1, Q5_0 and Q5_1 share: blocks of 32 values with a half-precision scale.

Codes are byte for byte those of ggml's C reference on x86: the scale is divided by before it is
rounded to half precision, codes are truncated after adding a half, and where the scale has no
finite inverse (below 2**-128) they are 0, as the C cast of infinity to a byte.
Arrays are [32, blocks] meanwhile: numpy is faster on long rows.

With weights of the errors, scales are searched for instead, as in the larger types.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from g4spec.quant import affine, symmetric
from g4spec.quant.format import Bytes, Floats, check_finite

BLOCK = 32
BATCH = 1 << 16
"""Values computed together."""
F = np.float32
HALF = F(2.0**-11)
"""Relative error of a number in half precision."""
TINY = F(2.0**-25)
"""Its absolute error below the normal range."""
STEPS = np.arange(-10, 11, 2) / 10
"""With weights: where the largest value may lie, counted from the last code on its side."""
SPANS = (
    -3.0,
    -2.5,
    -2.0,
    -1.7,
    -1.4,
    -1.1,
    -0.9,
    -0.6,
    -0.4,
    -0.2,
    0.0,
    0.2,
    0.35,
    0.5,
    0.7,
    0.9,
    1.3,
)
"""With weights and a minimum: `affine.Layout.steps`."""


def encode_symmetric(
    x: Floats, half: int, weights: Floats | None = None
) -> tuple[NDArray[np.float16], Bytes]:
    """Scales [n] and codes [32, n] of values code - `half` times the scale.

    The value of largest magnitude (the first of several) becomes code 0, whatever its sign.
    Source: ggml `quantize_row_q4_0_ref`, `quantize_row_q5_0_ref`.
    """
    if weights is not None:
        d, values = symmetric.fit_single_group(x, _symmetric(half), weights)
        return d, symmetric.to_unsigned(values, -half)
    t = _columns(x)
    low, high = t.min(axis=0), t.max(axis=0)
    largest = np.where(-low > high, low, high)
    tie = np.flatnonzero((-low == high) & (high > 0))
    if len(tie):
        both = t[:, tie]
        largest[tie] = both[(np.abs(both) == high[tie]).argmax(axis=0), np.arange(len(tie))]
    largest += F(0)  # C starts from +0, which -0 does not exceed
    with np.errstate(all="ignore"):
        scale = np.divide(largest, F(-half), dtype=F)
        d = scale.astype(np.float16)
        check_finite(x, d)
    return d, _codes(t, scale, half + 0.5, 2 * half - 1)


def encode_affine(
    x: Floats, top: int, weights: Floats | None = None
) -> tuple[NDArray[np.float16], NDArray[np.float16], Bytes]:
    """Scales and minima [n], and codes [32, n] of values minimum + code * scale, code <= `top`.

    Source: ggml `quantize_row_q4_1_ref`, `quantize_row_q5_1_ref`.
    """
    if weights is not None:
        layout = affine.Layout(top, rounds=0, groups=1, size=BLOCK, steps=SPANS)
        return affine.fit_single_group(x, layout, weights)
    t = _columns(x)
    low, high = t.min(axis=0), t.max(axis=0)
    zero = np.flatnonzero(low == 0)
    if len(zero):  # of zeros, the first one gives its sign
        least = t[:, zero]
        low[zero] = least[(least == 0).argmax(axis=0), np.arange(len(zero))]
    high += F(0)  # +0 - -0 and +0 - +0 are both +0, as the first zero minus itself
    with np.errstate(all="ignore"):
        scale = (high - low) / F(top)
        d, m = scale.astype(np.float16), low.astype(np.float16)
        check_finite(x, d, m)
    t -= low
    return d, m, _codes(t, scale, 0.5, top)


@cache
def _symmetric(half: int) -> symmetric.CodeSpec:
    """Codes - `half` to `half` - 1 with a scale of either sign."""
    ends = (*(STEPS - half), *(STEPS + half - 1))
    return symmetric.CodeSpec(
        1, BLOCK, ends, -half, -1, 1, symmetric.integer_codes(-half, half - 1)
    )


def _columns(x: Floats) -> Floats:
    """A copy of the values as [32, blocks]."""
    return np.array(x.reshape(-1, BLOCK).T, order="C")


def _codes(t: Floats, scale: Floats, add: float, top: int) -> Bytes:
    """Truncated codes; overwrites `t`."""
    with np.errstate(all="ignore"):
        inverse = np.where(scale != 0, 1 / scale, F(0))
    infinite = np.isinf(inverse)
    inverse[infinite] = 0
    t *= inverse
    t += F(add)
    codes = t.astype(np.uint8)
    np.minimum(codes, np.uint8(top), out=codes)
    codes[:, infinite] = 0
    return codes


def pack_nibbles(codes: Bytes) -> Bytes:
    """The lower four bits of codes [32, n] as bytes [n, 16]: value j below value j + 16."""
    out: Bytes = (codes[:16] & np.uint8(15) | codes[16:] << np.uint8(4)).T
    return out


def pack_fifth_bits(codes: Bytes) -> Bytes:
    """The fifth bits of codes [32, n] as bytes [n, 4], value j at bit j."""
    out: Bytes = np.packbits(codes >> 4, axis=0, bitorder="little").T
    return out


def unpack_codes(q: Bytes, high: Bytes | None = None) -> Bytes:
    """Codes [n, 32] of bytes [n, 16], and of fifth bits [n, 4]."""
    codes: Bytes = np.concatenate((q & np.uint8(15), q >> np.uint8(4)), axis=1)
    if high is not None:
        codes |= np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return codes


def symmetric_bound(x: Floats, half: int) -> Floats:
    """Half a step, or the distance from the last code on the shorter side; and the error of the
    scale, `half` times."""
    size = np.abs(x.reshape(-1, BLOCK))
    step = size.max(axis=1, keepdims=True) / F(half)
    rounding = np.maximum(step / 2, size - step * F(half - 1))
    return np.asarray(rounding + F(half) * (step * HALF + TINY), F).reshape(-1)


def affine_bound(x: Floats, top: int) -> Floats:
    """Half a step, the error of the minimum, and that of the scale `top` times."""
    t = x.reshape(-1, BLOCK)
    low = t.min(axis=1)
    step = (t.max(axis=1) - low) / F(top)
    allowed = step * (F(0.5) + F(top) * HALF) + np.abs(low) * HALF + F(top + 1) * TINY
    return np.repeat(allowed, BLOCK)
