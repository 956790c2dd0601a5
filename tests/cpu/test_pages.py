"""Pages, slots and prefix snapshots in random order: who has a page, and what it contains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from g4spec.core import PAGE, PROMPT_BLOCK
from g4spec.core import Sequence as Running
from g4spec.ops.kv import Space
from g4spec.ops.kv_size import pages_of
from g4spec.runtime.pool import Pool
from g4spec.runtime.prefix import PrefixCache

SLOTS, PAGES, WINDOW = 3, 19, 4
BLOCKS = tuple([n] * PROMPT_BLOCK for n in range(2))
PROMPTS = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=3)


class Ring:
    """The ring buffer of a layer, in which each row is its token."""

    paged = False

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def snapshot(self, slot: int, end: int) -> torch.Tensor:
        return torch.tensor(self.rows[slot][:end][-WINDOW:], dtype=torch.int32)

    def restore(self, slot: int, end: int, rows: torch.Tensor) -> None:
        self.rows[slot] = [*[-1] * (end - len(rows)), *rows.tolist()]


class PagesAndSnapshots(RuleBasedStateMachine):
    """Does with pool and prefix cache what the scheduler does, and notes the tokens of each page.

    The budget of the cache is that of three snapshots.
    """

    def __init__(self) -> None:
        super().__init__()
        self.space = Space(SLOTS, 3 * PROMPT_BLOCK, PAGES)
        self.pool, self.ring = Pool(self.space), Ring()
        caches: list[Any] = [self.ring]
        self.prefix = PrefixCache(self.pool, caches, None, 3 * WINDOW * 4)
        self.running: list[Running] = []
        self.points: dict[int, list[int]] = {}  # of each slot
        self.tokens: dict[int, list[int]] = {}  # of each page

    @precondition(lambda self: self.pool.free_slots)
    @rule(blocks=PROMPTS, more=st.integers(0, 1))
    def begin(self, blocks: list[list[int]], more: int) -> None:
        ids = [*chain.from_iterable(blocks), *[9] * more]
        sequence = Running(self.pool.free_slots.pop(), ids, len(ids))
        self.ring.rows[sequence.slot] = []
        if (found := self.prefix.find(ids, False)) is not None:
            self.prefix.restore(found, sequence)
            assert 0 < sequence.n_read < len(ids) and sequence.n_read % PROMPT_BLOCK == 0
            at = sequence.n_read
            assert self.ring.rows[sequence.slot][-WINDOW:] == ids[at - WINDOW : at]
        points = self.prefix.snapshot_points(ids, False)
        self.points[sequence.slot] = [n for n in points if n > sequence.n_read]
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, SLOTS - 1))
    def read(self, which: int) -> None:
        """Read a prompt up to its next snapshot or its end; evict for missing pages."""
        s = self.running[which % len(self.running)]
        points = self.points[s.slot]
        end = points[0] if points else len(s.ids)
        while self.pool.pages_needed(s, end) > self.pool.n_free:
            before, gained = self.pool.n_free, self.prefix.n_evictable(())
            if not self.prefix.evict():
                assert not gained
                return
            assert self.pool.n_free - before <= gained
        self.pool.grow(s, end)
        for at in range(s.n_read, end):
            page = self.tokens.setdefault(int(self.space.table[s.slot, at // PAGE]), [])
            page[at % PAGE :] = [s.ids[at]]
        self.ring.rows[s.slot] = s.ids[:end]
        s.n_read = end
        if points:
            points.pop(0)
            self.prefix.take_snapshot(s)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, SLOTS - 1))
    def end(self, which: int) -> None:
        self.pool.free_sequence(self.running.pop(which % len(self.running)))

    @rule()
    def clear(self) -> None:
        gained, before = self.prefix.n_evictable(()), self.pool.n_free
        self.prefix.clear()
        assert self.pool.n_free == before + gained and self.prefix.nbytes == 0

    @invariant()
    def every_page_has_its_owners(self) -> None:
        snapshots = list(self.prefix._snapshots.values())
        owners = Counter(page for each in (*self.running, *snapshots) for page in each.pages)
        free = {page for page in range(1, PAGES + 1) if not owners[page]}
        assert {*self.pool._free} == free and self.pool.n_free == len(free)
        assert all(self.pool.references(page) == n for page, n in owners.items())
        assert sum(s.nbytes for s in snapshots) == self.prefix.nbytes <= 3 * WINDOW * 4
        kept = self.running[0].pages if self.running else []
        held = {page for s in snapshots for page in s.pages} - {*kept}
        others = {page for s in self.running for page in s.pages}
        assert self.prefix.n_evictable(kept) == len(held - others)
        slots = [*self.pool.free_slots, *(s.slot for s in self.running)]
        assert sorted(slots) == list(range(SLOTS))

    @invariant()
    def every_page_has_its_tokens(self) -> None:
        for s in self.running:
            table = self.space.table[s.slot].tolist()
            assert table[: len(s.pages)] == s.pages and not any(table[len(s.pages) :])
            assert self._read(s.pages)[: s.n_read] == s.ids[: s.n_read]
        for slot in self.pool.free_slots:
            assert not self.space.table[slot].any()
        for snapshot in self.prefix._snapshots.values():
            found = self._read(snapshot.pages)
            assert len(found) == snapshot.end and len(snapshot.pages) == pages_of(snapshot.end)
            assert found[-WINDOW:] == snapshot.rings[0].tolist()

    def _read(self, pages: Iterable[int]) -> Sequence[int]:
        return [token for page in pages for token in self.tokens.get(page, [])]


TestPagesAndSnapshots = PagesAndSnapshots.TestCase
TestPagesAndSnapshots.settings = settings(
    max_examples=20,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
