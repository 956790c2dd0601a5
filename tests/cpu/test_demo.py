"""`g4spec demo`, `bench` and `verify` from arguments to files, on tiny random checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from g4spec import cli, convert
from g4spec.cli import _family, demo
from g4spec.errors import UsageError
from g4spec.measure.bench_compare import read
from g4spec.runtime import choosing
from tests import tiny
from tests.cpu.test_verify import believe_one

SMALL = ["-c", "256", "--long-tokens", "100"]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    target = tiny.target(folder / "target", layers=6)
    tiny.zlab_dflash(folder / "dflash", target)
    tiny.speculators_dflash(folder / "dflash-speculators", target)
    tiny.assistant(folder / "assistant", target, centroids=32)
    tiny.zlab_dflash(folder / "dflash-other", target, seed=9)
    return folder


@pytest.fixture(scope="module")
def files(family: Path) -> list[str]:
    convert.convert(family / "target", family / "t.gguf")
    convert.convert(family / "dflash", family / "d.gguf", target=family / "t.gguf")
    return ["-m", str(family / "t.gguf"), "-md", str(family / "d.gguf")]


def test_demo_does_the_whole_job(
    family: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("N_CTX", 1024), ("LONG", 100), ("CASES", 3), ("PROMPTS", 1)):
        monkeypatch.setattr(demo, name, value)
    out = tmp_path / "demo"
    assert cli.run(["demo", "--family", str(family), "-o", str(out), "-n", "6"]) == 0
    said = capsys.readouterr().out
    for step in ("1  Convert", "2  Quantize", "3  Validate", "4  Verify", "5  Measure", "6  Serve"):
        assert step in said
    assert said.count("3 of 3 texts identical") == 4
    url = re.search(r"POST (http://127.0.0.1:\d+)/v1/completions 'def area", said)
    assert url and " drafted tokens accepted. `g4spec serve" in said
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url[1]}/health")
    data = read(out / "bench.json")
    assert data["identical"] and len(data["provenance"]["target"]["sha256"]) == 64
    assert data["provenance"]["overridden_ops"] == []
    assert data["recommendation"]["words"] in (out / "report.html").read_text()


def test_demo_replaces_only_its_own_files(family: Path, tmp_path: Path) -> None:
    for content in (b"", b"GGUF, somebody's model"):
        (tmp_path / "target.gguf").write_bytes(content)
        assert cli.run(["demo", "--family", str(family), "-o", str(tmp_path)]) == 2
        assert (tmp_path / "target.gguf").read_bytes() == content
    for name in ("target", "dflash"):
        (tmp_path / "target.gguf").unlink()
        convert.convert(family / name, tmp_path / "target.gguf",
                target=family / "target" if name == "dflash" else None)  # fmt: skip
        if name == "target":
            _family._check_free(tmp_path / "target.gguf", family / "target")
    with pytest.raises(UsageError, match="not made by this demo"):
        _family._check_free(tmp_path / "target.gguf", family / "target")


def test_demo_without_the_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["demo", "--family", str(tmp_path), "-o", str(tmp_path / "x")]) == 3
    assert "dflash-other" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_bench_and_compare(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, page = tmp_path / "a.json", tmp_path / "a.html"
    what = ["--draft-max", "2,auto", "--categories", "maths,long", "--prompts", "1", "-n", "6"]
    options = [*files, *SMALL, *what, "--repeats", "1"]
    assert cli.run(["bench", *options, "-o", str(a), "--report", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == read(a)
    assert page.stat().st_size > 10_000
    assert [(r["category"], r["length"]) for r in read(a)["rows"]] == [
        (c, n) for c in ("maths", "long", "all") for n in (0, 2, "auto")
    ]
    assert cli.run(["bench", "compare", str(a), str(a)]) == 0
    better = read(a)
    assert better["rows"][1]["acceptance"] < 1
    better["rows"][1]["acceptance"] = 1.0
    (tmp_path / "b.json").write_text(json.dumps(better))
    assert cli.run(["bench", "compare", str(tmp_path / "b.json"), str(a)]) == 1
    assert "acceptance fell" in capsys.readouterr().err


def test_mt_bench_preset(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "question.jsonl"
    questions.write_text(
        '{"question_id": 1, "category": "math", "turns": ["What is 1 + 1?"]}\n'
        '{"question_id": 2, "category": "writing", "turns": ["Write."]}\n'
    )
    options = [*files, "-c", "256", "--preset", "mt-bench", "--dataset", str(questions)]
    assert cli.run(["bench", *options, "-n", "6", "--repeats", "1"]) == 0
    said = capsys.readouterr().out
    assert "plain: " in said and "drafted: " in said and "by prompt" in said
    assert cli.run(["bench", *files, "--preset", "mt-bench", "--dataset", "missing"]) == 3
    assert "FastChat" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [[], ["--draft-max", "99"], ["--preset", "x"], ["--categories", "poems"],
                ["--repeats", "0"], ["--preset", "mt-bench", "--temp", "1"]]
)  # fmt: skip
def test_bench_wrong_use(files: list[str], options: list[str]) -> None:
    assert cli.run(["bench", *(files if options else []), *options]) == 2


def test_verify_passes_and_finds_a_planted_bug(
    files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["verify", *files, "-c", "1024", "--long-tokens", "100", "-n", "8"]
    assert cli.run([*options, "--cases", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    monkeypatch.setattr(choosing, "choose_rows", believe_one)
    assert cli.run([*options, "--cases", "12", "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)["mismatch"]
    assert found["plain"]["id"] != found["speculative"]["id"]
    assert f"token {found['index']} is {found['plain']['id']}" in said.err
