"""Blocks of Q4_K and Q5_K as files have them: packed scales, the lower bits of codes, and their
values. `affine` searches for what they hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from g4spec.quant.affine import GROUPS, SIZE, F, Layout, fit
from g4spec.quant.format import Bytes, Floats


def blocks(
    x: Floats, dtype: np.dtype[np.void], layout: Layout, weights: Floats | None
) -> tuple[NDArray[np.void], Bytes]:
    """The blocks of Q4_K or Q5_K that `fit` makes of x [256 * n], records [n] of `dtype` with the
    lower four bits of each code in place, and all bits of the codes [32, 8, n]."""
    found = fit(x, layout, weights)
    out = np.empty(len(found.d), dtype)
    out["d"], out["dmin"] = found.d, found.dmin
    out["scales"] = pack_scales(found.scale, found.least)
    codes = found.codes.astype(np.uint8)
    low = codes & 15
    out["q"] = (low[:, 0::2] | low[:, 1::2] << 4).transpose(2, 1, 0)
    return out, codes


def low_bits(q: Bytes) -> Bytes:
    """Unpack the lower four bits of codes from the file's layout [n, 4, 32] to [n, 8, 32]."""
    return np.stack((q & 15, q >> 4), axis=2).reshape(-1, GROUPS, SIZE)


def pack_scales(scale: Floats, least: Floats) -> Bytes:
    """Pack 6-bit scales [8, n] and minima [8, n] into bytes [n, 12].

    Bytes 0 to 3 hold scales 0 to 3 and the upper two bits of scales 4 to 7, bytes 4 to 7 the same
    of the minima. Bytes 8 to 11 hold the lower four bits of scales and minima 4 to 7.
    """
    s, m = scale.astype(np.uint8), least.astype(np.uint8)
    out = np.empty((12, s.shape[1]), np.uint8)
    out[:4] = s[:4] | s[4:] >> 4 << 6
    out[4:8] = m[:4] | m[4:] >> 4 << 6
    out[8:] = s[4:] & 15 | m[4:] << 4
    transposed: Bytes = out.T
    return transposed


def unpack_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack bytes [n, 12] to scales and minima, [n, 8] each."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=1)
    return scale, np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=1)


def values(
    d: NDArray[np.float16], dmin: NDArray[np.float16], packed: Bytes, codes: Bytes
) -> Floats:
    """Dequantize blocks: d and dmin [n], packed scales [n, 12], codes [n, 8, 32] -> [n * 256]. The
    order of operations is that of ggml's `dequantize_row_q4_K`."""
    scale, least = unpack_scales(packed)
    out = codes.astype(F)
    out *= (d.astype(F)[:, None] * scale)[:, :, None]
    out -= (dmin.astype(F)[:, None] * least)[:, :, None]
    return out.reshape(-1)
