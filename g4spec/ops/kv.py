"""Keys and values of live sequences, addressed by slot and absolute position.

Layers with a window keep a ring for each slot; others share a pool of pages that sequences take as
they grow (`Space.table`). Appending does not commit: rows of rejected tokens are overwritten by the
next step, and no read reaches past the positions it asks for. A ring therefore has room for its
window plus the longest step or chunk, so that a rejected row never overwrites one that is still
visible. Buffers start as NaN: whatever reads a place that was never written shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from g4spec.core import PAGE, CacheShape
from g4spec.ops.kv_size import BEHIND, capacity, pages_of

Rounded = Callable[[torch.Tensor], torch.Tensor]


class Space:
    """Slots and pages that the sequences of an engine share.

    Args:
        n_slots: sequences that may live at once.
        n_ctx: positions that each may have.
        n_pages: pages of the pool, without the spare one.

    Attributes:
        table: int32 [n_slots, pages of a context]: page of the pool that holds each PAGE positions
            of a slot. 0, the spare page, where it has none: rows of padding, which nobody reads,
            are written there.
    """

    def __init__(
        self, n_slots: int, n_ctx: int, n_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        self.n_slots, self.n_ctx, self.n_pages = n_slots, n_ctx, n_pages
        width = pages_of(n_ctx + BEHIND)
        self.table = torch.zeros(n_slots, width, dtype=torch.int32, device=device)

    @classmethod
    def single(cls, n_ctx: int, device: torch.device | str = "cpu") -> Space:
        """Space for one sequence, all of whose pages are its own."""
        space = cls(1, n_ctx, pages_of(n_ctx + BEHIND), device)
        space.assign(0, range(1, space.n_pages + 1))
        return space

    def assign(self, slot: int, pages: Sequence[int], first: int = 0) -> None:
        """Let `pages` hold the slot's positions from page `first` on."""
        values = torch.tensor(list(pages), dtype=torch.int32)
        self.table[slot, first : first + len(values)] = values.to(self.table.device)

    def clear(self, slot: int) -> None:
        """Take all pages from the slot."""
        self.table[slot] = 0


class LayerKV:
    """Keys and values of one layer, float32.

    Args:
        shape: of the layer's rows.
        space: slots and pages.
        slack: most rows of one sequence that are appended in one call (a step or a chunk).
        rounded: rows [T, n_kv, head_dim] -> the same as a smaller type would give them back.
    """

    def __init__(
        self, shape: CacheShape, space: Space, slack: int, rounded: Rounded | None = None
    ) -> None:
        self._rounded = rounded or (lambda rows: rows)
        self.n_kv, self.head_dim, self.window = shape.n_kv, shape.head_dim, shape.window
        self.space = space
        self.capacity = capacity(space.n_ctx, shape.window, slack)
        rows = (space.n_pages + 1) * PAGE if self.paged else space.n_slots * self.capacity
        self._rows = torch.full(
            (2, rows, self.n_kv, self.head_dim), math.nan, device=space.table.device
        )

    @property
    def paged(self) -> bool:
        """True if rows are in pages of the pool, False if each slot has a ring."""
        return self.window is None

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Row of the buffer for each of `positions`, in the slot beside it; both [...] int64."""
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
        at = self.places(slots, positions)
        self._rows[0, at] = self._rounded(keys)
        self._rows[1, at] = self._rounded(values)

    def read(self, slot: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions first .. last, both included: [n, n_kv, head_dim] each."""
        assert 0 <= first <= last < first + self.capacity, (first, last, self.capacity)
        positions = torch.arange(first, last + 1, device=self._rows.device)
        at = self.places(torch.full_like(positions, slot), positions)
        return self._rows[0, at], self._rows[1, at]

    def blocks(
        self, slots: torch.Tensor, first: torch.Tensor, last: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions first[n] .. last[n] of slots[n], in blocks aligned to multiples of `size`.

        Args:
            slots, first, last: int64 [N].

        Returns:
            The absolute positions [N, blocks * size], and keys and values, each
            [N * blocks, n_kv, size, head_dim], zero outside of what was asked for.
        """
        begin = first // size * size
        count = int(((last - begin) // size).max()) + 1
        positions = begin[:, None] + torch.arange(count * size, device=begin.device)
        inside = (positions >= first[:, None]) & (positions <= last[:, None])
        at = self.places(slots[:, None], positions.clamp(max=int(last.max())))
        kv = self._rows[:, at.flatten()].masked_fill(~inside.flatten()[:, None, None], 0.0)
        kv = kv.view(2, len(slots) * count, size, self.n_kv, self.head_dim)
        keys, values = kv.transpose(2, 3).contiguous()
        return positions, keys, values

    def snapshot(self, slot: int, end: int) -> torch.Tensor:
        """Copy what a ring holds of positions before `end`, for `restore`: [2, n, n_kv, D]."""
        assert not self.paged
        keys, values = self.read(slot, max(0, end - self._visible), end - 1)
        return torch.stack([keys, values])

    def restore(self, slot: int, end: int, rows: torch.Tensor) -> None:
        """Put back what `snapshot` returned."""
        positions = torch.arange(end - rows.shape[1], end, device=self._rows.device)
        at = self.places(torch.full_like(positions, slot), positions)
        self._rows[:, at] = rows.to(self._rows.device)

    @property
    def _visible(self) -> int:
        """Positions before a row that it may see."""
        return min(self.window or 0, self.capacity)
