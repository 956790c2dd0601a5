"""Skips comparisons with the speculators package before Python 3.11, which it needs (see
Makefile)."""

from __future__ import annotations

import sys

collect_ignore = (
    []
    if sys.version_info >= (3, 11)
    else [
        "package.py",
        "test_dflash.py",
        "test_dflash2.py",
        "test_dspark.py",
        "test_eagle3.py",
    ]
)
