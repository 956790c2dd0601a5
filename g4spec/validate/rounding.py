"""Maximum errors of values that a type rounds, for the comparison with a source."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from g4spec import quant
from g4spec.quant import Format

SLACK = 1 + 1e-5  # factor on the error bounds, which are computed in float32
RELATIVE = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
"""Half a unit in the last place, relative to the value."""
UNRELATED = 1.1
"""Relative RMS error above which two tensors have nothing to do with each other."""
USUAL_FACTOR = 4.0
"""Maximum relative RMS error of types without an error bound, times 2 to the bits of a value:
twice the error of a normal distribution or more, but for ternary types."""
BF16 = quant.get("bf16")
TINY = {"f32": 0.0, "bf16": 0.0, "f16": 2.0**-25}


def allowed(form: Format, want: NDArray[np.float32], source: Format) -> NDArray[np.float32]:
    """Return the maximum error of each value. F32 checkpoints are often stored in 16 bits before
    they are quantized: values may have been rounded twice."""
    out = _allowed(form, want)
    if form.bound is None or source.name != "f32":
        return out
    with np.errstate(over="ignore", invalid="ignore"):
        bf16 = BF16.dequantize(BF16.quantize(want)).reshape(want.shape)
        for half in (bf16, want.astype(np.float16).astype(np.float32)):
            found = _allowed(form, half) + np.abs(want - half)
            out = np.where(np.isfinite(found), np.maximum(out, found), out)
    return out


def _allowed(form: Format, want: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the maximum rounding error of the format for each value."""
    if form.name in RELATIVE:
        relative, tiny = RELATIVE[form.name] * SLACK, TINY[form.name]
        size: NDArray[np.float32] = np.abs(want)
        size = size * np.float32(relative) + np.float32(tiny)
        return size
    if form.bound is None:
        return np.full_like(want, np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        found = form.bound(np.ascontiguousarray(want).reshape(-1)) * np.float32(SLACK)
    out: NDArray[np.float32] = found.reshape(want.shape)
    return out


def largest_rms(form: Format) -> float:
    """Return the maximum relative RMS error of a type whose values have no error bound."""
    if form.name in RELATIVE or form.bound is not None:
        return math.inf
    return min(UNRELATED, USUAL_FACTOR / math.pow(2.0, 8 * form.block_bytes / form.block))


@cache
def usual_rms(form: Format) -> float | None:
    """Return the relative RMS error of normally distributed weights in a type, to compare others
    with; None for a type that cannot be written."""
    if form.encode is None:
        return None
    x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    error = form.dequantize(form.quantize(x)) - x
    return float(np.sqrt(np.square(error).mean() / np.square(x).mean()))
