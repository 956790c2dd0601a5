"""Sizes of KV caches in positions and pages. Imports no torch, so that `doctor` uses the same
numbers."""

from __future__ import annotations

from g4spec.core import MAX_STEP_ROWS, PAGE

PADDING_POSITIONS = 2 * MAX_STEP_ROWS
"""Number of positions after the end of a context that padding rows of a step and a draft's block
use. The rows of a block attend to each other there, so each sequence needs its own."""


def pages_of(positions: int) -> int:
    """Return the number of pages for so many positions."""
    return -(-positions // PAGE)


def pool_positions(positions: int) -> int:
    """Return the positions of a pool for so many tokens: whole pages, plus the spare one."""
    return (pages_of(positions + PADDING_POSITIONS) + 1) * PAGE


def capacity(n_ctx: int, window: int | None, ring_slack: int) -> int:
    """Return the number of positions per sequence in a layer's cache."""
    return (
        n_ctx + PADDING_POSITIONS
        if window is None
        else min(n_ctx + PADDING_POSITIONS, window + ring_slack)
    )
