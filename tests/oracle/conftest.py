"""Without Python 3.11 the speculators package cannot be had (see Makefile), so that what compares
with it is left out there."""

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
