"""How much `cuda_kv` keeps. Imports no torch: `doctor` counts as the engine does."""

from __future__ import annotations

from typing import Literal, get_args

from g4spec.core import MAX_STEP_ROWS, PAGE, CacheShape
from g4spec.ops.kv_size import pages_of
from g4spec.runtime.cuda.build.constants import CACHE_ROTARY_PAIRS

Kind = Literal["f16", "q8_0"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""How keys and values may be stored on a GPU: the values of `--cache-type`. On a CPU they are
always F32."""

TILE = PAGE
"""Positions of an aligned tile, consecutive in memory."""

BLOCK = 32
"""Values that share a scale."""

MIN_SLACK = MAX_STEP_ROWS
"""Rows a ring holds beyond its window: a step's rows never overwrite one that is still visible."""

SLACK = 2 * MAX_STEP_ROWS
"""Rows a ring holds beyond its window in an engine: a step's, and a draft's block behind it.
Prompts go around the rings."""

ALONE = 2
"""Slots up to which batches are never filled up: recorded steps have 1, 2, 4, ... sequences."""


def spare_slots(n_slots: int) -> int:
    """Slots behind the sequences' own: one for whatever fills a recorded batch up."""
    return 1 if n_slots > ALONE else 0


def capacity(n_ctx: int, window: int, slack: int) -> int:
    """Rows of a ring: whole tiles, and no more than a sequence has positions."""
    rows = -(-(window + max(slack, MIN_SLACK)) // TILE) * TILE
    return min(rows, pages_of(n_ctx + 2 * MAX_STEP_ROWS) * PAGE)


def page_bytes(shape: CacheShape, kind: Kind) -> int:
    """Bytes of a page of the pool in one layer; none in layers with a window."""
    return PAGE * row_bytes(shape, kind) if shape.window is None else 0


def slot_bytes(shape: CacheShape, n_ctx: int, slack: int, kind: Kind) -> int:
    """Bytes of the ring of a slot in one layer; none in layers without a window."""
    if shape.window is None:
        return 0
    return capacity(n_ctx, shape.window, slack) * row_bytes(shape, kind)


def row_bytes(shape: CacheShape, kind: Kind) -> int:
    """Bytes of one position, keys and values."""
    columns = row_columns(shape)
    return columns * 2 if kind == "f16" else columns + columns // BLOCK * 2


def row_columns(shape: CacheShape) -> int:
    """Numbers of one position, keys and values."""
    return shape.n_kv * (key_columns(shape) + shape.head_dim)


def shares(head_dim: int, rotary_pairs: int) -> bool:
    """True if keys are kept as what differs from the values; see `CacheShape`."""
    return head_dim == 512 and 0 < rotary_pairs <= CACHE_ROTARY_PAIRS


def key_columns(shape: CacheShape) -> int:
    """Columns of a head that are kept of keys."""
    return 2 * CACHE_ROTARY_PAIRS if shares(shape.head_dim, shape.rotary_pairs) else shape.head_dim
