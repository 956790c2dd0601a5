"""Every rule reports a file that breaks it, and is silent about a healthy one."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from g4spec.cli import run
from g4spec.convert.tokenizer import STOP_IDS, SUPPRESS
from g4spec.errors import InputError, UsageError
from g4spec.gguf import TensorData, ValueType, array, write
from g4spec.validate import all_rules, validate
from g4spec.validate.document import document
from g4spec.validate.rule import Severity
from tests.cpu import gguf_breakage
from tests.cpu.gguf_fixtures import KINDS, TARGETS
from tests.cpu.plausible_breakage import PLAUSIBLE
from tests.support.processor_time import processor_time_below

EXPECTED_NOTES = {"zlab": {"G4-BLK-009"}}
"""Notes about a healthy file: mixed causality is valid, but worth a note."""
BREAK = {**gguf_breakage.BREAK, **PLAUSIBLE}
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
    target = None if kind in TARGETS else good / "target.gguf"
    report = validate(good / f"{kind}.gguf", target)
    assert report.ok
    assert {f.rule.id for f in report.failures} == EXPECTED_NOTES.get(kind, set())
    assert set(report.skipped.values()) <= {"no source was given"}


def test_an_eagle3_draft_with_the_tokenizer_of_llama_cpp(tmp_path: Path, good: Path) -> None:
    """Its converter copies the target's tokens as those of a "llama" tokenizer, without merges:
    two errors, and 35 rules not checked."""
    file = KINDS["eagle3"]()
    file.set("tokenizer.ggml.model", ValueType.STRING, "llama")
    del file.kv["tokenizer.ggml.merges"]
    report = validate(file.write(tmp_path / "x.gguf"), good / "target.gguf")
    assert report.ok and not report.unable


def test_a_deepspec_draft_of_llama_cpp_keeps_its_embedding_scale(
    tmp_path: Path, good: Path
) -> None:
    """Its own tables were a sign of speculators, so the advice was to remove the scale."""
    file = KINDS["dspark"]()
    for key in [key for key in file.kv if key.startswith("g4spec.")]:
        del file.kv[key]
    report = validate(file.write(tmp_path / "x.gguf"), good / "target.gguf")
    assert "dflash.embedding_scale" in file.kv and report.ok


def test_a_speculators_draft_of_llama_cpp_needs_no_embedding_scale(
    tmp_path: Path, good: Path
) -> None:
    """Without tables of its own, as one with the whole vocabulary, it was taken for z-lab's."""
    file = KINDS["zlab"]()
    for key in [key for key in file.kv if key.startswith("g4spec.") or "embedding_scale" in key]:
        del file.kv[key]
    file.set("dflash.sample_from_anchor", ValueType.BOOL, False)
    report = validate(file.write(tmp_path / "x.gguf"), good / "target.gguf")
    assert "G4-BLK-003" not in {f.rule.id for f in report.failures}


def test_a_file_that_is_named_after_few_nvfp4_matrices(tmp_path: Path, good: Path) -> None:
    """llama.cpp's converter does so for any NVFP4 checkpoint; the rest may have more bytes."""
    file = KINDS["zlab"]()
    matrix = file.tensors["blk.0.ffn_up.weight"]
    matrix.type, matrix.data = 40, bytes(np.prod(matrix.shape) // 64 * 36)
    file.set("general.file_type", ValueType.U32, 39)
    report = validate(file.write(tmp_path / "x.gguf"), good / "target.gguf", only=["G4-KEY-008"])
    assert report.ok and not report.failures


def test_every_rule_has_a_file_that_breaks_it() -> None:
    rules = {i for i in all_rules() if not i.startswith("G4-CMP")}
    assert set(BREAK) == rules, "BREAK of gguf_breakage.py, PLAUSIBLE of plausible_breakage.py"


@pytest.mark.parametrize("rule_id", BREAK)
def test_each_rule_reports_its_fault(tmp_path: Path, rule_id: str) -> None:
    kind, change = BREAK[rule_id]
    file, target = KINDS[kind](), KINDS["target"]()
    change(file, target)
    path = file.write(tmp_path / "broken.gguf")
    pair = None if kind in TARGETS else target.write(tmp_path / "target.gguf")
    report = validate(path, pair)
    failures = [f for f in report.failures if f.rule.id == rule_id]
    assert failures, [f.rule.id for f in report.failures]
    for failure in failures:
        assert failure.finding.where
        assert str(failure.finding.expected) != str(failure.finding.found)
        assert len(failure.finding.fix) > 8
    assert report.ok == (report.count(Severity.ERROR) == 0)


@pytest.mark.parametrize("number", [4, 5, 6])
def test_file_types_that_llama_cpp_removed_are_named(tmp_path: Path, number: int) -> None:
    file, target = KINDS["zlab"](), KINDS["target"]()
    gguf_breakage.number("general.file_type", number)(file, target)
    report = validate(file.write(tmp_path / "x.gguf"), target.write(tmp_path / "target.gguf"))
    (found,) = (f for f in report.failures if f.rule.id not in EXPECTED_NOTES["zlab"])
    assert found.rule.id == "G4-KEY-008" and found.finding.found == number


@pytest.mark.parametrize("rule_id", BREAK)
def test_each_rule_is_silent_on_a_healthy_file(good: Path, rule_id: str) -> None:
    rule = all_rules()[rule_id]
    kind = next(
        k for k in KINDS if not rule.on or KINDS[k]().kv["general.architecture"].data in rule.on
    )
    if BREAK[rule_id][0] in TARGETS:
        kind = BREAK[rule_id][0]
    if rule_id in EXPECTED_NOTES.get(kind, ()):
        kind = "speculators"
    target = None if kind in TARGETS else good / "target.gguf"
    report = validate(good / f"{kind}.gguf", target, only=[rule_id])
    assert report.checked == [rule_id]
    assert not report.failures


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x00" * 64, b"<!doctype html>", b"GGUF" * 99])
def test_a_gguf_without_a_model_is_a_finding(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    report = validate(path)
    assert not report.ok
    assert report.failures[0].rule.family == "GGUF"


@pytest.mark.parametrize(
    ("content", "id"),
    [
        (b"GGUF", "G4-GGUF-003"),
        (b"GGUF" + (3).to_bytes(4, "little"), "G4-GGUF-003"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(16), "G4-GGUF-012"),
    ],
)
def test_a_tiny_file_has_one_error(tmp_path: Path, content: bytes, id: str) -> None:
    """Nothing that only follows from it: version 0, tensors behind the end, no architecture."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    assert [f.rule.id for f in validate(path).failures] == [id]


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = KINDS["speculators"]().bytes()
    path = tmp_path / "cut.gguf"
    for n in range(0, len(whole), 997):
        path.write_bytes(whole[:n])
        assert not validate(path).ok, n


def test_damaged_files_never_end_in_a_traceback(tmp_path: Path, good: Path) -> None:
    rng, path = random.Random(0), tmp_path / "x.gguf"
    whole = {kind: build().bytes() for kind, build in KINDS.items()}
    for _ in range(150):
        kind = rng.choice(list(whole))
        data = bytearray(whole[kind])
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.randrange(min(len(data), rng.choice((64, 4000, 40000))))
            size = rng.choice((1, 8))
            data[at : at + size] = rng.choice((0, 1, 4, 127, 255)).to_bytes(size, "little")
        path.write_bytes(data)
        pair = None if kind in TARGETS else good / "target.gguf"
        json.dumps(validate(path, pair).json())


def test_a_damaged_target_is_named_once(tmp_path: Path, good: Path) -> None:
    target = tmp_path / "cut.gguf"
    target.write_bytes((good / "target.gguf").read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot serve as target: found tensor") as caught:
        validate(good / "dflash.gguf", target)
    assert f"See `g4spec validate {target}`" in str(caught.value)


def test_unreadable_files_are_an_error(tmp_path: Path, good: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        validate(tmp_path / "missing.gguf")
    with pytest.raises(InputError, match=r"is not a target.*with `target`"):
        validate(good / "zlab.gguf", good / "assistant.gguf")
    with pytest.raises(UsageError, match="unknown rule"):
        validate(good / "zlab.gguf", only=["G4-NOT-001"])
    with pytest.raises(UsageError, match="Did you mean G4-BLK-009"):
        validate(good / "zlab.gguf", only=["blk-009"])


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


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = KINDS["zlab"]()
    good = str(file.write(tmp_path / "good.gguf"))
    target = str(KINDS["target"]().write(tmp_path / "target.gguf"))
    assert run(["validate", good, "--target", target]) == 0
    assert "0 errors, 0 warnings, 1 note" in capsys.readouterr().out
    BREAK["G4-BLK-003"][1](file, file)
    warned = str(file.write(tmp_path / "warned.gguf"))
    assert run(["validate", warned]) == 0
    capsys.readouterr()
    assert run(["validate", warned, "--strict"]) == 1
    out, err = capsys.readouterr()
    assert out.count(f"{warned}: ") + err.count(f"{warned}: ") == 1, "the summary, once"
    assert run(["validate", warned, "--strict", "--rule", "G4-MASK-001"]) == 0
    assert "warned.gguf: 1 rule, 0 errors" in capsys.readouterr().out
    BREAK["G4-MASK-004"][1](file, file)
    broken = str(file.write(tmp_path / "broken.gguf"))
    capsys.readouterr()
    assert run(["validate", broken, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["counts"]["error"] == 1
    assert err.count("\n") >= 1
    assert run(["validate", str(tmp_path / "missing.gguf")]) == 3
    assert run(["validate", good, "--rule", "nonsense"]) == 2
    assert run(["validate"]) == 2
    capsys.readouterr()
    assert run(["validate", "--list-rules", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rules"]) == len(all_rules())


def test_titles_differ() -> None:
    titles = [r.title for r in all_rules().values()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("rule_id", all_rules())
def test_the_title_of_a_failed_rule_reads_as_a_requirement(rule_id: str) -> None:
    """It is printed with a finding: a statement ("d2t increases") would say the opposite."""
    rule = all_rules()[rule_id]
    modal = "must" if rule.severity is Severity.ERROR else "should"
    assert modal in rule.title.split(), rule.title


def test_the_document_is_up_to_date() -> None:
    path = ROOT / "docs" / "rules.md"
    if os.environ.get("G4SPEC_WRITE_DOCS"):
        path.write_text(document())
    assert path.read_text() == document(), "run python -m g4spec.validate.document"


def test_titles_begin_with_the_file_not_with_upstream() -> None:
    assert [r.id for r in all_rules().values() if r.title.startswith("upstream")] == []


def test_many_equal_norms_and_ids_take_linear_time(tmp_path: Path) -> None:
    """2 MB with 6,000 norms of ones took 52 s; lists of 1,000,000 ids more than a minute."""
    file = KINDS["target"]()
    for key in (STOP_IDS, SUPPRESS):
        file.kv[key] = array(ValueType.I32, [len(key)] * 400_000)
    tensors = [TensorData(n, t.shape, t.type, [t.data]) for n, t in file.tensors.items()]
    ones = np.ones(32, np.float32)
    tensors += [TensorData(f"blk.{i}.z_norm.weight", (32,), 0, [ones]) for i in range(4000)]
    write(tmp_path / "a.gguf", file.kv, tensors)
    with processor_time_below(8):
        validate(tmp_path / "a.gguf", only=["G4-VAL-011", "G4-VAL-012", "G4-SUP-001"])
