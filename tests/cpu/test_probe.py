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


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_ctrl_c_shows_partial_results(
    family: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    """Each file is probed with 3 texts; Ctrl-C comes after `after` of them."""
    variants, calls = draft_probe.variants, list[tuple[int, int]]()
    monkeypatch.setattr(draft_probe, "variants", lambda file: list(variants(file))[:2])

    def press(done: int, total: int) -> None:
        calls.append((done, total))
        if done == after:
            raise KeyboardInterrupt

    def probe() -> draft_probe.ProbeResult:
        pair = family / "target.gguf", family / "dflash.gguf"
        return draft_probe.probe(*pair, n_predict=4, count=1, progress=press)

    if not after:
        with pytest.raises(KeyboardInterrupt):
            probe()
        return
    found = probe()
    assert calls == [(n, 9) for n in range(after + 1)]
    assert found.interrupted == (
        f"{min(after, 3)} of 3 texts of the unchanged draft and 0 of 2 changed settings were "
        "measured"
    )
    monkeypatch.setattr(draft_probe, "probe", lambda *args, **kw: found)
    line = ["validate", str(family / "dflash.gguf"), "--target", str(family / "target.gguf")]
    assert run([*line, "--probe"]) == 130
    out, err = capsys.readouterr()
    assert "tokens per step" in out and f"interrupted: {found.interrupted}" in err


def test_the_command_needs_a_target(family: Path) -> None:
    assert run(["validate", str(family / "dflash.gguf"), "--probe"]) == 2
