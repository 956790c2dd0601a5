"""Scales, minima and codes of Q2_K, Q4_K and Q5_K: values are about
d * scale * code - dmin * least.

A block of 256 has 8 groups of 32, each with a 6-bit scale and a 6-bit minimum (Q2_K: 16 groups of
16, and 4 bits), and two half-precision factors for all of them. What is minimised is the squared
error with the weights of ggml's `quantize_row_q4_K_ref`, rms + |x|, but by a search of our own:

1. each group by itself: codes for a few steps around span / top, and for these codes the scale and
   minimum by least squares; then once more around the best of them;
2. scale and minimum rounded to whole numbers, and the neighbours of the scale tried, each with the
   minimum that then fits best;
3. the factors d and dmin fitted to the codes by least squares, kept where that is better.

Values lie as [size, groups * blocks] meanwhile: sums over a group are then additions of long rows,
and the arrays of a batch stay in a core's cache. Sums are taken of values shifted by their minimum,
so that groups far from zero lose no digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from g4spec.quant.format import Bytes, Floats, check_finite

BLOCK, GROUPS, SIZE = 256, 8, 32
BATCH = 384
"""Blocks computed together, in arrays of 384 KiB. Fewer, and calls outweigh the arithmetic; more,
and each array is fetched from the operating system anew."""
AROUND = (0.96, 0.98, 1.0, 1.02, 1.04)
NEIGHBOURS = (0, -1, 1)
TINY = np.float32(1e-30)
"""Groups with a smaller span count as constant: half precision could not tell them from that."""
F = np.float32


@dataclass(frozen=True, slots=True)
class Layout:
    """What a block is made of.

    Attributes:
        groups, size: groups of a block, values of a group.
        top: largest code. `most`: largest scale and minimum.
        rounds: how often steps 2 and 3 are done.
        steps: those tried are span / (top + these): below zero the codes stop short of `top`, above
            it the largest values are cut off. The first is a whole number: constants become codes
            of top + that without an error.
    """

    top: int
    rounds: int
    groups: int = GROUPS
    size: int = SIZE
    most: int = 63
    steps: tuple[float, ...] = (-3.0, -2.0, -1.4, -0.9, -0.4, -0.2, 0.0, 0.2, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Quantized blocks, `n` of them.

    Attributes:
        d, dmin: half precision, [n]. `scale`, `least`: whole numbers up to `most`, [groups, n].
        codes: whole numbers up to `top`, [size, groups, n].
    """

    d: NDArray[np.float16]
    dmin: NDArray[np.float16]
    scale: Floats
    least: Floats
    codes: Floats


def fit(x: Floats, layout: Layout, weights: Floats | None = None) -> Fitted:
    """Quantize whole blocks [256 * n]. Raises Unrepresentable."""
    n, groups, size = len(x) // BLOCK, layout.groups, layout.size
    with np.errstate(all="ignore"):
        search = _Search(x, layout, weights)
        scale: Floats
        least: Floats
        scale, least = (a.reshape(groups, n) for a in search.groups())
        d, scale = _whole(scale, layout.most)
        dmin, least = _whole(least, layout.most)
        for _ in range(layout.rounds):
            scale, least = search.neighbours(d, dmin, scale, least)
            d, dmin = search.factors(d, dmin, scale, least)
        codes = search.codes(d, dmin, scale, least).reshape(size, groups, n)
    check_finite(x, d, dmin)
    return Fitted(d, dmin, scale, least, codes)


def fit_single_group(
    x: Floats, layout: Layout, weights: Floats
) -> tuple[NDArray[np.float16], NDArray[np.float16], Bytes]:
    """Quantize blocks of one group, whose scale d and minimum m, of either sign, are half-precision
    numbers [n] themselves; codes [size, n]. Raises Unrepresentable."""
    with np.errstate(all="ignore"):
        above = np.maximum(x.reshape(-1, layout.size).min(axis=1), F(0))
        search = _Search(x - np.repeat(above, layout.size), layout, weights)
        scale, least = search.groups()
        d, m = scale.astype(np.float16), (above - least).astype(np.float16)
        check_finite(x, d, m)
        inverse = np.where(d > 0, 1 / d.astype(F), F(0))
        total = search.shift(
            np.subtract(above, m, dtype=F)
        )  # then the minimum that fits the rounded scale
        code = np.einsum("ij,ij->j", search.round(inverse), search.weights)
        m = (m + (total - d * code) / search.weight).astype(np.float16)
        search.shift(np.subtract(above, m, dtype=F))
        codes = search.round(inverse)
    return d, m, codes.astype(np.uint8)


def _columns(x: Floats, layout: Layout) -> Floats:
    """Whole blocks as [size, groups * blocks], the groups of a block `blocks` apart."""
    groups = x.reshape(-1, layout.groups, layout.size)
    return np.ascontiguousarray(groups.transpose(2, 1, 0)).reshape(layout.size, -1)


def _whole(values: Floats, most: int) -> tuple[NDArray[np.float16], Floats]:
    """A half-precision factor for each block, and its groups' values as multiples of it."""
    largest = np.maximum(values.max(axis=0), F(0))
    factor = (largest / F(most)).astype(np.float16)
    inverse = np.where(factor > 0, F(most) / largest, F(0))
    return factor, np.clip(np.rint(values * inverse), F(0), F(most))


class _Search:
    """One batch, [size, groups]. `y`: values from their minimum on; `code`, `part`: scratch."""

    def __init__(self, x: Floats, layout: Layout, weights: Floats | None = None) -> None:
        self.layout, self.x = layout, _columns(x, layout)
        x = self.x
        self.top, self.most = F(layout.top), F(layout.most)
        self.weights = np.abs(x)
        self.weights += np.sqrt(np.einsum("ij,ij->j", x, x) / F(layout.size))
        if weights is not None:  # see `Format.weighted`
            np.sqrt(self.weights, out=self.weights)
            self.weights *= _columns(weights, layout)
        self.weight = np.maximum(np.einsum("ij->j", self.weights), TINY)
        self.y, self.code, self.part = (np.empty_like(x) for _ in range(3))

    def shift(self, least: Floats) -> Floats:
        """Count values from -least on; returns their weighted sums."""
        np.add(self.x, least, out=self.y)
        total: Floats = np.einsum("ij,ij->j", self.weights, self.y)
        return total

    def round(self, inverse: Floats, clip: bool = True) -> Floats:
        """Codes of the shifted values, for 1 / scale. `clip`: some would be out of range."""
        np.multiply(self.y, inverse, out=self.code)
        np.rint(self.code, out=self.code)
        return np.clip(self.code, F(0), self.top, out=self.code) if clip else self.code

    def sums(self, inverse: Floats, out: Floats, clip: bool = True) -> None:
        """Weighted sums over each group: of codes, their squares, their products with values."""
        code = self.round(inverse, clip)
        part = np.multiply(code, self.weights, out=self.part)
        np.add.reduce(part, axis=0, out=out[0])
        np.einsum("ij,ij->j", part, code, out=out[1])
        np.einsum("ij,ij->j", part, self.y, out=out[2])

    def groups(self) -> tuple[Floats, Floats]:
        """Best scale and minimum (as a positive number) of each group by itself."""
        least = -np.minimum(self.x.min(axis=0), F(0))
        span = self.x.max(axis=0) + least
        flat = span < TINY
        span[flat] = 1
        total = self.shift(least)
        steps = self.layout.steps
        inverses = [(self.top + F(s)) / span for s in steps]
        scale, first, gain = self._best(least, total, inverses, [s > 0 for s in steps])
        moved = first - least
        # The second search counts from another minimum, so from another error of all zeros.
        gain += 2 * moved * total + moved * moved * self.weight
        total = self.shift(first)
        inverses = [F(f) / scale for f in AROUND]
        scale2, second, gain2 = self._best(first, total, inverses, [True] * len(AROUND))
        better = gain2 > gain
        scale = np.where(better, scale2, scale)
        return np.where(flat, F(0), scale), np.where(flat, least, np.where(better, second, first))

    def _best(
        self, least: Floats, total: Floats, inverses: list[Floats], clip: list[bool]
    ) -> tuple[Floats, Floats, Floats]:
        """The best fit to codes made with one of `inverses`: scale, minimum, and by how much its
        error is below that of all zeros."""
        sums = np.empty((3, len(inverses), len(total)), F)
        for i, inverse in enumerate(inverses):
            self.sums(inverse, sums[:, i], clip[i])
        code, square, product = sums
        determinant = self.weight * square - code * code
        scale = (self.weight * product - total * code) / determinant
        low = (square * total - code * product) / determinant
        gain = scale * product + low * total
        above = np.nonzero(low > least)  # the stored minimum cannot be above zero
        if len(above[0]):
            most, rest = least[above[1]], product[above] - least[above[1]] * code[above]
            scale[above], low[above] = rest / square[above], most
            gain[above] = rest * rest / square[above] + most * (
                2 * total[above[1]] - most * self.weight[above[1]]
            )
        # Nearly one code for all weight: what is left is rounding, or too small to be squared.
        bad = np.nonzero(~((determinant > F(1e-4) * self.weight * square) & (scale > 0)))
        if len(bad[0]):
            s = 1 / np.stack(inverses)[bad]
            at = np.minimum((total[bad[1]] - s * code[bad]) / self.weight[bad[1]], least[bad[1]])
            scale[bad], low[bad] = s, at
            gain[bad] = s * (2 * product[bad] - s * square[bad] - 2 * at * code[bad]) + at * (
                2 * total[bad[1]] - at * self.weight[bad[1]]
            )
        gain[~np.isfinite(gain)] = -np.inf
        best = gain.argmax(axis=0), np.arange(len(total))
        return scale[best], least - low[best], gain[best]

    def neighbours(
        self, d: NDArray[np.float16], dmin: NDArray[np.float16], scale: Floats, least: Floats
    ) -> tuple[Floats, Floats]:
        """The whole scales and minima that fit best, near the given ones."""
        wide, low = d.astype(F), dmin.astype(F)
        inverse = np.where(low > 0, 1 / low, F(0))
        at = (low * least).reshape(-1)
        total = self.shift(at)
        best = np.full_like(at, np.inf), scale, least
        code, square, product = sums = np.empty((3, len(at)), F)
        for step in NEIGHBOURS:
            tried = np.clip(scale + F(step), F(0), self.most)
            s = (wide * tried).reshape(-1)
            self.sums(np.where(s > 0, 1 / s, F(0)), sums)
            move = (s * code - total) / self.weight
            minimum = np.rint((at + move).reshape(least.shape) * inverse)
            minimum = np.clip(minimum, F(0), self.most)
            move = (low * minimum).reshape(-1) - at
            error = s * (s * square - 2 * (product + move * code))
            error += move * (move * self.weight + 2 * total)
            better = error < best[0]
            better8 = better.reshape(scale.shape)
            best = (
                np.where(better, error, best[0]),
                np.where(better8, tried, best[1]),
                np.where(better8, minimum, best[2]),
            )
        return best[1], best[2]

    def codes(
        self, d: NDArray[np.float16], dmin: NDArray[np.float16], scale: Floats, least: Floats
    ) -> Floats:
        """Codes for given scales and minima: the nearest."""
        s = (d.astype(F) * scale).reshape(-1)
        self.shift((dmin.astype(F) * least).reshape(-1))
        return self.round(np.where(s > 0, 1 / s, F(0)))

    def factors(
        self, d: NDArray[np.float16], dmin: NDArray[np.float16], scale: Floats, least: Floats
    ) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """ScaleFactors that fit codes, scales and minima best, as changes of the given ones."""
        code = self.codes(d, dmin, scale, least)
        part = np.multiply(code, self.weights, out=self.part)
        sums = np.einsum("ij->j", part), np.einsum("ij,ij->j", part, code)
        code *= (d.astype(F) * scale).reshape(-1)
        off = np.subtract(code, self.y, out=code)
        errors = np.einsum("ij,ij->j", part, off), np.einsum("ij,ij->j", self.weights, off)
        one, two, a, b, w = (
            v.reshape(scale.shape).astype(float) for v in (*sums, *errors, self.weight)
        )
        aa, ab, bb = (
            (v).sum(axis=0) for v in (scale * scale * two, scale * least * one, least * least * w)
        )
        ra, rb = (scale * a).sum(axis=0), (least * b).sum(axis=0)
        determinant = aa * bb - ab * ab
        new = (
            (d + (ab * rb - ra * bb) / determinant).astype(np.float16),
            (dmin + (aa * rb - ab * ra) / determinant).astype(np.float16),
        )
        x, y = new[0].astype(float) - d, new[1].astype(float) - dmin
        change = x * (x * aa + 2 * (ra - y * ab)) + y * (y * bb - 2 * rb)
        better = (change < 0) & (new[0] > 0) & (new[1] >= 0)
        return np.where(better, new[0], d), np.where(better, new[1], dmin)


def blocks(
    x: Floats, dtype: np.dtype[np.void], layout: Layout, weights: Floats | None = None
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
    """Codes [n, 8, 32] from their lower four bits as a file holds them, [n, 4, 32]."""
    return np.stack((q & 15, q >> 4), axis=2).reshape(-1, GROUPS, SIZE)


def pack_scales(scale: Floats, least: Floats) -> Bytes:
    """6-bit numbers [8, n] and [8, n] -> bytes [n, 12]: four of each whole, with the upper two
    bits of the other four on top of them; then the lower halves of those."""
    s, m = scale.astype(np.uint8), least.astype(np.uint8)
    out = np.empty((12, s.shape[1]), np.uint8)
    out[:4] = s[:4] | s[4:] >> 4 << 6
    out[4:8] = m[:4] | m[4:] >> 4 << 6
    out[8:] = s[4:] & 15 | m[4:] << 4
    turned: Bytes = out.T
    return turned


def unpack_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Bytes [n, 12] -> scales and minima, [n, 8] each."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=1)
    return scale, np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=1)


def values(
    d: NDArray[np.float16], dmin: NDArray[np.float16], packed: Bytes, codes: Bytes
) -> Floats:
    """Blocks back: d, dmin [n], scales [n, 12], codes [n, 8, 32] -> [n * 256], in the order of
    operations of ggml's `dequantize_row_q4_K`."""
    scale, least = unpack_scales(packed)
    out = codes.astype(F)
    out *= (d.astype(F)[:, None] * scale)[:, :, None]
    out -= (dmin.astype(F)[:, None] * least)[:, :, None]
    return out.reshape(-1)


def bound(x: Floats, layout: Layout) -> Floats:
    """Two steps of the group, what rounding scale and minimum moves, and the least that half
    precision can tell apart. How steps are searched for decides what is reached, so this is
    what errors of ggml's files and of these stay below, with room to spare, not a theorem."""
    top, most = layout.top, layout.most
    groups = x.reshape(-1, layout.groups, layout.size)
    span = np.maximum(groups.max(axis=2), F(0)) - np.minimum(groups.min(axis=2), F(0))
    step = span / F(top)
    allowed = 2 * step + step.max(axis=1, keepdims=True) * F(top / most)
    allowed += F((most + 1) * top * 2.0**-24)
    out: Floats = np.repeat(allowed.reshape(-1), layout.size)
    return out
