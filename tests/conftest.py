"""Applies to all tests: what importing them leaves in memory is not collected again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all tests without garbage collection, and leave a million lasting objects out of later
    ones: each full collection of them takes 0.5 to 1 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the files of tests/oracle in one worker: the others need not import transformers' models
    and speculators, which takes as long as importing all tests."""
    from xdist.scheduler import LoadFileScheduling

    class OneOracle(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/oracle" if file.startswith("tests/oracle/") else file

    return OneOracle(config, log) if config.getvalue("dist") == "loadfile" else None
