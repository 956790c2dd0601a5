"""Every pinned version of `make` is available for every supported Python version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.oracle import conftest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
NEEDS_311 = {"cuda-bindings": "13.5.0", "transformers": "5.22.2", "speculators": "0.9.0"}
"""Pinned versions without a build for Python 3.10, on 24 November 2026."""


def pins(python: str) -> dict[str, list[str]]:
    """Return names and versions from constraints.txt and the Makefile for a Python version."""
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x[:1] not in "#"]
    lines += re.findall(r'"(\S+==[^"]+)"', (ROOT / "Makefile").read_text())
    found: dict[str, list[str]] = {}
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or marker.evaluate({"python_version": python}):
            found.setdefault(requirement.name, []).append(str(requirement.specifier)[2:])
    return found


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_every_pin_exists(python: str) -> None:
    found = pins(python)
    assert {"torch", "transformers", "cuda-core", "cuda-bindings"} <= set(found)
    assert all(len(versions) == 1 for versions in found.values()), found
    if python == "3.10":
        assert not [name for name, version in NEEDS_311.items() if found.get(name) == [version]]
    else:
        assert {name: found[name][0] for name in NEEDS_311} == NEEDS_311


@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_pyproject_pins_the_same(python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in map(Requirement, (line for extra in extras.values() for line in extra)):
        marker = requirement.marker
        applies = marker is None or marker.evaluate(
            {"python_version": python, "sys_platform": "linux"}
        )
        if applies and (found := pins(python).get(requirement.name)):
            assert requirement.specifier.contains(found[0]), requirement


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_names_the_missing_compiler(tmp_path: Path) -> None:
    """The tests of the emulator ended with tracebacks, after minutes of installing."""
    command = [str(shutil.which("make")), "-s", "compiler"]
    for path, code in ((os.environ["PATH"], 0), (str(tmp_path), 2)):
        done = subprocess.run(
            command, cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == code and ("need g++" in done.stderr) == (code != 0)


def test_only_running_a_model_brings_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {Requirement(line).name for line in project["dependencies"]}
    assert not {"torch", "starlette", "cuda-core"} & base
    extras = project["optional-dependencies"]
    assert extras["run"][0].startswith("torch") and "g4spec[run]" in extras["serve"]
    assert "'.[serve]'" in (ROOT / "Makefile").read_text(), "with torch"


def test_files_that_need_transformers_are_skipped_before_3_11() -> None:
    """Exactly the files that import it; a new file must be added to the list."""
    named = {"package.py", "test_dflash.py", "test_dflash2.py", "test_dspark.py", "test_eagle3.py"}
    folder = ROOT / "tests" / "oracle"
    imports = r"(?m)^ *(from|import) speculators|^from tests\.oracle import.*\bpackage\b"
    assert {f.name for f in folder.glob("*.py") if re.search(imports, f.read_text())} == named
    assert set(conftest.collect_ignore) in (set(), named)
