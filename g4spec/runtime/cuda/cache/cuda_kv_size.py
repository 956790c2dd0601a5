"""Sizes of `cuda_kv`. Imports no torch, so `doctor` computes the same sizes as the engine."""

from __future__ import annotations

from g4spec.core import MAX_STEP_ROWS, PAGE, CacheShape
from g4spec.ops.kv_size import pages_of
from g4spec.runtime.cuda.build.constants import CACHE_ROTARY_PAIRS
from g4spec.runtime.cuda.cache.cache_types import TYPES, Kind

TILE = PAGE
"""Positions of an aligned tile, consecutive in memory."""

MIN_SLACK = MAX_STEP_ROWS
"""Rows of a ring beyond its window, so that the rows of a step never overwrite a visible one."""

SLACK = TILE
"""Rows of a ring beyond its window in an engine: those of a short last block of a prompt, more than
those of a step and of the draft's block after it. Prefill in blocks writes to rings after it has
read them."""

ALONE = 2
"""Maximum number of slots for which batches are never padded: graphs exist for 1, 2, 4, ...
sequences."""


def spare_slots(n_slots: int) -> int:
    """Return the number of slots after those of the sequences: one, for sequences that pad a
    batch."""
    return 1 if n_slots > ALONE else 0


def capacity(n_ctx: int, window: int, ring_slack: int) -> int:
    """Rows of a ring: whole tiles, and no more than a sequence has positions."""
    rows = -(-(window + max(ring_slack, MIN_SLACK)) // TILE) * TILE
    return min(rows, pages_of(n_ctx + 2 * MAX_STEP_ROWS) * PAGE)


def page_bytes(shape: CacheShape, kind: Kind) -> int:
    """Return the bytes of a page of the pool in one layer; 0 for layers with a window."""
    return PAGE * row_bytes(shape, kind) if shape.window is None else 0


def slot_bytes(shape: CacheShape, n_ctx: int, ring_slack: int, kind: Kind) -> int:
    """Return the bytes of a slot's ring in one layer; 0 for layers without a window."""
    if shape.window is None:
        return 0
    return capacity(n_ctx, shape.window, ring_slack) * row_bytes(shape, kind)


def row_bytes(shape: CacheShape, kind: Kind) -> int:
    """Return the bytes of one position, keys and values."""
    return TYPES[kind].row_bytes(row_columns(shape))


def row_columns(shape: CacheShape) -> int:
    """Return the number of values of one position, keys and values."""
    return shape.n_kv * (key_columns(shape) + shape.head_dim)


def shares(head_dim: int, rotary_pairs: int) -> bool:
    """Return whether the cache stores only the rotated columns of keys and takes the others from
    the values; see `CacheShape.rotary_pairs`."""
    return head_dim == 512 and 0 < rotary_pairs <= CACHE_ROTARY_PAIRS


def key_columns(shape: CacheShape) -> int:
    """Return the columns of a head that are stored of keys."""
    return 2 * CACHE_ROTARY_PAIRS if shares(shape.head_dim, shape.rotary_pairs) else shape.head_dim
