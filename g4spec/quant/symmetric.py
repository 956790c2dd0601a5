"""Quantize types without minima: x = d * scale * code.

A block has groups with a signed integer scale each, and one half-precision factor d. The search
minimizes the squared error with weights |x| or rms + |x|: ggml's weights x^2 give larger errors,
even by ggml's measure. It differs from ggml's search:

1. For each group, try several step sizes that map its largest value to an end of the codes or near
   it, and fit the scale to the resulting codes by least squares.
2. Round scales to integers and try their neighbours (`CodeSpec.neighbours`).
3. Fit d to codes and scales by least squares, and keep it if the error is smaller. With
   `CodeSpec.by_scales`, d is fitted to the scales of step 1 before step 2 instead.

Values are stored as [size, groups * blocks], see `g4spec.quant.affine`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from g4spec.quant.format import Bytes, Floats, check_finite, columns, raise_to

BATCH = 384
"""Blocks per batch."""
TILE = 8192
"""Values that are transposed at a time: 32 KiB, so that lines are still in the L1 cache when their
next value is read. That takes half the time of a whole batch at once."""
NEIGHBOURS = (0, -1, 1)
TINY = np.float32(1e-15)
"""Groups whose largest magnitude is smaller become zero, as in ggml."""
F = np.float32


@dataclass(frozen=True, slots=True)
class CodeSpec:
    """Codes of a type and parameters of the search.

    Attributes:
        groups: groups per block.
        size: values per group.
        ends: code values to which the group's largest value, by magnitude, may be mapped. Each
            gives a step size to try: largest value / end.
        end: the code farthest from 0; it gives the step size if none of `ends` fits.
        low, high: range of integer scales.
        round: rounds values / step to the values of the nearest codes, in place.
        rms: the weights are rms + |x|, otherwise |x|.
        refined: largest magnitude of an integer scale whose neighbours are tried. Rounding errors
            of larger ones matter less.
        by_scales: fit d to the groups' best scales, weighted by the sums of their codes^2, instead
            of to codes: the error is the same and two passes over the values less.
        quarters: with error weights w, errors are weighted by w * (rms + |x|)^(quarters / 4), see
            `Format.weighted`.
        unclipped: steps from `ends` up to this magnitude give no codes outside the range.
    """

    groups: int
    size: int
    ends: tuple[float, ...]
    end: float
    low: int
    high: int
    round: Callable[[Floats], Floats]
    rms: bool = True
    refined: int = 128
    by_scales: bool = False
    quarters: int = 2
    unclipped: float = 0.0


def integer_codes(low: int, high: int) -> Callable[[Floats], Floats]:
    """Return a `CodeSpec.round` for integers from `low` to `high`."""

    def nearest(x: Floats) -> Floats:
        np.rint(x, out=x)
        return np.clip(x, F(low), F(high), out=x)

    return nearest


def table_codes(values: Floats) -> Callable[[Floats], Floats]:
    """Return a `CodeSpec.round` for a table of ascending integers from -128 to 127.

    The midpoint of two entries is a multiple of 1/2, so all values between two neighbouring
    multiples of 1/2 have the same nearest entry: a table of 512 answers is exact.
    """
    middles = np.arange(-256, 256) / 2 + 0.25
    nearest_of = values[np.abs(middles[:, None] - values).argmin(axis=1)]

    def nearest(x: Floats) -> Floats:
        x *= F(2)
        x += F(256)
        np.clip(x, F(0), F(511), out=x)
        return np.take(nearest_of, x.astype(np.int16), out=x, mode="clip")

    return nearest


class Search:
    """Search on one batch of values [size, groups * blocks]. `code`, `part`: scratch arrays;
    `square`: weighted sums of codes^2 of the groups' best scales.

    The arrays last until the next search of the same thread."""

    def __init__(self, x: Floats, codes: CodeSpec, weights: Floats | None) -> None:
        self.codes = codes
        shape = codes.size, len(x) // codes.size
        self.x, self.weights, self.code, self.part = scratch(shape)
        self.square: Floats = self.x[0]
        blocks = x.reshape(-1, codes.groups, codes.size).transpose(2, 1, 0)
        to, step = self.x.reshape(blocks.shape), max(TILE // (codes.groups * codes.size), 1)
        for at in range(0, blocks.shape[2], step):
            to[:, :, at : at + step] = blocks[:, :, at : at + step]
        np.abs(self.x, out=self.weights)
        if codes.rms or weights is not None:
            self.weights += np.sqrt(np.einsum("ij,ij->j", self.x, self.x) / F(codes.size))
        if weights is not None:  # see `Format.weighted`
            raise_to(self.weights, codes.quarters)
            self.weights *= columns(weights, codes.groups, codes.size)

    def sums(self, inverse: Floats, clip: bool = True) -> tuple[Floats, Floats]:
        """Return the weighted sums of codes^2 and codes * x of each group for 1 / scale."""
        code, part = self.round(inverse, clip), self.part
        np.multiply(code, self.weights, out=part)
        return np.einsum("ij,ij->j", part, code), np.einsum("ij,ij->j", part, self.x)

    def round(self, inverse: Floats, clip: bool = True) -> Floats:
        """Return the nearest codes for 1 / scale; without `clip` rounded only."""
        np.multiply(self.x, inverse, out=self.code)
        return self.codes.round(self.code) if clip else np.rint(self.code, out=self.code)

    def groups(self) -> Floats:
        """Return the best scale of each group, [groups, n]."""
        low, high = self.x.min(axis=0), self.x.max(axis=0)
        largest = np.where(-low > high, low, high)
        flat = np.abs(largest) < TINY
        inverse = np.where(flat, F(0), 1 / largest)
        most, square, product = (np.full_like(largest, v) for v in (-1, 0, 0))
        for end in self.codes.ends:
            sums = self.sums(inverse * F(end), abs(end) > self.codes.unclipped)
            gain = sums[1] * sums[1] / sums[0]
            better = gain > most  # false for 0 / 0
            for to, values in zip((most, square, product), (gain, *sums), strict=True):
                np.putmask(to, better, values)
        scale = np.where(square > 0, product / square, largest / F(self.codes.end))
        scale[flat] = 0
        self.square = square
        out: Floats = scale.reshape(self.codes.groups, -1)
        return out

    def whole(self, best: Floats) -> tuple[NDArray[np.float16], Floats]:
        """Return a factor per block, and the groups' best scales [groups, n] as integer multiples.
        The factor may not be finite."""
        low, high = F(self.codes.low), F(self.codes.high)
        largest = best[np.abs(best).argmax(axis=0), np.arange(best.shape[1])]
        d = (largest / low).astype(np.float16)
        inverse = np.where(d != 0, low / largest, F(0))
        scale = np.clip(np.rint(best * inverse), low, high)
        if self.codes.by_scales:
            part = self.square.reshape(scale.shape) * scale
            fitted = np.einsum("ij,ij->j", part, best) / np.einsum("ij,ij->j", part, scale)
            fitted = fitted.astype(np.float16)
            d = np.where(np.isfinite(d) & np.isfinite(fitted) & (fitted != 0), fitted, d)
        return d, scale

    def neighbours(self, d: NDArray[np.float16], scale: Floats) -> Floats:
        """Return the best integer scales near the given ones."""
        if self.codes.refined < -self.codes.low:
            return self._some_neighbours(d, scale)
        least: Floats = np.full(self.x.shape[1], np.inf, F)
        best = scale
        for step in NEIGHBOURS:
            tried = np.clip(scale + F(step), F(self.codes.low), F(self.codes.high))
            s = (d.astype(F) * tried).reshape(-1)
            square, product = self.sums(np.where(s != 0, 1 / s, F(0)))
            error = s * (s * square - 2 * product)
            better = error < least
            least = np.where(better, error, least)
            best = np.where(better.reshape(scale.shape), tried, best)
        return best

    def _some_neighbours(self, d: NDArray[np.float16], scale: Floats) -> Floats:
        """Compute `neighbours` of scales up to `refined` only."""
        (at,) = np.nonzero(np.abs(scale.reshape(-1)) <= F(self.codes.refined))
        if not len(at):
            return scale
        few: Search = copy.copy(self)
        few.codes = replace(self.codes, refined=-self.codes.low)
        few.x, few.weights = self.x[:, at], self.weights[:, at]
        few.code, few.part = np.empty_like(few.x), np.empty_like(few.x)
        out = scale.reshape(-1).copy()
        out[at] = few.neighbours(d[at % len(d)], out[at])
        return out.reshape(scale.shape)

    def factor(self, d: NDArray[np.float16], scale: Floats) -> NDArray[np.float16]:
        """Return the factor that fits codes and scales best, or `d` if that is better."""
        s = (d.astype(F) * scale).reshape(-1)
        square, product = self.sums(np.where(s != 0, 1 / s, F(0)))
        error = s * square - product
        a = (square.reshape(scale.shape) * scale * scale).sum(axis=0)
        b = (error.reshape(scale.shape) * scale).sum(axis=0)
        new = (d - b / a).astype(np.float16)
        change = new.astype(F) - d
        return np.where(change * (2 * b + change * a) < 0, new, d)


_thread = threading.local()


def scratch(shape: tuple[int, int]) -> list[Floats]:
    """Return four arrays of this thread for a batch. New arrays for each batch would be pages that
    the operating system clears: as much time as a third of the search."""
    size = shape[0] * shape[1]
    if getattr(_thread, "size", 0) < size:
        _thread.size, _thread.arrays = size, [np.empty(size, F) for _ in range(4)]
    return [a[:size].reshape(shape) for a in _thread.arrays]


def fit(
    x: Floats, codes: CodeSpec, weights: Floats | None
) -> tuple[NDArray[np.float16], Floats, Floats]:
    """Quantize whole blocks [groups * size * n]: return d [n], integer scales [groups, n], and
    values of codes [size, groups, n]. Raises Unrepresentable."""
    search = Search(x, codes, weights)
    with np.errstate(all="ignore"):
        d, scale = search.whole(search.groups())
        check_finite(x, d)
        scale = search.neighbours(d, scale)
        if not codes.by_scales:
            d = search.factor(d, scale)
        s = (d.astype(F) * scale).reshape(-1)
        code = search.round(np.where(s != 0, 1 / s, F(0)))
    return d, scale, code.reshape(codes.size, *scale.shape)


def fit_single_group(
    x: Floats, codes: CodeSpec, weights: Floats | None
) -> tuple[NDArray[np.float16], Floats]:
    """Quantize blocks of one group without an integer scale: return d [n] and values of codes
    [size, n]. Raises Unrepresentable."""
    search = Search(x, codes, weights)
    with np.errstate(all="ignore"):
        d = search.groups()[0].astype(np.float16)
        check_finite(x, d)
        s = d.astype(F)
        return d, search.round(np.where(s != 0, 1 / s, F(0)))


def bound(x: Floats, codes: CodeSpec) -> Floats:
    """Return an empirical error bound: two steps of the group, plus the effect of rounding its
    scale, plus the resolution of half precision; see `g4spec.quant.affine.bound`."""
    top = abs(codes.end)
    step = np.abs(x.reshape(-1, codes.groups, codes.size)).max(axis=2) / F(top)
    rounding = step.max(axis=1, keepdims=True) * F(2 * top / -codes.low)
    allowed = 2 * step + rounding + F(-codes.low * top * 2.0**-24)
    out: Floats = np.repeat(allowed.reshape(-1), codes.size)
    return out


def to_unsigned(code: Floats, low: int) -> Bytes:
    """Return codes counted from 0, for values counted from `low`."""
    code += F(-low)
    return code.astype(np.uint8)
