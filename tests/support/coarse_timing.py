"""Tests measure each cycle once, because it takes longer than all else that most engines do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from g4spec.runtime import cycle_timing


@pytest.fixture(autouse=True, scope="session")
def coarse_timing() -> Iterator[None]:
    """Measure each cycle once for `auto` lengths, whose choice changes no text."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cycle_timing, "REPEATS", 1)
        yield
