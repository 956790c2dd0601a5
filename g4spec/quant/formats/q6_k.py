"""Q6_K: 256 values in 16 groups of 16, each with a signed 8-bit scale; 6 bits a value.

Layout: 128 bytes of lower four bits, 64 bytes of upper two bits, 16 scales, half-precision d. Of
each half of 128 values, value l + 32 k has its lower bits in byte l + 32 (k % 2), in the lower
half of the byte for k < 2; its upper bits are bits 2 k and 2 k + 1 of byte l. A value is
d * scale * (code - 32).
Source: ggml `block_q6_K`. Scales are found by a search of our own, like the one described in
`g4spec.quant.affine` but without minima, and with the weights |x|: ggml's x**2 makes for larger
errors, even by its own measure.
"""

import numpy as np
from numpy.typing import NDArray

from g4spec.quant.format import Bytes, Factors, Floats, Format, halves, in_batches, refuse_infinite

BLOCK, GROUPS, SIZE = 256, 16, 16
BATCH = 384
STEPS = (-2.4, -1.8, -1.2, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)
"""Steps tried are the largest value / -(32 + these)."""
NEIGHBOURS = (0, -1, 1)
TINY = np.float32(1e-15)
"""Groups without a larger value are zero, as in ggml."""
F = np.float32
DTYPE = np.dtype([("low", "u1", (2, 2, 32)), ("high", "u1", (2, 32)), ("scale", "i1", GROUPS),
                  ("d", "<f2")])  # fmt: skip


class _Search:
    """One batch, [16, 16 * blocks]. `code`, `part`: scratch."""

    def __init__(self, x: Floats) -> None:
        self.x, self.n = x, x.shape[1] // GROUPS
        self.weights = np.abs(x)
        self.code, self.part = np.empty_like(x), np.empty_like(x)

    def sums(self, inverse: Floats) -> tuple[Floats, Floats]:
        """For codes by 1 / scale: weighted sums of their squares and their products with x."""
        code, part = self.round(inverse), self.part
        np.multiply(code, self.weights, out=part)
        return np.einsum("ij,ij->j", part, code), np.einsum("ij,ij->j", part, self.x)

    def round(self, inverse: Floats) -> Floats:
        np.multiply(self.x, inverse, out=self.code)
        np.rint(self.code, out=self.code)
        return np.clip(self.code, F(-32), F(31), out=self.code)

    def groups(self) -> Floats:
        """Best scale of each group by itself, [16, n]."""
        low, high = self.x.min(axis=0), self.x.max(axis=0)
        largest = np.where(-low > high, low, high)
        flat = np.abs(largest) < TINY
        inverse = np.where(flat, F(0), -1 / largest)
        tried = [self.sums(inverse * F(32 + s)) for s in STEPS]
        square, product = np.stack([t[0] for t in tried]), np.stack([t[1] for t in tried])
        gain = product * product / square
        gain[~(square > 0)] = -1
        best = gain.argmax(axis=0), np.arange(len(largest))
        scale = np.where(square[best] > 0, product[best] / square[best], -largest / F(32))
        scale[flat] = 0
        out: Floats = scale.reshape(GROUPS, self.n)
        return out

    def neighbours(self, d: NDArray[np.float16], scale: Floats) -> Floats:
        """The whole scales that fit best, near the given ones."""
        least, best = np.full(self.x.shape[1], np.inf, F), scale
        for step in NEIGHBOURS:
            tried = np.clip(scale + F(step), F(-128), F(127))
            s = (d.astype(F) * tried).reshape(-1)
            square, product = self.sums(np.where(s != 0, 1 / s, F(0)))
            error = s * (s * square - 2 * product)
            better = error < least
            least = np.where(better, error, least)
            best = np.where(better.reshape(scale.shape), tried, best)
        return best

    def factor(self, d: NDArray[np.float16], scale: Floats) -> NDArray[np.float16]:
        """The factor that fits codes and scales best, if it is better than `d`."""
        s = (d.astype(F) * scale).reshape(-1)
        square, _ = self.sums(np.where(s != 0, 1 / s, F(0)))
        off = np.multiply(self.code, s, out=self.code)
        off -= self.x
        error = np.einsum("ij,ij->j", self.part, off)
        a = (square.reshape(scale.shape) * scale * scale).sum(axis=0)
        b = (error.reshape(scale.shape) * scale).sum(axis=0)
        new = (d - b / a).astype(np.float16)
        change = new.astype(F) - d
        return np.where(change * (2 * b + change * a) < 0, new, d)


def encode(x: Floats) -> Bytes:
    return in_batches(x, BLOCK * BATCH, _encode)


def _encode(x: Floats) -> Bytes:
    n = len(x) // BLOCK
    search = _Search(
        np.ascontiguousarray(x.reshape(n, GROUPS, SIZE).transpose(2, 1, 0)).reshape(SIZE, -1)
    )
    with np.errstate(all="ignore"):
        scale = search.groups()
        largest = scale[np.abs(scale).argmax(axis=0), np.arange(n)]
        d = (largest / F(-128)).astype(np.float16)
        refuse_infinite(x, d)
        inverse = np.where(d != 0, F(-128) / largest, F(0))
        scale = search.neighbours(d, np.clip(np.rint(scale * inverse), F(-128), F(127)))
        d = search.factor(d, scale)
        s = (d.astype(F) * scale).reshape(-1)
        code = search.round(np.where(s != 0, 1 / s, F(0)))
    code += F(32)
    return _packed(d, scale, code.astype(np.uint8).reshape(SIZE, GROUPS, n))


def _packed(d: NDArray[np.float16], scale: Floats, code: Bytes) -> Bytes:
    """Codes [16, 16, n]: place in the group, group, block."""
    out = np.empty(len(d), DTYPE)
    out["d"], out["scale"] = d, scale.T
    # value = 128 half + 64 upper + 32 odd + 16 group + place
    parts = code.reshape(SIZE, 2, 2, 2, 2, len(d)).transpose(1, 2, 3, 4, 0, 5)
    parts = parts.reshape(2, 2, 2, 32, len(d))
    low, high = parts & 15, parts >> 4
    out["low"] = np.moveaxis(low[:, 0] | low[:, 1] << 4, -1, 0)
    high = high[:, 0, 0] | high[:, 0, 1] << 2 | high[:, 1, 0] << 4 | high[:, 1, 1] << 6
    out["high"] = np.moveaxis(high, -1, 0)
    return out.view(np.uint8)


def decode(raw: Bytes) -> Floats:
    """In the order of operations of ggml's `dequantize_row_q6_K`."""
    blocks = raw.view(DTYPE)
    low, high = blocks["low"], blocks["high"]
    code = np.empty((len(blocks), 2, 4, 32), np.uint8)
    code[:, :, :2], code[:, :, 2:] = low & 15, low >> 4
    code |= (high[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3) << 4
    out = code.reshape(len(blocks), GROUPS, SIZE).astype(F)
    out -= F(32)
    out *= (blocks["d"].astype(F)[:, None] * blocks["scale"])[:, :, None]
    return out.reshape(-1)


def bound(x: Floats) -> Floats:
    """Two steps of the group, what rounding its scale moves, and the least that half precision
    can tell apart; see `g4spec.quant.affine.bound`."""
    step = np.abs(x.reshape(-1, GROUPS, SIZE)).max(axis=2) / F(32)
    allowed = 2 * step + step.max(axis=1, keepdims=True) / 2 + F(128 * 32 * 2.0**-24)
    out: Floats = np.repeat(allowed.reshape(-1), SIZE)
    return out


FORMAT = Format("q6_k", 14, BLOCK, DTYPE.itemsize, 18, encode, decode,
                bound=bound, fallback="q8_0", factors=Factors(halves(208), 127 * 32))  # fmt: skip
