"""`validate --probe` finds faults that no rule can see, and names them by their cost in
acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from g4spec.cli import run
from g4spec.convert import convert
from g4spec.gguf import ValueType
from g4spec.measure import draft_probe
from tests.support import faults

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    convert(TINY / "target", folder / "target.gguf")
    convert(TINY / "dflash", folder / "dflash.gguf", target=TINY / "target")
    return folder


def probed(
    family: Path, draft: Path, monkeypatch: Any, keep: tuple[str, ...]
) -> draft_probe.ProbeResult:
    """Run a short probe of only the settings whose name begins with one of `keep`."""
    every = draft_probe.variants
    monkeypatch.setattr(
        draft_probe,
        "variants",
        lambda file: [(name, kv) for name, kv in every(file) if name.startswith(keep)],
    )
    return draft_probe.probe(family / "target.gguf", draft, n_predict=24, count=1)


def test_the_costly_setting_is_named(family: Path, tmp_path: Path, monkeypatch: Any) -> None:
    file = faults.read(family / "dflash.gguf")
    file.set("dflash.target_layers", ValueType.ARRAY, [1, 3, 4], ValueType.I32)
    draft = file.write(tmp_path / "x.gguf")
    found = probed(family, draft, monkeypatch, ("dflash.target_layers",))
    assert found.better == ["dflash.target_layers = [2, 4, 5]"], found.json()
    assert not found.ok
    assert len(found.run.shares()) == 15


def test_no_setting_improves_a_correct_draft(family: Path, monkeypatch: Any) -> None:
    found = probed(family, family / "dflash.gguf", monkeypatch, ("dflash.rope", "dflash.emb"))
    assert found.ok, found.json()
    assert len(found.others) == 2
    json.dumps(found.json())


def test_the_command_needs_a_target(family: Path) -> None:
    assert run(["validate", str(family / "dflash.gguf"), "--probe"]) == 2
