"""`bench compare`: regressions, noise, results that cannot be compared, invalid files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from g4spec import cli, gguf
from g4spec.errors import InputError, UsageError
from g4spec.measure import run_record
from g4spec.measure.bench_compare import compare, read_result, tolerance
from g4spec.measure.prompts import OWN
from tests.support import bench_result

Data = dict[str, Any]


@pytest.fixture
def pair() -> tuple[Data, Data]:
    old = bench_result.result()
    return old, copy.deepcopy(old)


def slower(row: Data, factor: float) -> None:
    row["tokens_per_second"] *= factor
    row["spread"] = [x * factor for x in row["spread"]]


def test_equal_results_have_no_regression(pair: tuple[Data, Data]) -> None:
    found = compare(*pair)
    assert not found.regressions and not found.warnings
    assert len(found.changes) == len(pair[0]["rows"]) and all(c.speed == 1 for c in found.changes)


def test_slower_beyond_tolerance_and_spread(pair: tuple[Data, Data]) -> None:
    old, new = pair
    slower(new["rows"][3], 0.9)
    assert "10.0% slower" in compare(old, new).regressions[0]
    assert not compare(old, new, 0.15).regressions
    new["rows"][3]["spread"][1] = old["rows"][3]["spread"][0]  # the spreads overlap
    assert not compare(old, new).regressions


def test_faster_is_fine(pair: tuple[Data, Data]) -> None:
    slower(pair[1]["rows"][3], 1.5)
    assert not compare(*pair).regressions


def test_lower_acceptance(pair: tuple[Data, Data]) -> None:
    pair[1]["rows"][3]["acceptance"] -= 0.01
    assert "acceptance fell" in compare(*pair).regressions[0]


def test_acceptance_of_auto_depends_on_timing(pair: tuple[Data, Data]) -> None:
    row = next(r for r in pair[1]["rows"] if r["length"] == "auto")
    row["acceptance"] -= 0.1
    assert not compare(*pair).regressions


def test_changed_text(pair: tuple[Data, Data]) -> None:
    pair[1]["texts"]["code-0"]["text"] = "other"
    assert compare(*pair).regressions == ["the text of prompt code-0 changed"]


def test_messages_name_prompts_and_lengths_as_the_table_does(
    pair: tuple[Data, Data], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = pair
    for side in pair:
        side["texts"][OWN] = {"prompt": "p", "text": "t"}
    new["texts"][OWN]["text"] = "other"
    assert compare(old, new).regressions == ["the text of your prompt changed"]
    plain = next(row for row in new["rows"] if row["length"] == 0)
    slower(plain, 0.5)
    assert compare(old, new).regressions[0].startswith(f"{plain['category']}, plain: 50.0% slower")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for count, found in ((2, "error: 2 regressions: found "), (1, "error: 1 regression: found ")):
        for path, side in zip(files, pair, strict=True):
            path.write_text(json.dumps(side))
        assert cli.run(["bench", "compare", *map(str, files)]) == 1
        assert found in capsys.readouterr().err, count
        new["texts"] = old["texts"]


def test_failed_new_result(pair: tuple[Data, Data]) -> None:
    pair[1]["identical"] = False
    assert "differ" in compare(*pair).regressions[0]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d["provenance"]["machine"].update(cpu="Other"), "machine"),
        (lambda d: d["provenance"]["target"].update(sha256="0"), "target"),
        (lambda d: d["provenance"].update(draft=None), "draft"),
        (lambda d: d["provenance"].update(ops="CudaOps"), "ops"),
        (lambda d: d["options"].update(n_predict=9), "n_predict"),
        (lambda d: d["options"]["sampler"].update(temperature=1.0), "sampler"),
        (lambda d: d["options"].update(n_ctx=512), "context length 4096 and 512"),
        (lambda d: d["options"].update(cache_type="q8_0"), "cache type f32 and q8_0"),
        (lambda d: d["options"].update(draft_window=1), "draft window none and 1"),
        (lambda d: d["options"].update(draft_p_min=0.5), "minimum draft confidence 0.0 and 0.5"),
        (lambda d: d["texts"].pop("code-0"), "other prompts"),
    ],
)
def test_incomparable_files_are_rejected(pair: tuple[Data, Data], change: Any, words: str) -> None:
    change(pair[1])
    with pytest.raises(InputError, match=f"cannot be compared.*{words}.*`force`"):
        compare(*pair)
    assert any(words in w for w in compare(*pair, force=True).warnings)


def test_conversions_of_one_checkpoint_are_the_same_file(
    pair: tuple[Data, Data], tmp_path: Path
) -> None:
    """They contain when and how they were made: those of `-md FOLDER` differed after an update."""
    for side, version in zip(pair, "12", strict=True):
        kv = {
            "g4spec.source_digest": gguf.string("d" * 64),
            "g4spec.versions": gguf.string(version),
        }
        gguf.write(tmp_path / "draft.gguf", kv, [])
        side["provenance"]["draft"] = run_record.describe_file(tmp_path / "draft.gguf")
    old, new = (side["provenance"]["draft"] for side in pair)
    assert old["sha256"] != new["sha256"] and not compare(*pair).warnings
    new["source"] = "e" * 64
    with pytest.raises(InputError, match=r"draft\.gguf and draft\.gguf are different files"):
        compare(*pair)
    old["source"] = new["source"] = None
    with pytest.raises(InputError, match="different files"):
        compare(*pair)


def test_older_files_do_not_say_how_the_engine_was_loaded(pair: tuple[Data, Data]) -> None:
    for name in ("n_ctx", "cache_type", "draft_window", "draft_p_min"):
        del pair[0]["options"][name]
    pair[1]["options"].update(cache_type="q8_0", draft_window=1)
    for old, new in (pair, pair[::-1]):
        assert not compare(old, new).warnings


def test_missing_settings_are_reported(pair: tuple[Data, Data]) -> None:
    del pair[1]["rows"][0]
    assert any("only in the old file" in w for w in compare(*pair).warnings)


def test_read_result_of_bench(tmp_path: Path, pair: tuple[Data, Data]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(pair[0]))
    assert read_result(path) == pair[0]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d.update(schema="g4spec.bench/0"), "schema"),
        (lambda d: d.pop("rows"), "rows: expected list"),
        (lambda d: d["rows"][2].pop("acceptance"), r"rows\[2\]: acceptance"),
        (lambda d: d["rows"].append(7), "an object"),
        (lambda d: d["rows"][1].update(spread=[1]), "two numbers"),
        (lambda d: d["rows"][1].update(spread=[1, "x"]), "two numbers"),
        (lambda d: d["rows"][1].update(tokens_per_second=-1.0), "none below 0"),
        (lambda d: d["rows"][1].update(tokens_per_second=float("nan")), "two numbers"),
    ],
)
def test_read_rejects_invalid_results(
    tmp_path: Path, pair: tuple[Data, Data], change: Any, words: str
) -> None:
    change(pair[0])
    path = tmp_path / "a.json"
    path.write_text(json.dumps(pair[0]))
    with pytest.raises(InputError, match=words):
        read_result(path)


def test_settings_without_time_or_in_only_one_file(pair: tuple[Data, Data]) -> None:
    old, new = pair
    for row in new["rows"][1:]:
        row.update(tokens_per_second=0.0, spread=[0.0, 0.0])
    found = compare(old, new)
    assert len(found.changes) == 1 and any("not timed" in w for w in found.warnings)
    new["rows"] = []
    with pytest.raises(InputError, match=r"no .category, draft length. pair"):
        compare(old, new)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[1", b"[]", b"null"])
def test_read_rejects_other_json(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.json"):
        read_result(path)


def test_tolerance() -> None:
    assert tolerance("5%") == tolerance("5 %") == tolerance("0.05") == 0.05
    for text in ("", "5", "-1%", "nan", "5%%", "x", "100%"):
        with pytest.raises(UsageError, match="`tolerance`"):
            tolerance(text)


def test_drafts_of_two_quant_types(pair: tuple[Data, Data]) -> None:
    """Results with drafts of different quant types are compared without --force. Targets of
    different types with another number of tensors are two models."""
    old, new = pair
    file = {"sha256": "cd" * 32, "types": {"q4_k": 40, "q6_k": 4, "f32": 66}}
    new["provenance"]["draft"] |= file
    new["rows"][3]["acceptance"] -= 0.05
    found = compare(old, new)
    assert found.warnings == ["quant type of the draft: q8_0 in the old file, q4_k in the new"]
    assert len(found.regressions) == 1 and "acceptance fell" in found.regressions[0]
    new["provenance"]["target"] |= file
    with pytest.raises(InputError, match="target"):
        compare(old, new)


@pytest.mark.parametrize(
    "types, words",
    [
        ({"q4_k": 50, "q6_k": 7, "f32": 66}, "q8_0 in the old file, q4_k in the new"),
        ({"q8_0": 50, "f16": 7, "f32": 66}, "57 q8_0, 66 f32 in the old file, 50 q8_0, 7 f16, "),
    ],
)
def test_targets_of_two_quant_types(pair: tuple[Data, Data], types: Any, words: str) -> None:
    """Their speeds are compared without --force. Texts and acceptance are those of two models."""
    old, new = pair
    new["provenance"]["target"] |= {"sha256": "cd" * 32, "types": types}
    new["rows"][3]["acceptance"] -= 0.05
    new["texts"]["code-0"]["text"] = "other"
    found = compare(old, new)
    assert not found.regressions and len(found.warnings) == 1
    assert found.warnings[0].startswith(f"quant type of the target: {words}")
    assert found.warnings[0].endswith("; changes of texts and acceptance are no regressions")
    slower(new["rows"][3], 0.5)
    assert "50.0% slower" in compare(old, new).regressions[0]
    new["provenance"]["target"]["kind"] = "gemma3"
    with pytest.raises(InputError, match="target"):
        compare(old, new)
