"""Ranges of absolute positions that attention sums by themselves, and the size of the sums."""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.core import CacheShape
from g4spec.runtime.cuda.build.constants import (
    GROWTH_SHIFT,
    GROWTH_START,
    MAX_ROW_CHUNKS,
    MAX_STEP_ROWS,
)
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV


def tile_keys(head_dim: int) -> int:
    """Return the number of keys of a tile."""
    return 128 if head_dim >= 256 else 64


@dataclass(frozen=True)
class Chunks:
    """Ranges of positions that are summed by themselves; see attention_chunks.cuh.

    With a window all have 2^shift positions. Without, they grow with their position, so that a long
    context is not cut into many more chunks than there are blocks.
    """

    shift: int
    growing: bool

    @classmethod
    def of(cls, kv: CudaKV | CacheShape, positions: int) -> Chunks:
        """Return the chunks of a layer for so many positions. They decide the order of sums, so
        they are constant for a layer."""
        tile = tile_keys(kv.head_dim)
        if kv.window is None:
            chunks = cls(min(_log2(max(tile, 32 * kv.n_kv)), GROWTH_SHIFT), True)
            while chunks.most(positions, positions) > MAX_ROW_CHUNKS:
                chunks = cls(chunks.shift + 1, True)
            return chunks
        each = max(1, 128 // kv.n_kv - 1)  # about 128 parts in all
        return cls(_log2(max(tile, -(-(kv.window + MAX_STEP_ROWS - 1) // each))), False)

    def index(self, position: int) -> int:
        """Return the chunk of a position."""
        if not self.growing or position < GROWTH_START:
            return position >> self.shift
        octave = position.bit_length() - GROWTH_START.bit_length()
        inside = (position - (GROWTH_START << octave)) >> (self.shift + octave + 1)
        return ((2 + octave) << (GROWTH_SHIFT - self.shift)) + inside

    def most(self, span: int, positions: int) -> int:
        """Return the maximum number of chunks that `span` consecutive ones of `positions` touch."""
        if self.growing:
            return self.index(positions - 1) + 1
        return (span - 1 + (1 << self.shift) - 1 >> self.shift) + 1


def partial_bytes(shape: CacheShape, n_head: int, positions: int, sequences: int) -> int:
    """Return the bytes of the partial results (`attend`) in the largest step of so many sequences,
    each with up to so many positions."""
    chunks = Chunks.of(shape, positions).most(positions, positions)
    return sequences * MAX_STEP_ROWS * n_head * chunks * (shape.head_dim + 2) * 4


def _log2(n: int) -> int:
    """Return the exponent of the smallest power of two that is at least n."""
    return (n - 1).bit_length()
