"""Applies to all tests: what importing them leaves in memory is not collected again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

TOGETHER = ("tests/oracle", "tests/fuzz")
"""Folders whose files one worker runs."""


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
    """Run all files of tests/oracle in one worker: the others need not import transformers' models
    and speculators, which takes as long as importing all tests. The same for tests/fuzz: files with
    few tests come last, and one there has two long ones, for which the other core waited."""
    from xdist.scheduler import LoadFileScheduling

    class WholeFolders(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((f for f in TOGETHER if file.startswith(f"{f}/")), file)

    return WholeFolders(config, log) if config.getvalue("dist") == "loadfile" else None
