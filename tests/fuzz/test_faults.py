"""A sample of `benchmarks/write_faults.py`: every command that writes, faults of every kind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def faults(*options: str, **env: str) -> tuple[int, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.faults", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )
    assert done.stdout, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout)
    return done.returncode, found


@pytest.mark.skipif(not hasattr(os, "fork") or shutil.which("cc") is None, reason="needs fork, cc")
def test_no_file_is_half_written() -> None:
    code, found = faults("--cases", "12", "--seed", "5")
    assert found["broken"] == {} and code == 0
    assert len(found["by_command"]) == 8 and len(found["by_fault"]) > 4  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "fork") or shutil.which("cc") is None, reason="needs fork, cc")
def test_a_writer_that_is_not_atomic_is_detected(tmp_path: Path) -> None:
    """`recipe -o` once wrote in place: a limit or a full disk left half a script."""
    (tmp_path / "sitecustomize.py").write_text(
        "import contextlib, sys\n"
        "def in_place(path, size):\n"
        "    path.parent.mkdir(exist_ok=True)\n"
        "    return open(path, 'wb')\n"
        "class Late:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'g4spec.cli.recipe':\n"
        "            import g4spec.gguf.atomic as r\n"
        "            r.atomic_write = in_place\n"
        "sys.meta_path.insert(0, Late())\n"
    )
    options = ("--cases", "12", "--seed", "6", "--only", "recipe")
    code, found = faults(*options, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert code == 1 and any("half there" in what for what in found["broken"]), found  # type: ignore[attr-defined]
