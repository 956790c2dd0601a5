"""Fixtures for tests of commands."""

from __future__ import annotations

import pytest

from tests.support import tokens
from tests.support.coarse_timing import coarse_timing  # noqa: F401
from tests.support.commands import Cli


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Write a small target and a draft for it."""
    folder = tmp_path_factory.mktemp("models")
    target = tokens.target_file(folder / "target.gguf")
    return str(target), str(tokens.draft_file(folder / "draft.gguf"))


@pytest.fixture
def g4spec(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a `Cli`, which runs commands in this process."""
    return Cli(capsys)


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove COLUMNS, which pytest-xdist sets: output in a pipe would be wrapped to it."""
    monkeypatch.delenv("COLUMNS", raising=False)
