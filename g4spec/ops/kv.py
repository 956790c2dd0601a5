"""The KV cache of running sequences, addressed by slot and absolute position.

Sliding-window layers have a ring buffer per slot; global layers share a pool of pages that
sequences allocate as they grow (`Space.table`). Appending does not commit: rows of rejected tokens
are overwritten by the next step, and reads never go beyond the positions they ask for. A ring
buffer therefore has room for its window plus the longest step or chunk, so that a rejected row
never overwrites a row that is still visible. Buffers are initialized with NaN, so that a read of an
unwritten row shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from g4spec.core import PAGE, CacheShape
from g4spec.ops.kv_size import PADDING_POSITIONS, capacity, pages_of
from g4spec.ops.spans import BLOCK, TileGroup

Rounded = Callable[[torch.Tensor], torch.Tensor]


class Space:
    """The slots and pages that the sequences of an engine share.

    Args:
        n_slots: maximum number of running sequences.
        n_ctx: context length of a sequence.
        n_pages: number of pages in the pool, without the spare one.

    Attributes:
        table: int32 [n_slots, pages per context]: page of the pool for each PAGE positions of a
            slot. Entries without a page are 0, the spare page: padding rows, which are never read,
            are written there.
    """

    def __init__(
        self, n_slots: int, n_ctx: int, n_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        self.n_slots, self.n_ctx, self.n_pages = n_slots, n_ctx, n_pages
        width = pages_of(n_ctx + PADDING_POSITIONS)
        self.table = torch.zeros(n_slots, width, dtype=torch.int32, device=device)

    @classmethod
    def single(cls, n_ctx: int, device: torch.device | str = "cpu") -> Space:
        """Create the space of one sequence that owns all pages."""
        space = cls(1, n_ctx, pages_of(n_ctx + PADDING_POSITIONS), device)
        space.assign(0, range(1, space.n_pages + 1))
        return space

    def assign(self, slot: int, pages: Sequence[int], first: int = 0) -> None:
        """Map the slot's positions from page index `first` on to `pages`."""
        values = torch.tensor(list(pages), dtype=torch.int32)
        self.table[slot, first : first + len(values)] = values.to(self.table.device)

    def clear(self, slot: int) -> None:
        """Unmap all pages of the slot."""
        self.table[slot] = 0


class LayerKV:
    """The KV cache of one layer, float32.

    Args:
        shape: shape of the layer's rows.
        space: slots and pages.
        ring_slack: maximum rows of one sequence that one call appends (a step or a chunk).
        rounded: rounds rows [T, n_kv, head_dim] as a smaller type would store them.
    """

    def __init__(
        self, shape: CacheShape, space: Space, ring_slack: int, rounded: Rounded | None = None
    ) -> None:
        self._rounded = rounded or (lambda rows: rows)
        self.n_kv, self.head_dim, self.window = shape.n_kv, shape.head_dim, shape.window
        self.space = space
        self.capacity = capacity(space.n_ctx, shape.window, ring_slack)
        rows = (space.n_pages + 1) * PAGE if self.paged else space.n_slots * self.capacity
        self._rows = torch.full(
            (2, rows, self.n_kv, self.head_dim),
            math.nan,
            dtype=torch.float32,
            device=space.table.device,
        )

    @property
    def paged(self) -> bool:
        """True if rows are in pages of the pool, False if each slot has a ring buffer."""
        return self.window is None

    def row_indices(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the buffer row of each position in its slot; both arguments [...] int64."""
        if not self.paged:
            return slots * self.capacity + positions % self.capacity
        page = self.space.table[slots, positions // PAGE].to(torch.int64)
        return page * PAGE + positions % PAGE

    def append(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write rows [T, n_kv, head_dim] at `positions` [T] of `slots` [T]."""
        at = self.row_indices(slots, positions)
        self._rows[0, at] = self._rounded(keys)
        self._rows[1, at] = self._rounded(values)

    def read(self, slot: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of positions first .. last inclusive: [n, n_kv, head_dim] each."""
        assert 0 <= first <= last < first + self.capacity, (first, last, self.capacity)
        positions = torch.arange(first, last + 1, device=self._rows.device)
        at = self.row_indices(torch.full_like(positions, slot), positions)
        return self._rows[0, at], self._rows[1, at]

    def blocks(self, tiles: TileGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the positions of each tile: [N * blocks, n_kv, BLOCK,
        head_dim] each, zero at positions that the tile does not read."""
        at = self.row_indices(tiles.slots[:, None], tiles.positions)
        kv = self._rows.index_select(1, at.flatten())
        kv.index_fill_(1, tiles.outside, 0.0)
        kv = kv.view(2, -1, BLOCK, self.n_kv, self.head_dim)
        keys, values = kv.transpose(2, 3).contiguous()
        return keys, values

    def snapshot(self, slot: int, end: int) -> torch.Tensor:
        """Copy the rows of a ring buffer before position `end`, for `restore`: [2, n, n_kv, D]."""
        assert not self.paged
        keys, values = self.read(slot, max(0, end - self._visible), end - 1)
        return torch.stack([keys, values])

    def restore(self, slot: int, end: int, rows: torch.Tensor) -> None:
        """Write back what `snapshot` returned."""
        positions = torch.arange(end - rows.shape[1], end, device=self._rows.device)
        at = self.row_indices(torch.full_like(positions, slot), positions)
        self._rows[:, at] = rows.to(self._rows.device)

    @property
    def _visible(self) -> int:
        """Number of positions before a row that it can attend to."""
        return min(self.window or 0, self.capacity)
