"""The positions that the rows of a batch attend to, and the tiles in which attention computes
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from g4spec.core import Batch
from g4spec.ops.simple import TILE

BLOCK = 64
"""Number of keys per attention block; block b has absolute positions [64 b, 64 b + 64)."""

MAX_BLOCKS_PER_CALL = 64
"""Maximum number of key blocks, over all tiles, in one call."""


@dataclass(frozen=True)
class Span:
    """First and last position that each row of a batch attends to, both inclusive.

    Attributes:
        batch: the rows.
        first, last: int64 [T], first <= last.
    """

    batch: Batch
    first: torch.Tensor
    last: torch.Tensor

    def part(self, rows: slice) -> Span:
        """Return these rows, which belong to one sequence."""
        return Span(self.batch.part(rows), self.first[rows], self.last[rows])

    @cached_property
    def tiles(self) -> Tiles:
        """The tiles of these rows, which all layers with this span share."""
        return Tiles.of(self)


@dataclass(frozen=True)
class Tiles:
    """The rows of a batch in tiles of TILE rows of one sequence.

    Attributes:
        groups: tiles that are computed together.
        real: index of each row of the batch among the rows of all tiles, [T].
    """

    groups: list[TileGroup]
    real: torch.Tensor

    @classmethod
    def of(cls, span: Span) -> Tiles:
        """Cut the rows of a span into tiles."""
        rows, real = _tile_rows(span.batch.sizes, span.first.device)
        lo, hi = span.first[rows].amin(1), span.last[rows].amax(1)
        return cls(
            [TileGroup.of(span, rows[n], lo[n], hi[n]) for n in _similar_tiles(lo, hi)], real
        )


@dataclass(frozen=True)
class TileGroup:
    """N tiles that read as many key blocks, B.

    Attributes:
        rows: rows of each tile, [N, TILE].
        slots: slot of each tile, [N].
        positions: positions of the keys in its blocks, [N, B * BLOCK]; those after the last one
            that is read are replaced by it.
        outside: indices among the N * B * BLOCK positions of those that the tile does not read.
        hidden: whether a row does not attend to a key, [N, B, 1, TILE, 1, BLOCK].
    """

    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    outside: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def of(cls, span: Span, rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> TileGroup:
        """Lay out the key blocks of tiles that read positions lo .. hi [N], both inclusive."""
        begin = lo // BLOCK * BLOCK
        count = int(((hi - begin) // BLOCK).max()) + 1
        positions = begin[:, None] + torch.arange(count * BLOCK, device=lo.device)
        outside = (positions < lo[:, None]) | (positions > hi[:, None])
        first, last = span.first[rows][..., None], span.last[rows][..., None]
        hidden = (positions[:, None] < first) | (positions[:, None] > last)  # [N, TILE, B * BLOCK]
        hidden = hidden.view(*rows.shape, count, BLOCK).transpose(1, 2)
        return cls(
            rows,
            span.batch.slots[rows[:, 0]],
            positions.clamp(max=int(hi.max())),
            outside.flatten().nonzero().flatten(),
            hidden[:, :, None, :, None],
        )


def _tile_rows(sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the rows of each sequence into tiles of TILE, repeating its last row as padding.

    Returns:
        Row indices [N, TILE], and the index of each row of the batch in them, [T].
    """
    rows: list[int] = []
    real: list[int] = []
    start = 0
    for size in sizes:
        for begin in range(0, size, TILE):
            n = min(TILE, size - begin)
            real += range(len(rows), len(rows) + n)
            rows += range(start + begin, start + begin + n)
            rows += [start + begin + n - 1] * (TILE - n)
        start += size
    return (torch.tensor(rows, device=device).view(-1, TILE), torch.tensor(real, device=device))


def _similar_tiles(lo: torch.Tensor, hi: torch.Tensor) -> list[slice]:
    """Group consecutive tiles whose spans lo[n] .. hi[n] have few blocks in total, to be computed
    together."""
    blocks = ((hi - lo // BLOCK * BLOCK) // BLOCK + 1).tolist()
    out, begin, most = [], 0, 0
    for n, count in enumerate(blocks):
        most = max(most, count)
        if n > begin and most * (n + 1 - begin) > MAX_BLOCKS_PER_CALL:
            out.append(slice(begin, n))
            begin, most = n, count
    return [*out, slice(begin, len(blocks))]
