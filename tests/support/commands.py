"""Runs commands of the command line in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from g4spec import cli


class Cli:
    """Runs commands. `cache`: folder that converted drafts would be written to."""

    def __init__(self, capsys: pytest.CaptureFixture[str], cache: Path | None = None) -> None:
        self.cache, self._capsys = cache, capsys

    def __call__(self, *argv: object, code: int = 0) -> tuple[str, str]:
        """Run a command, check its exit code and return (stdout, stderr)."""
        got = cli.run([str(a) for a in argv])
        out, err = self._capsys.readouterr()
        assert got == code, err
        return out, err

    def json(self, *argv: object) -> dict[str, Any]:
        """Run a command with --json and return the parsed output."""
        value: dict[str, Any] = json.loads(self(*argv, "--json")[0])
        return value

    def refused(self, *argv: object, codes: tuple[int, ...] = (2, 3, 4)) -> str:
        """Run a command that must fail before doing anything, and return its single line on
        stderr."""
        code = cli.run([str(a) for a in argv])
        out, err = self._capsys.readouterr()
        assert code in codes, (code, out, err)
        assert out == "" and len(err.splitlines()) == 1 and err.startswith("error: "), (out, err)
        assert self.cache is not None and not self.cache.exists(), (
            "a draft was converted before the error"
        )
        return err


def in_folder(
    home: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    """Return a `Cli` that runs in folder `home`, with its own cache."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return Cli(capsys, cache)
