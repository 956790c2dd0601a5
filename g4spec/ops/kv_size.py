"""Positions and pages that caches keep. Imports no torch: `doctor` counts as the engine does."""

from __future__ import annotations

from g4spec.core import MAX_STEP_ROWS, PAGE

BEHIND = 2 * MAX_STEP_ROWS
"""Positions behind the last of a context that padding rows of a step and a draft's block take. A
block's rows see each other there, so each text needs its own."""


def pages_of(positions: int) -> int:
    """Pages that so many positions take."""
    return -(-positions // PAGE)


def pool_positions(positions: int) -> int:
    """Positions that a pool for texts of so many keeps: whole pages, and the spare one."""
    return (pages_of(positions + BEHIND) + 1) * PAGE


def capacity(n_ctx: int, window: int | None, slack: int) -> int:
    """Positions of a sequence that a layer's cache holds."""
    return n_ctx + BEHIND if window is None else min(n_ctx + BEHIND, window + slack)
