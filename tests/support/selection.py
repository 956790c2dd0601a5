"""Marks most cases of a long list of parameters as slow: `make test` leaves them out, `make
test-all` runs them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def sample(cases: Collection[Any], count: int) -> list[Any]:
    """Return parameters for all of `cases`, of which `count`, spread evenly from first to last, are
    not marked as slow."""
    last = len(cases) - 1
    kept = {round(i * last / max(1, count - 1)) for i in range(count)}
    return [
        c if i in kept else pytest.param(c, marks=pytest.mark.slow) for i, c in enumerate(cases)
    ]
