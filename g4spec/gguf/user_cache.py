"""The user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def folder(name: str) -> Path:
    """Return the folder `name` of g4spec's caches; it need not exist."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # to be ignored, says the XDG specification
        base = Path.home() / ".cache"
    return base / "g4spec" / name
