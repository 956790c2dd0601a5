"""An unusual target or draft runs although no kernel takes it, and runs right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import family, hostile
from tests.gpu.device import EMULATED
from tests.support import malformed


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    if EMULATED:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 33, 1 << 33))


@pytest.mark.parametrize("kind", family.DRAFTS)
def test_a_draft_of_blocks_that_are_no_numbers(tmp_path: Path, kind: str) -> None:
    """It gains nothing, and changes nothing."""
    target = hostile.made(tmp_path, hostile.KINDS["dense"])
    source = hostile.made_draft(tmp_path, family.DRAFTS[kind])
    name = malformed.blocks(source)[0]
    path = malformed.changed(source, tmp_path / "broken.gguf", name, malformed.bad_blocks)
    assert hostile.wrong_text(target, path) is None


@pytest.mark.parametrize("kind", hostile.ODD_TARGETS)
def test_an_unusual_target(tmp_path: Path, kind: str) -> None:
    target = hostile.made(tmp_path, hostile.ODD_TARGETS[kind])
    assert (
        hostile.wrong_text(
            target, None, hostile.CACHE.get(kind, "f16"), hostile.NEAR.get(kind, 0.05)
        )
        is None
    )


@pytest.mark.parametrize("kind", hostile.ODD_DRAFTS)
def test_an_unusual_draft(tmp_path: Path, kind: str) -> None:
    target = hostile.made(tmp_path, hostile.ON.get(kind, {}))
    draft = hostile.made_draft(tmp_path, hostile.ODD_DRAFTS[kind])
    assert hostile.wrong_text(target, draft) is None
