"""The speculators package needs Python 3.11 (see Makefile); on older versions, tests that compare
with it are skipped."""

from __future__ import annotations

import sys

from tests.support.coarse_timing import coarse_timing  # noqa: F401

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
