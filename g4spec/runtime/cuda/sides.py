"""Where weights lie, so that a multiprocessor reads from its own side of the memory.

The L2 of an H100 or H200 has two sides with half of the memory behind each. What a multiprocessor
reads from the other side crosses the chip: nothing tells a program which addresses are where, and
with random data a fifth of the energy of reading is that crossing (measured: benchmarks/LOG.md).
Where power limits the clock, less of it is speed.

Some bits of an address within a page of 2 MB and one bit of the page itself decide the side of a
chunk of 4 KB, and two chunks that make 8 KB are never on the same one. All this is measured, by how
long additions to a place take from multiprocessors here and there. Where it is not found, as on
GPUs with one side, weights lie in order.

A matrix is laid out so that chunk n of its first half is the chunk of pair n at side 0, and chunk n
of its second half the other one. A kernel's results do not depend on any of this.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from g4spec.runtime.cuda import launch
from g4spec.runtime.cuda.units import Unit

CHUNK, PAGE = 4096, 2 << 20
PIECE = 256
"""Bytes that units of packed matrices are a multiple of."""
ALONE = 160 << 10
"""Shared memory of a block that has a multiprocessor to itself."""
LEAST = 1 << 20
"""Bytes of a matrix from which on its place matters."""
MASKS = 3
"""Words of 64 multiprocessors each."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a matrix's bytes are.

    Attributes:
        base: uint8 [2 * pairs * CHUNK], in pairs of chunks.
        mask: as of `Sides`.
        pages: the side that each page of `base` begins with, a bit each, int64 [pages / 64].
        words: the same on the host.
    """

    base: torch.Tensor
    mask: int
    pages: torch.Tensor
    words: tuple[np.uint64, ...]

    @property
    def pairs(self) -> int:
        return len(self.base) // (2 * CHUNK)

    def put(self, data: torch.Tensor, at: int) -> None:
        """Lay bytes out from byte `at` of the matrix on, both multiples of `PIECE`."""
        self.base.view(-1, PIECE)[self._pieces(at, data.numel())] = data.view(-1, PIECE)

    def read(self, at: int, count: int) -> torch.Tensor:
        """`count` bytes from byte `at` on, in order."""
        return self.base.view(-1, PIECE)[self._pieces(at, count)].flatten()

    def _pieces(self, at: int, count: int) -> torch.Tensor:
        assert at % PIECE == count % PIECE == 0, (at, count)
        of = CHUNK // PIECE
        piece = torch.arange(at // PIECE, (at + count) // PIECE, device=self.base.device)
        chunk = piece // of
        other = (chunk >= self.pairs).long()
        pair = chunk - other * self.pairs
        place = pair * 2 * CHUNK + self.base.data_ptr() % PAGE
        page = place // PAGE
        side = parity(place & self.mask) ^ self.pages[page // 64] >> page % 64 & 1 ^ other
        return (2 * pair + side) * of + piece % of


@dataclass(frozen=True, slots=True)
class Sides:
    """What is known of a GPU.

    Attributes:
        masks: of multiprocessors 64 i to 64 i + 63, a bit each: those at side 1.
        mask: bits of an address within a page, an odd number of which change the side.
        here, there: a multiprocessor at side 0 and one at side 1.
    """

    masks: tuple[np.uint64, ...]
    mask: int
    here: int
    there: int

    def place(self, nbytes: int, device: torch.device) -> Place:
        """Memory for a matrix of so many bytes."""
        pair = 2 * CHUNK
        count = -(-nbytes // pair) * pair
        base = torch.empty(count + pair, dtype=torch.uint8, device=device)
        base = base[-base.data_ptr() % pair :][:count]
        pages = _words(self._pages(base))
        words = tuple(np.uint64(w & (1 << 64) - 1) for w in pages.tolist())
        return Place(base, self.mask, pages, words)

    def _pages(self, base: torch.Tensor) -> torch.Tensor:
        """The side that each page begins with, int64 [pages]."""
        begin = base.data_ptr() % PAGE
        count = -(-(begin + len(base)) // PAGE)
        probes = (torch.arange(count, device=base.device) * PAGE - begin).clamp(min=0)
        far = latencies(base, probes, self.here) > latencies(base, probes, self.there)
        return far.long() ^ parity(probes + begin & self.mask)


def parity(x: torch.Tensor) -> torch.Tensor:
    """Of the bits of numbers below 2^32."""
    for shift in (16, 8, 4, 2, 1):
        x = x ^ (x >> shift)
    return x & 1


def _words(bits: torch.Tensor) -> torch.Tensor:
    """Bits [n] as int64 [ceil(n / 64)], lowest first."""
    rows = torch.nn.functional.pad(bits, (0, -len(bits) % 64)).view(-1, 64)
    return (rows << torch.arange(64, device=bits.device)).sum(1)


def latencies(base: torch.Tensor, offsets: torch.Tensor, processor: int) -> torch.Tensor:
    """Cycles of a few additions to each place of `base`, int64 offsets, from a multiprocessor;
    0 where it did not come to it."""
    out = torch.zeros(len(offsets), dtype=torch.int32, device=base.device)
    count = torch.cuda.get_device_properties(base.device).multi_processor_count
    launch.kernel("sides.cu", "latency")(
        count, 32, base, offsets, np.int32(len(offsets)), np.uint32(processor), out,
        shared=ALONE, pdl=False,
    )  # fmt: skip
    return out


def of(device: torch.device) -> Sides | None:
    """The sides of a GPU, if it has two and kernels that read by them."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _measured(torch.device("cuda", index))


@functools.cache
def _measured(device: torch.device) -> Sides | None:
    count = torch.cuda.get_device_properties(device).multi_processor_count
    if count > 64 * MASKS:
        return None
    memory = torch.zeros(2 * PAGE, dtype=torch.uint8, device=device)
    page = memory[-memory.data_ptr() % PAGE :][:PAGE]

    def measured(processor: int, chunks: Iterable[int]) -> NDArray[Any]:
        offsets = torch.tensor([CHUNK * c for c in chunks], device=device)
        return latencies(page, offsets, processor).cpu().numpy().astype(np.float64)

    found = processors(np.stack([measured(i, range(64)) for i in range(count)]))
    if found is None:
        return None
    here, there = (int(np.flatnonzero(found == side)[0]) for side in (0, 1))
    chunks = range(PAGE // CHUNK)
    mask = page_mask(measured(here, chunks) - measured(there, chunks))
    if mask is None:
        return None
    bits = [sum(int(side) << i for i, side in enumerate(found[64 * w : 64 * w + 64]))
            for w in range(MASKS)]  # fmt: skip
    return Sides(tuple(np.uint64(b) for b in bits), mask, here, there)


def processors(cycles: NDArray[Any]) -> NDArray[Any] | None:
    """The side of each multiprocessor, the first one's being 0, from latencies [multiprocessors,
    chunks]; None if there are no two sides."""
    if not cycles.all():
        return None
    rest = cycles - cycles.mean(0) - cycles.mean(1, keepdims=True) + cycles.mean()
    vectors, sizes, _ = np.linalg.svd(rest, full_matrices=False)
    first = vectors[:, 0] / np.abs(vectors[:, 0]).mean()
    side = (first * first[0] < 0).astype(int)
    apart = sizes[0] > 2 * sizes[1] and np.abs(first).min() > 0.5
    even = 0.4 < side.mean() < 0.6
    return side if apart and even else None


def page_mask(difference: NDArray[Any]) -> int | None:
    """`Sides.mask` from how much longer each chunk of a page takes from side 0 than from side 1;
    None if sides do not change as they should."""
    side = (difference > 0).astype(int)
    bits = [b for b in range(len(side).bit_length() - 1) if side[1 << b] != side[0]]
    mask = sum(1 << b for b in bits)
    expected = [side[0] ^ (i & mask).bit_count() & 1 for i in range(len(side))]
    if not mask & 1 or list(side) != expected:
        return None
    return mask * CHUNK


def arguments(data: torch.Tensor, place: Place | None) -> tuple[Any, ...]:
    """What kernels are told of a packed matrix (sides.cuh: MATRIX)."""
    if place is None:
        return data, np.uint64(0), None, np.uint32(0), np.uint32(0), np.int64(0)
    more = place.pages if len(place.words) > 1 else None
    first = data.data_ptr() - place.base.data_ptr()
    return (place.base, place.words[0], more, np.uint32(place.mask), np.uint32(place.pairs),
            np.int64(first))  # fmt: skip


UNITS = [Unit("sides.cu", ("latency",), max_registers=32)]
