"""The prefix cache: shared prefixes of prompts are computed once.

Prefill computes aligned blocks of PROMPT_BLOCK rows whose bits depend only on the tokens up to the
end of the block, so a prefix hit gives the same bits as computing the prefix again. A *snapshot* is
the state of a sequence at a block boundary: its pages of the pool, shared by reference count, and
copies in host memory of the ring buffers and of the draft's state. Snapshots are taken at the last
boundary of a prompt and at branch points, where a prompt diverges from an earlier one. They are
found by a chain of hashes over the blocks.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from g4spec.core import PAGE, PROMPT_BLOCK, Draft, Sequence
from g4spec.ops.kv_size import pages_of
from g4spec.runtime.pool import Pool

MAX_KNOWN_HASHES = 1 << 16
"""Maximum number of block hashes remembered without a snapshot, to detect branch points."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a sequence after `end` tokens.

    Attributes:
        pages: pages of these tokens; the snapshot has a reference to each.
        rings: content of every ring buffer of target and draft, in order.
        state: state of the draft for the slot.
        nbytes: size in host memory.
    """

    end: int
    pages: list[int]
    rings: list[Any]
    state: list[torch.Tensor]
    nbytes: int


def block_hashes(ids: Seq[int], drafting: bool) -> list[bytes]:
    """Return the hashes of the first 1, 2, ... whole blocks of a prompt, for the target alone or
    with a draft."""
    out, before = [], b"draft" if drafting else b""
    for start in range(0, len(ids) - PROMPT_BLOCK + 1, PROMPT_BLOCK):
        block = b"".join(i.to_bytes(4, "little") for i in ids[start : start + PROMPT_BLOCK])
        before = hashlib.blake2b(before + block, digest_size=16).digest()
        out.append(before)
    return out


class PrefixCache:
    """Snapshots by hash, least recently used first.

    Args:
        pool: the pool whose pages snapshots refer to.
        caches: caches of the target.
        draft: draft whose caches and state belong to a snapshot, or None.
        budget: host memory for ring buffers and states in bytes; 0 disables the cache.
    """

    def __init__(self, pool: Pool, caches: Seq[Any], draft: Draft | None, budget: int) -> None:
        self._pool, self._draft, self._budget = pool, draft, budget
        self._rings = [kv for kv in caches if not kv.paged]
        self._draft_rings = [kv for kv in draft.caches if not kv.paged] if draft else []
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._hashed: tuple[Seq[int], bool, list[bytes]] = ((), False, [])  # the newest prompt
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._snapshots)

    def find(self, ids: Seq[int], drafting: bool) -> Snapshot | None:
        """Return the longest snapshot of a prefix that leaves at least one token to compute."""
        if not self._snapshots:
            return None
        for key in reversed(self._hashes(ids, drafting)[: (len(ids) - 1) // PROMPT_BLOCK]):
            if key in self._snapshots:
                self._snapshots.move_to_end(key)
                return self._snapshots[key]
        return None

    def snapshot_points(self, ids: Seq[int], drafting: bool) -> list[int]:
        """Return the boundaries at which to take a snapshot of this prompt: where it diverges from
        an earlier prompt, and its last one."""
        if not self._budget:
            return []
        keys = self._hashes(ids, drafting)
        shared = next((i for i, key in enumerate(keys) if key not in self._known), len(keys))
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN_HASHES:
            self._known.popitem(last=False)
        wanted = {n for n in (shared, len(keys)) if n and keys[n - 1] not in self._snapshots}
        return sorted(n * PROMPT_BLOCK for n in wanted)

    def _hashes(self, ids: Seq[int], drafting: bool) -> list[bytes]:
        """Return `block_hashes` of a prompt, which nobody modifies. One that waits for pages is
        looked up in every step, so those of the newest one are kept."""
        if self._hashed[0] is not ids or self._hashed[1] != drafting:
            self._hashed = ids, drafting, block_hashes(ids, drafting)
        return self._hashed[2]

    def _rings_of(self, sequence: Sequence) -> list[Any]:
        return self._rings + (self._draft_rings if sequence.drafting else [])

    def restore(self, snapshot: Snapshot, sequence: Sequence) -> None:
        """Restore a snapshot into a new sequence."""
        self._pool.share_pages(sequence, snapshot.pages)
        for kv, rows in zip(self._rings_of(sequence), snapshot.rings, strict=True):
            kv.restore(sequence.slot, snapshot.end, rows)
        if sequence.drafting and self._draft is not None:
            for state, row in zip(self._draft.state, snapshot.state, strict=True):
                state[sequence.slot] = row.to(state.device)
        sequence.n_read = snapshot.end

    def take_snapshot(self, sequence: Sequence) -> None:
        """Take a snapshot of a sequence that has just reached a block boundary of its prompt."""
        end = sequence.n_read
        key = block_hashes(sequence.ids[:end], sequence.drafting)[-1]
        if key in self._snapshots:
            return
        rows = [kv.snapshot(sequence.slot, end) for kv in self._rings_of(sequence)]
        state = []
        if sequence.drafting and self._draft is not None:
            state = [s[sequence.slot].detach().to("cpu", copy=True) for s in self._draft.state]
        nbytes = sum(_nbytes(x) for x in [*rows, *state])
        if nbytes > self._budget:
            return
        while self._snapshots and self.nbytes + nbytes > self._budget:
            self.evict()
        pages = sequence.pages[: pages_of(end)]
        assert end % PAGE == 0 and len(pages) == end // PAGE
        self._pool.hold(pages)
        self._snapshots[key] = Snapshot(end, pages, rows, state, nbytes)
        self.nbytes += nbytes

    def evict(self) -> bool:
        """Evict the least recently used snapshot; return False if there is none."""
        if not self._snapshots:
            return False
        _, snapshot = self._snapshots.popitem(last=False)
        self._pool.release(snapshot.pages)
        self.nbytes -= snapshot.nbytes
        return True

    def n_evictable(self, kept: Seq[int]) -> int:
        """Return the number of pages except `kept` that would be free without snapshots."""
        held = Counter(page for s in self._snapshots.values() for page in s.pages)
        for page in kept:
            held.pop(page, None)
        return sum(self._pool.references(page) == n for page, n in held.items())

    def clear(self) -> None:
        """Evict all snapshots."""
        while self.evict():
            pass

    def close(self) -> None:
        """Evict all snapshots and drop the references to the caches."""
        self.clear()
        self._hashed = (), False, []
        self._rings, self._draft_rings, self._draft = [], [], None


def _nbytes(x: Any) -> int:
    """Return the bytes of a tensor, or of the tensors in a list or tuple."""
    return sum(map(_nbytes, x)) if isinstance(x, (list, tuple)) else x.nbytes
