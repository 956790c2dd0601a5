"""Every rule speaks about a file that breaks it, and is silent about one that does not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from g4spec.errors import InputError, UsageError
from g4spec.validate import all_rules, validate
from g4spec.validate.document import document
from g4spec.validate.rule import Severity
from tests.cpu.gguf_breakage import BREAK
from tests.cpu.gguf_fixtures import KINDS

EXPECTED_NOTES = {"zlab": {"G4-BLK-009"}}
"""What a healthy file is told: mixed causality is right, and worth knowing."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of healthy files."""
    folder = tmp_path_factory.mktemp("good")
    for name, build in KINDS.items():
        build().write(folder / f"{name}.gguf")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_file_passes(good: Path, kind: str) -> None:
    target = None if kind == "target" else good / "target.gguf"
    report = validate(good / f"{kind}.gguf", target)
    assert report.ok
    assert {f.rule.id for f in report.failures} == EXPECTED_NOTES.get(kind, set())
    assert set(report.skipped.values()) <= {"no source was given"}


def test_every_rule_has_a_file_that_breaks_it() -> None:
    assert set(BREAK) == {i for i in all_rules() if not i.startswith("G4-CMP")}


@pytest.mark.parametrize("rule_id", BREAK)
def test_the_rule_speaks(tmp_path: Path, rule_id: str) -> None:
    kind, change = BREAK[rule_id]
    file, target = KINDS[kind](), KINDS["target"]()
    change(file, target)
    path = file.write(tmp_path / "broken.gguf")
    pair = None if kind == "target" else target.write(tmp_path / "target.gguf")
    report = validate(path, pair)
    said = [f for f in report.failures if f.rule.id == rule_id]
    assert said, [f.rule.id for f in report.failures]
    for failure in said:
        assert failure.finding.where
        assert str(failure.finding.expected) != str(failure.finding.found)
        assert len(failure.finding.fix) > 8
    assert report.ok == (report.count(Severity.ERROR) == 0)


@pytest.mark.parametrize("rule_id", BREAK)
def test_the_rule_is_asked_of_a_healthy_file_and_silent(good: Path, rule_id: str) -> None:
    rule = all_rules()[rule_id]
    kind = next(k for k in KINDS if not rule.on or KINDS[k]().kv["general.architecture"].data
                in rule.on)  # fmt: skip
    if rule_id in EXPECTED_NOTES.get(kind, ()):
        kind = "speculators"
    target = None if kind == "target" else good / "target.gguf"
    report = validate(good / f"{kind}.gguf", target, only=[rule_id])
    assert report.checked == [rule_id]
    assert not report.failures


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x00" * 64, b"<!doctype html>", b"GGUF" * 99])
def test_what_is_no_model_is_a_finding(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    report = validate(path)
    assert not report.ok
    assert report.failures[0].rule.family == "GGUF"


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = KINDS["speculators"]().bytes()
    path = tmp_path / "cut.gguf"
    for n in range(0, len(whole), 997):
        path.write_bytes(whole[:n])
        assert not validate(path).ok, n


def test_what_cannot_be_read_is_an_error(tmp_path: Path, good: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        validate(tmp_path / "missing.gguf")
    with pytest.raises(InputError, match="is no target"):
        validate(good / "zlab.gguf", good / "assistant.gguf")
    with pytest.raises(UsageError, match="unknown rule"):
        validate(good / "zlab.gguf", only=["G4-NOT-001"])


def test_the_report_is_sorted_and_becomes_json(tmp_path: Path) -> None:
    file = KINDS["zlab"]()
    for rule_id in ("G4-BLK-009", "G4-BLK-003", "G4-MASK-004", "G4-BLK-002"):
        BREAK[rule_id][1](file, file)
    report = validate(file.write(tmp_path / "x.gguf"))
    severities = [f.rule.severity for f in report.failures]
    assert severities == sorted(severities)
    assert len(set(severities)) == 3
    parsed = json.loads(json.dumps(report.json()))
    assert not parsed["ok"]
    assert parsed["counts"]["error"] == report.count(Severity.ERROR)
    assert {f["id"] for f in parsed["findings"]} >= {"G4-BLK-002", "G4-MASK-004"}
    assert "no target was given" in parsed["skipped"].values()


def test_titles_differ() -> None:
    titles = [r.title for r in all_rules().values()]
    assert len(set(titles)) == len(titles)


def test_the_document_is_up_to_date() -> None:
    path = ROOT / "docs" / "rules.md"
    if os.environ.get("G4SPEC_WRITE_DOCS"):
        path.write_text(document())
    assert path.read_text() == document(), "run python -m g4spec.validate.document"
