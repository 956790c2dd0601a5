"""Whether upstream runs a draft: one of three verdicts, derived from its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from g4spec import models
from g4spec.cli import run
from g4spec.convert import convert
from g4spec.models.upstream import REFUSED_SUFFIX
from g4spec.validate import upstream
from tests.support import kinds, tiny, tiny_drafts

ROOT = Path(__file__).parents[2]
DSPARK, EAGLE3 = tiny_drafts.speculators_dspark, tiny_drafts.eagle3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("upstream") / "target")


@pytest.mark.parametrize("name", kinds.UPSTREAM)
def test_case(name: str, target: Path, tmp_path: Path) -> None:
    make, options, case = kinds.UPSTREAM[name]
    make(tmp_path / "draft", target, **options)
    out = tmp_path / "draft.gguf"
    convert(tmp_path / "draft", out, target=target)
    assert upstream.of(out).case == case
    with upstream.GGUF(out) as file:
        arch = file["general.architecture"]
    known = arch.removesuffix(REFUSED_SUFFIX) in upstream.ARCHITECTURES
    assert arch.endswith(REFUSED_SUFFIX) == (known and case == "refused")


def test_a_missing_residual_key_is_reported(target: Path, tmp_path: Path) -> None:
    draft = EAGLE3(tmp_path / "draft", target, before_residual=None)
    result = convert(draft, tmp_path / "d.gguf", target=target)
    assert any("norm_before_residual" in note for note in result.notes)


def test_the_command(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = DSPARK(tmp_path / "draft", target, window=8)
    convert(draft, tmp_path / "d.gguf", target=target)
    assert run(["validate", str(tmp_path / "d.gguf"), "--upstream", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["case"] == "differs" and len(result["reasons"]) == 2
    assert run(["validate", str(tmp_path / "d.gguf"), "--upstream"]) == 0
    assert "slightly different" in "".join(capsys.readouterr())


def test_every_kind_is_on_the_page() -> None:
    page = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")
    assert page == upstream.document(), "run python -m g4spec.validate.upstream"
    assert all(m.TITLE in page for m in models.drafts().values())
