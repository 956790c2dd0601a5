"""Malformed targets and drafts are refused before any kernel runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.gpu import family, hostile

pytestmark = pytest.mark.usefixtures("free_memory")


@pytest.mark.parametrize("kind", family.TARGETS)
def test_a_malformed_target(tmp_path: Path, kind: str) -> None:
    source, tried = hostile.write_target(tmp_path, hostile.KINDS[kind]), 0
    for what, write in hostile.broken_targets(source):
        load = partial(hostile.load_target, write(tmp_path / "broken.gguf"))
        assert hostile.refused(load) is None, what
        tried += 1
    assert tried > 40


@pytest.mark.parametrize("kind", family.DRAFTS)
def test_a_malformed_draft(tmp_path: Path, kind: str) -> None:
    engine = hostile.load_target(hostile.write_target(tmp_path, hostile.KINDS["dense"]))
    source, tried = hostile.write_draft(tmp_path, family.DRAFTS[kind]), 0
    for what, write in hostile.broken_drafts(kind, source):
        path = write(tmp_path / "broken.gguf")
        load = partial(hostile.build, path, engine.backend, engine.target)
        assert hostile.refused(load) is None, what
        tried += 1
    assert tried > 30


def test_launched_kernels_are_recorded(tmp_path: Path) -> None:
    engine = hostile.load_target(hostile.write_target(tmp_path, hostile.SMALL))
    with hostile.record_kernels() as names:
        family.generate(engine, [2, 7], 0, 1)
    assert names
