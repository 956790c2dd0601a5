"""Shared code of Q4_0, Q4_1, Q5_0 and Q5_1: blocks of 32 values with a half-precision scale.

Bytes are equal to those of ggml's C reference on x86: values are divided by the scale before it is
rounded to half precision, and codes are truncated after adding 0.5. If the scale has no finite
inverse (below 2**-128), codes are 0, like C's cast of infinity to a byte.
Arrays are [32, blocks]: numpy is faster on long rows.

With error weights, scales are searched as in `symmetric.py` and `affine.py`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from g4spec.quant import affine, symmetric
from g4spec.quant.format import Bytes, Floats, check_finite

BLOCK = 32
BATCH = 1 << 16
"""Number of values per batch."""
F = np.float32
HALF = F(2.0**-11)
"""Relative rounding error of half precision."""
TINY = F(2.0**-25)
"""Absolute rounding error of half precision below its normal range."""
STEPS = np.arange(-10, 11, 2) / 10
"""Search with weights: positions of the largest value that are tried, relative to the last code."""
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
"""Search with weights for types with a minimum: `affine.Layout.steps`."""


def encode_symmetric(
    x: Floats, half: int, weights: Floats | None
) -> tuple[NDArray[np.float16], Bytes]:
    """Return scales [n] and codes [32, n], with x = scale * (code - half).

    The value of largest magnitude (the first of several) gets code 0, whatever its sign.
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
    largest += F(0)  # C starts at +0, and -0 is not larger
    with np.errstate(all="ignore"):
        scale = np.divide(largest, F(-half), dtype=F)
        d = scale.astype(np.float16)
        check_finite(x, d)
    return d, _codes(t, scale, half + 0.5, 2 * half - 1)


def encode_affine(
    x: Floats, top: int, weights: Floats | None
) -> tuple[NDArray[np.float16], NDArray[np.float16], Bytes]:
    """Return scales [n], minima [n] and codes [32, n] up to `top`, with x = minimum + scale * code.

    Source: ggml `quantize_row_q4_1_ref`, `quantize_row_q5_1_ref`.
    """
    if weights is not None:
        quarters = 0 if top > 15 else 2
        layout = affine.Layout(top, rounds=0, groups=1, size=BLOCK, steps=SPANS, quarters=quarters)
        return affine.fit_single_group(x, layout, weights)
    t = _columns(x)
    low, high = t.min(axis=0), t.max(axis=0)
    zero = np.flatnonzero(low == 0)
    if len(zero):  # the sign of a zero minimum is that of the first zero
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
    """Return the search parameters for codes -half .. half - 1 with a scale of either sign."""
    ends = (*(STEPS - half), *(STEPS + half - 1))
    return symmetric.CodeSpec(
        groups=1,
        size=BLOCK,
        ends=ends,
        end=-half,
        low=-1,
        high=1,
        round=symmetric.integer_codes(-half, half - 1),
    )


def _columns(x: Floats) -> Floats:
    """Copy the values to [32, blocks]."""
    return np.array(x.reshape(-1, BLOCK).T, order="C")


def _codes(t: Floats, scale: Floats, add: float, top: int) -> Bytes:
    """Return truncated codes of values `t`, which is overwritten."""
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
    """Pack the lower four bits of codes [32, n] into bytes [n, 16]; code j is the lower half of
    byte j, code j + 16 the upper half."""
    out: Bytes = (codes[:16] & np.uint8(15) | codes[16:] << np.uint8(4)).T
    return out


def pack_fifth_bits(codes: Bytes) -> Bytes:
    """Pack the fifth bits of codes [32, n] into bytes [n, 4]; code j is bit j."""
    out: Bytes = np.packbits(codes >> 4, axis=0, bitorder="little").T
    return out


def unpack_codes(q: Bytes, high: Bytes | None = None) -> Bytes:
    """Unpack codes [n, 32] from bytes [n, 16] and fifth bits [n, 4]."""
    codes: Bytes = np.concatenate((q & np.uint8(15), q >> np.uint8(4)), axis=1)
    if high is not None:
        codes |= np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return codes


def symmetric_bound(x: Floats, half: int) -> Floats:
    """Return the error bound: half a step or the distance from the last code on the shorter side,
    plus `half` times the rounding error of the scale."""
    size = np.abs(x.reshape(-1, BLOCK))
    step = size.max(axis=1, keepdims=True) / F(half)
    rounding = np.maximum(step / 2, size - step * F(half - 1))
    return np.asarray(rounding + F(half) * (step * HALF + TINY), F).reshape(-1)


def affine_bound(x: Floats, top: int) -> Floats:
    """Return the error bound: half a step, plus the rounding errors of the minimum and, `top`
    times, of the scale."""
    t = x.reshape(-1, BLOCK)
    low = t.min(axis=1)
    step = (t.max(axis=1) - low) / F(top)
    allowed = step * (F(0.5) + F(top) * HALF) + np.abs(low) * HALF + F(top + 1) * TINY
    return np.repeat(allowed, BLOCK)
