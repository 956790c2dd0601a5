"""Positions and pages that caches keep. Imports no torch: `doctor` counts as the engine does."""

from __future__ import annotations

from g4spec.core import PAGE


def pages_of(positions: int) -> int:
    """Pages that so many positions take."""
    return -(-positions // PAGE)


def pool_positions(positions: int) -> int:
    """Positions that a pool for texts of so many keeps: whole pages, and the spare one."""
    return (pages_of(positions) + 1) * PAGE


def capacity(n_ctx: int, window: int | None, slack: int) -> int:
    """Positions of a sequence that a layer's cache holds."""
    return n_ctx if window is None else min(n_ctx, window + slack)
