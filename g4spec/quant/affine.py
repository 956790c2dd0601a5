"""Quantize Q2_K, Q4_K and Q5_K, types with scales and minima: x = d * scale * code - dmin * least.

A block of 256 values has 8 groups of 32, each with a 6-bit scale and a 6-bit minimum `least`
(Q2_K: 16 groups of 16, and 4 bits), and two half-precision factors d and dmin. The error is that of
ggml's `quantize_row_q4_K_ref`, squared with weights rms + |x|, but the search is different:

1. For each group, try several step sizes around span / max_code and fit scale and minimum to the
   resulting codes by least squares; then search once more around the best.
2. Round scales and minima to integers; try the neighbours of each scale, each with the minimum that
   fits best.
3. Fit d and dmin to the codes by least squares, and keep them if the error is smaller.

Values are stored as [size, groups * blocks]: sums over a group are additions of long rows, and the
arrays of a batch stay in a core's cache. Sums are over values minus their minimum, so that groups
far from zero lose no precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from g4spec.quant.format import Bytes, Floats, check_finite, columns, raise_to

BLOCK, GROUPS, SIZE = 256, 8, 32
BATCH = 384
"""Blocks per batch; its arrays have 384 KiB. With fewer, call overhead dominates; with more, every
array is allocated from the operating system."""
AROUND = (0.96, 0.98, 1.0, 1.02, 1.04)
"""Factors of the best step size that the second search tries."""
NEIGHBOURS = (0, -1, 1)
"""Offsets of integer scales that are tried."""
TINY = np.float32(1e-30)
"""Groups with a smaller span count as constant: half precision cannot represent the difference."""
F = np.float32


@dataclass(frozen=True, slots=True)
class Layout:
    """Structure of a block and parameters of the search.

    Attributes:
        top: largest code.
        rounds: number of repetitions of steps 2 and 3.
        groups: groups per block.
        size: values per group.
        most: largest integer scale and minimum.
        steps: offsets s of the step sizes span / (top + s) that are tried. With s < 0 the codes end
            below `top`, with s > 0 the largest values are clipped. The first s is an integer, so
            that constants are exact.
        starts: offsets s of the first block factors, largest / (most + s). Steps 2 and 3 run once
            for each tuple, from the offset in it that represents the groups' scales best, and the
            result with the smallest error is kept. Empty: one run with s = 0.
        quarters: with error weights w, errors are weighted by w * (rms + |x|)^(quarters / 4), see
            `Format.weighted`.
    """

    top: int
    rounds: int
    groups: int = GROUPS
    size: int = SIZE
    most: int = 63
    steps: tuple[float, ...] = (-3.0, -2.0, -1.4, -0.9, -0.4, -0.2, 0.0, 0.2, 0.5, 0.9)
    starts: tuple[tuple[float, ...], ...] = ()
    quarters: int = 2


@dataclass(frozen=True, slots=True)
class Fitted:
    """Result of quantizing `n` blocks.

    Attributes:
        d, dmin: half-precision factors, [n].
        scale, least: integer scales and minima up to `most`, [groups, n].
        codes: integer codes up to `top`, [size, groups, n].
    """

    d: NDArray[np.float16]
    dmin: NDArray[np.float16]
    scale: Floats
    least: Floats
    codes: Floats


Blocks = tuple[NDArray[np.float16], NDArray[np.float16], Floats, Floats]
"""d and dmin [n], integer scales and minima [groups, n]."""


def fit(x: Floats, layout: Layout, weights: Floats | None) -> Fitted:
    """Quantize whole blocks [256 * n], optionally with error weights. Raises Unrepresentable."""
    n, groups, size = len(x) // BLOCK, layout.groups, layout.size
    with np.errstate(all="ignore"):
        search = _Search(x, layout, weights)
        scales, minima = (a.reshape(groups, n) for a in search.groups())
        found = []
        for offsets in layout.starts:
            first, second = (search.whole(a, offsets) for a in (scales, minima))
            found.append(search.blocks(first, second))
        if not found:
            found = [search.blocks(_whole(scales, layout.most), _whole(minima, layout.most))]
        best = search.smallest(found)
        d, dmin, scale, least = best
        codes = search.codes(d, dmin, scale, least).reshape(size, groups, n)
    check_finite(x, d, dmin)
    return Fitted(d, dmin, scale, least, codes)


def fit_single_group(
    x: Floats, layout: Layout, weights: Floats
) -> tuple[NDArray[np.float16], NDArray[np.float16], Bytes]:
    """Quantize blocks of one group, x = d * code + m with half-precision d and m of either sign.

    Returns d [n], m [n] and codes [size, n]. Raises Unrepresentable.
    """
    with np.errstate(all="ignore"):
        above = np.maximum(x.reshape(-1, layout.size).min(axis=1), F(0))
        search = _Search(x - np.repeat(above, layout.size), layout, weights)
        scale, least = search.groups()
        d, m = scale.astype(np.float16), (above - least).astype(np.float16)
        check_finite(x, d, m)
        inverse = np.where(d > 0, 1 / d.astype(F), F(0))
        total = search.shift(
            np.subtract(above, m, dtype=F)
        )  # refit the minimum to the rounded scale
        code = np.einsum("ij,ij->j", search.round(inverse), search.weights)
        m = (m + (total - d * code) / search.weight).astype(np.float16)
        search.shift(np.subtract(above, m, dtype=F))
        codes = search.round(inverse)
    return d, m, codes.astype(np.uint8)


def _whole(values: Floats, most: int) -> tuple[NDArray[np.float16], Floats]:
    """Return a half-precision factor per block, and the groups' values as integer multiples."""
    largest = np.maximum(values.max(axis=0), F(0))
    factor = (largest / F(most)).astype(np.float16)
    inverse = np.where(factor > 0, F(most) / largest, F(0))
    return factor, np.clip(np.rint(values * inverse), F(0), F(most))


class _Search:
    """Search on one batch of values [size, groups]. `y`: values minus their minimum; `code` and
    `part`: scratch arrays."""

    def __init__(self, x: Floats, layout: Layout, weights: Floats | None) -> None:
        self.layout, self.x = layout, columns(x, layout.groups, layout.size)
        x = self.x
        self.top, self.most = F(layout.top), F(layout.most)
        self.weights = np.abs(x)
        self.weights += np.sqrt(np.einsum("ij,ij->j", x, x) / F(layout.size))
        if weights is not None:  # see `Format.weighted`
            self.weights = raise_to(self.weights, layout.quarters)
            self.weights *= columns(weights, layout.groups, layout.size)
        self.weight = np.maximum(np.einsum("ij->j", self.weights), TINY)
        self.y, self.code, self.part = (np.empty_like(x) for _ in range(3))

    def shift(self, least: Floats) -> Floats:
        """Set `y` to x + least; return its weighted sums, [groups]."""
        np.add(self.x, least, out=self.y)
        total: Floats = np.einsum("ij,ij->j", self.weights, self.y)
        return total

    def round(self, inverse: Floats, clip: bool = True) -> Floats:
        """Return the codes of `y` for `inverse` = 1 / scale. `clip`: limit them to 0 .. top."""
        np.multiply(self.y, inverse, out=self.code)
        np.rint(self.code, out=self.code)
        return np.clip(self.code, F(0), self.top, out=self.code) if clip else self.code

    def sums(self, inverse: Floats, out: Floats, clip: bool = True) -> None:
        """Write the weighted sums of codes, codes^2 and codes * y of each group to `out`."""
        code = self.round(inverse, clip)
        part = np.multiply(code, self.weights, out=self.part)
        np.add.reduce(part, axis=0, out=out[0])
        np.einsum("ij,ij->j", part, code, out=out[1])
        np.einsum("ij,ij->j", part, self.y, out=out[2])

    def groups(self) -> tuple[Floats, Floats]:
        """Return the best scale and minimum (as a positive number) of each group."""
        least = -np.minimum(self.x.min(axis=0), F(0))
        span = self.x.max(axis=0) + least
        flat = span < TINY
        span[flat] = 1
        total = self.shift(least)
        steps = self.layout.steps
        inverses = [(self.top + F(s)) / span for s in steps]
        scale, first, gain = self._best(least, total, inverses, [s > 0 for s in steps])
        moved = first - least
        # `gain` is relative to the error of all-zero codes, which depends on the minimum.
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
        """Return scale, minimum and gain of the best fit to the codes of one of `inverses`; the
        gain is the reduction of the error compared to all-zero codes."""
        sums = np.empty((3, len(inverses), len(total)), F)
        for i, inverse in enumerate(inverses):
            self.sums(inverse, sums[:, i], clip[i])
        code, square, product = sums
        determinant = self.weight * square - code * code
        scale = (self.weight * product - total * code) / determinant
        low = (square * total - code * product) / determinant
        gain = scale * product + low * total
        above = np.nonzero(low > least)  # the stored minimum must not be above zero
        if len(above[0]):
            most, rest = least[above[1]], product[above] - least[above[1]] * code[above]
            scale[above], low[above] = rest / square[above], most
            gain[above] = rest * rest / square[above] + most * (
                2 * total[above[1]] - most * self.weight[above[1]]
            )
        # Nearly all weight has one code: the determinant is rounding error or underflow.
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

    def whole(
        self, values: Floats, offsets: tuple[float, ...]
    ) -> tuple[NDArray[np.float16], Floats]:
        """Return a half-precision factor per block and the groups' `values` [groups, n] as integer
        multiples, for the one of `Layout.starts` with the smallest weighted error."""
        largest = np.maximum(values.max(axis=0), F(0))
        weight = self.weight.reshape(values.shape)
        best: tuple[Floats, Floats, Floats]
        best = np.full(values.shape[1], np.inf, F), largest, values
        for offset in offsets:
            inverse = np.where(largest > 0, (self.most + F(offset)) / largest, F(0))
            whole = np.clip(np.rint(values * inverse), F(0), self.most)
            part = weight * whole
            square = np.einsum("ij,ij->j", part, whole)
            factor = np.where(square > 0, np.einsum("ij,ij->j", part, values) / square, F(0))
            off = values - factor * whole
            error = np.einsum("ij,ij,ij->j", weight, off, off)
            better = error < best[0]
            best = (
                np.where(better, error, best[0]),
                np.where(better, factor, best[1]),
                np.where(better, whole, best[2]),
            )
        return best[1].astype(np.float16), best[2]

    def blocks(
        self,
        scales: tuple[NDArray[np.float16], Floats],
        minima: tuple[NDArray[np.float16], Floats],
    ) -> Blocks:
        """Improve the factors and integers of all blocks `Layout.rounds` times."""
        (d, scale), (dmin, least) = scales, minima
        for _ in range(self.layout.rounds):
            scale, least = self.neighbours(d, dmin, scale, least)
            d, dmin = self.factors(d, dmin, scale, least)
        return d, dmin, scale, least

    def smallest(self, found: list[Blocks]) -> Blocks:
        """Return for each block the result with the smallest error."""
        best = found[0]
        if len(found) > 1:
            error = self.errors(best)
        for other in found[1:]:
            its = self.errors(other)
            better = its < error
            error = np.where(better, its, error)
            best = (
                np.where(better, other[0], best[0]),
                np.where(better, other[1], best[1]),
                np.where(better, other[2], best[2]),
                np.where(better, other[3], best[3]),
            )
        return best

    def errors(self, found: Blocks) -> Floats:
        """Return the weighted squared error of each block."""
        d, _, scale, _ = found
        off = self.codes(*found)
        off *= (d.astype(F) * scale).reshape(-1)
        off -= self.y
        part = np.multiply(off, self.weights, out=self.part)
        error: Floats = np.einsum("ij,ij->j", part, off).reshape(scale.shape).sum(axis=0)
        return error

    def neighbours(
        self, d: NDArray[np.float16], dmin: NDArray[np.float16], scale: Floats, least: Floats
    ) -> tuple[Floats, Floats]:
        """Return the best integer scales and minima near the given ones."""
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
        """Return the nearest codes for these scales and minima."""
        s = (d.astype(F) * scale).reshape(-1)
        self.shift((dmin.astype(F) * least).reshape(-1))
        return self.round(np.where(s > 0, 1 / s, F(0)))

    def factors(
        self, d: NDArray[np.float16], dmin: NDArray[np.float16], scale: Floats, least: Floats
    ) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """Return d and dmin that fit the codes, scales and minima best, or the given ones if those
        are better."""
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


def bound(x: Floats, layout: Layout) -> Floats:
    """Return an empirical error bound: two steps of the group, plus the effect of rounding scale
    and minimum, plus the resolution of half precision. Errors of ggml's files and of ours stay well
    below it, but it is not proven: errors depend on the search."""
    top, most = layout.top, layout.most
    groups = x.reshape(-1, layout.groups, layout.size)
    span = np.maximum(groups.max(axis=2), F(0)) - np.minimum(groups.min(axis=2), F(0))
    step = span / F(top)
    allowed = 2 * step + step.max(axis=1, keepdims=True) * F(top / most)
    allowed += F((most + 1) * top * 2.0**-24)
    out: Floats = np.repeat(allowed.reshape(-1), layout.size)
    return out
