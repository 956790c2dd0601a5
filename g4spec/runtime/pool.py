"""Allocation of slots and pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from g4spec.core import Sequence
from g4spec.ops.kv_size import pages_of


class Pool:
    """The slots and pages of an engine, with a reference count per page.

    Args:
        space: table of slots and pages on the device, which the pool keeps up to date.

    Attributes:
        free_slots: slots without a sequence, lowest last.
    """

    def __init__(self, space: Any) -> None:
        self.space = space
        self.n_pages = space.n_pages
        self.reset()

    def reset(self) -> None:
        """Free all slots and pages, whoever has them."""
        for slot in range(self.space.n_slots):
            self.space.clear(slot)
        self.free_slots = list(reversed(range(self.space.n_slots)))
        self._free = list(range(self.n_pages, 0, -1))
        self._ref_counts = [0] * (self.n_pages + 1)

    @property
    def n_free(self) -> int:
        """Number of pages without a reference."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Return the number of references to a page."""
        return self._ref_counts[page]

    def hold(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._ref_counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a reference from each page; a page without references is free."""
        for page in pages:
            self._ref_counts[page] -= 1
            assert self._ref_counts[page] >= 0, page
            if not self._ref_counts[page]:
                self._free.append(page)

    def pages_needed(self, sequence: Sequence, positions: int) -> int:
        """Return how many more pages the sequence needs for so many positions."""
        return max(0, pages_of(positions) - len(sequence.pages))

    def grow(self, sequence: Sequence, positions: int) -> None:
        """Allocate pages for the sequence up to so many positions. There must be enough free
        pages."""
        count = self.pages_needed(sequence, positions)
        if not count:
            return
        assert count <= len(self._free), (count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        self.hold(pages)
        self.space.assign(sequence.slot, pages, len(sequence.pages))
        sequence.pages += pages

    def share_pages(self, sequence: Sequence, pages: list[int]) -> None:
        """Let a new sequence start with pages that have other owners as well."""
        assert not sequence.pages
        self.hold(pages)
        self.space.assign(sequence.slot, pages)
        sequence.pages = list(pages)

    def free_sequence(self, sequence: Sequence) -> None:
        """Free the sequence's pages and its slot."""
        self.release(sequence.pages)
        sequence.pages = []
        self.space.clear(sequence.slot)
        self.free_slots.append(sequence.slot)
