"""`g4spec demo`, `bench` and `verify` from arguments to files, on tiny random checkpoints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from g4spec import cli, convert
from g4spec.cli import _demo_family, _demo_text, demo
from g4spec.errors import InputError, UsageError
from g4spec.measure import bench, verify
from g4spec.measure.bench_compare import read_result
from g4spec.runtime import chooser
from g4spec.runtime.request import Options, Request
from tests.cpu.test_verify import accept_first_unverified
from tests.support import tiny
from tests.support.selection import sample

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


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the demo use few and short texts."""
    for name, value in (("LONG", 100), ("CASES", 3), ("PROMPTS", 1), ("LENGTHS", "2,auto")):
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(_demo_text, "N_CTX", 1024)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("step", sample(["verify", "sweep"], 1))
def test_an_interrupted_demo_ends(
    step: str,
    family: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C while texts are compared or measured; what was compared before is not the result."""
    monkeypatch.setattr(demo, "CASES", 1)
    module = verify if step == "verify" else bench
    run = getattr(module, step)

    def interrupted(*args: Any, **options: Any) -> Any:
        result = run(*args, **options)
        result.interrupted = True
        return result

    monkeypatch.setattr(module, step, interrupted)
    command = ["demo", "--family", str(family), "-o", str(tmp_path / "demo"), "-n", "4"]
    assert cli.run(command) == 130
    output = capsys.readouterr().out
    assert ("identical" in output) == (step == "sweep") and "6  Serve" not in output


@pytest.mark.usefixtures("short")
def test_demo_does_the_whole_job(
    family: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "demo"
    command = ["demo", "--family", str(family), "-o", str(out), "-n", "6"]
    monkeypatch.setattr(sys, "argv", ["g4spec", *command])
    assert cli.run(command) == 0
    output = capsys.readouterr().out
    assert output.index(_demo_text.PROMPT) < output.index("1  Convert") and "~" in output
    for step in ("1  Convert", "2  Quantize", "3  Validate", "4  Verify", "5  Measure", "6  Serve"):
        assert step in output
    assert output.count("3 of 3 texts identical") == 4
    url = re.search(r"POST (http://127.0.0.1:\d+)/v1/completions 'def area", output)
    assert url and " drafted tokens accepted. `g4spec serve" in output
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url[1]}/health")
    data = read_result(out / "bench.json")
    assert data["identical"] and len(data["provenance"]["target"]["sha256"]) == 64
    assert data["provenance"]["overridden_ops"] == []
    assert data["recommendation"]["words"] in (out / "report.html").read_text()
    assert not any(str(tmp_path) in (out / n).read_text() for n in ("bench.json", "report.html"))
    _demo_family.check_folder(family, out)  # the demo may replace all of these files


def test_demo_replaces_only_its_own_files(family: Path, tmp_path: Path) -> None:
    for content in (b"", b"GGUF, somebody's model"):
        (tmp_path / "target.gguf").write_bytes(content)
        assert cli.run(["demo", "--family", str(family), "-o", str(tmp_path)]) == 2
        assert (tmp_path / "target.gguf").read_bytes() == content
    for name in ("target", "dflash"):
        (tmp_path / "target.gguf").unlink()
        convert.convert(
            family / name,
            tmp_path / "target.gguf",
            target=family / "target" if name == "dflash" else None,
        )
        if name == "target":
            _demo_family._check_replaceable(tmp_path / "target.gguf", family / "target")
    with pytest.raises(UsageError, match="not written by this demo"):
        _demo_family._check_replaceable(tmp_path / "target.gguf", family / "target")


@pytest.mark.parametrize("name", ["bench.json", "report.html"])
def test_demo_replaces_only_its_own_results(family: Path, tmp_path: Path, name: str) -> None:
    path, mark = tmp_path / name, _demo_family.MARKS[name]
    for content in (b"", b"my notes", mark.replace(b"demo", b"bench")):
        path.write_bytes(content)
        assert cli.run(["demo", "--family", str(family), "-o", str(tmp_path)]) == 2
        assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]
    path.write_bytes(b"{" + mark + b" -n 6")
    _demo_family.check_folder(family, tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="not written by this demo"):
        _demo_family.check_folder(family, tmp_path)


def test_demo_without_the_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.run(["demo", "--family", str(tmp_path), "-o", str(tmp_path / "x")]) == 3
    output = capsys.readouterr().err
    assert "found no target, dflash, dflash-speculators" in output
    assert "Pass the folder examples/tiny of the repository" in output
    assert not (tmp_path / "x").exists()
    missing = str(tmp_path / "missing")
    assert cli.run(["demo", "--family", missing]) == 3
    assert "found no such folder" in capsys.readouterr().err
    # An installed package outside of a clone.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_demo_family.g4spec, "__file__", str(tmp_path / "lib/g4spec/__init__.py"))
    assert cli.run(["demo"]) == 3
    output = capsys.readouterr().err
    assert "not part of the installed package" in output
    assert "run `g4spec demo --family REPOSITORY/examples/tiny`" in output
    assert "g4spec_family-*.whl of the release" in output


def test_demo_finds_the_installed_package_of_the_family(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The family is a wheel of its own, so that `demo` works from the wheel of g4spec."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / _demo_family.PACKAGE).symlink_to(family)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_demo_family.g4spec, "__file__", str(tmp_path / "lib/g4spec/__init__.py"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = _demo_family.find(None)
    assert (found / "target" / "config.json").samefile(family / "target" / "config.json")


def test_the_package_of_the_family_has_every_checkpoint() -> None:
    project = (Path(__file__).parents[2] / "packaging/family/pyproject.toml").read_text()
    for name in ("target", *_demo_family.DRAFTS):
        assert f'"{_demo_family.PACKAGE}.{name}",' in project


def test_bench_and_compare(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, page = tmp_path / "a.json", tmp_path / "a.html"
    what = ["--draft-max", "2,auto", "--categories", "maths,long", "--prompts", "1", "-n", "6"]
    options = [*files, *SMALL, *what, "--repeats", "1"]
    assert cli.run(["bench", *options, "-o", str(a), "--report", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == read_result(a)
    assert page.stat().st_size > 10_000
    assert [(r["category"], r["length"]) for r in read_result(a)["rows"]] == [
        (c, n) for c in ("maths", "long", "all") for n in (0, 2, "auto")
    ]
    assert cli.run(["bench", "compare", str(a), str(a)]) == 0
    better = read_result(a)
    assert better["rows"][1]["acceptance"] < 1
    better["rows"][1]["acceptance"] = 1.0
    (tmp_path / "b.json").write_text(json.dumps(better))
    assert cli.run(["bench", "compare", str(tmp_path / "b.json"), str(a)]) == 1
    assert "acceptance fell" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--cache-type", "f16"], "cache type f32 and f16"),
        (["--draft-window", "1"], "draft window none and 1"),
        (["-c", "200"], "context length 256 and 200"),
    ],
)
def test_compare_refuses_engines_that_were_loaded_in_other_ways(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    found: str,
) -> None:
    run = ["bench", *files, "-c", "256", "-p", "a", "-n", "6", "--draft-max", "2", "--repeats", "1"]
    pair = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert cli.run([*run, "-o", pair[0]]) == cli.run([*run, *words, "-o", pair[1]]) == 0
    assert cli.run(["bench", "compare", *pair]) == InputError.exit_code
    assert f"cannot be compared: {found}. " in capsys.readouterr().err


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
    output = capsys.readouterr().out
    assert "plain: " in output and "drafted: " in output and "by prompt" in output
    assert cli.run(["bench", *files, "--preset", "mt-bench", "--dataset", "missing"]) == 3
    assert "FastChat" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--draft-max", "99"],
        ["--preset", "x"],
        ["--categories", "poems"],
        ["--repeats", "0"],
        ["--preset", "mt-bench", "--temp", "1"],
    ],
)
def test_bench_wrong_use(files: list[str], options: list[str]) -> None:
    assert cli.run(["bench", *(files if options else []), *options]) == 2


def test_verify_passes_and_finds_a_planted_bug(
    files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["verify", *files, "-c", "1024", "--long-tokens", "100", "-n", "8"]
    assert cli.run([*options, "--cases", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    monkeypatch.setattr(chooser, "choose_rows", accept_first_unverified)
    assert cli.run([*options, "--cases", "12", "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)["mismatch"]
    assert found["plain"]["id"] != found["speculative"]["id"]
    assert f"token {found['index']} is {found['plain']['id']}" in captured.err


# ---- Ctrl-C


def pressed(after: int) -> Any:
    """Return a `Request.__iter__` that raises KeyboardInterrupt in request number `after`."""
    real, made = Request.__iter__, []

    def iterate(self: Request) -> Any:
        made.append(self)
        if len(made) > after:
            raise KeyboardInterrupt
        return real(self)

    return iterate


BENCH = ["--draft-max", "2", "--categories", "maths", "-n", "4"]
"""Arguments for two settings: each prompt has two runs, and so does the warm-up."""


@pytest.mark.parametrize(
    ("prompts", "runs", "left"),
    [(2, 5, 1), (1, 2 + 2 + 1, 1), (2, 2 + 4 + 3, 2)],
    ids=["in the second prompt", "in the second repeat", "whole repeats count"],
)
def test_interrupted_bench_keeps_measured_rows(
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: int,
    runs: int,
    left: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Request, "__iter__", pressed(runs))
    a, page = tmp_path / "a.json", tmp_path / "a.html"
    words = ["bench", *files, *SMALL, *BENCH, "--prompts", str(prompts), "--repeats", "2"]
    assert cli.run([*words, "-o", str(a), "--report", str(page)]) == 130
    data = read_result(a)
    assert data["interrupted"] and {r["prompts"] for r in data["rows"]} == {left}
    assert len(data["texts"]) == left and page.stat().st_size > 10_000
    captured = capsys.readouterr()
    assert "Draft lengths" in captured.out
    assert f"interrupted: {left} of {2 * prompts} measurements" in captured.err


def test_interrupted_streams_keep_measured_rows(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Request, "__iter__", pressed(4 + 4 + 1))  # warm-up, one repeat, ...
    a = tmp_path / "a.json"
    words = ["bench", *files, *SMALL, *BENCH, "--prompts", "2", "--repeats", "2", "-np", "2"]
    assert cli.run([*words, "-o", str(a)]) == 130
    data = json.loads(a.read_text())
    assert data["interrupted"] and [r["length"] for r in data["rows"]] == [0, 2]
    assert "1 of 2 repeats" in " ".join(data["notes"])


@pytest.mark.parametrize("words", [["bench", *BENCH, "--prompts", "1"], ["verify", "--cases", "2"]])
def test_interrupted_bench_without_rows_prints_nothing(
    files: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Request, "__iter__", pressed(1))
    name, *options = words
    assert cli.run([name, *files, "-c", "512", "--long-tokens", "100", *options]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    done = "compared" if name == "verify" else "measured"
    assert captured.err.endswith(f"interrupted: nothing was {done}\n")


@pytest.mark.parametrize(
    ("line", "step", "says"),
    [
        ("perplexity text", "g4spec.measure.perplexity.measure", "nothing was measured"),
        ("imatrix text -o i.gguf", "g4spec.measure.importance.collect", "i.gguf was not written"),
        ("bench", "g4spec.cli._engine.load", "nothing was measured"),
        ("bench -np 2", "g4spec.measure.bench_streams.sweep", "nothing was measured"),
        ("verify -md ngram", "g4spec.cli._engine.load", "nothing was compared"),
    ],
)
def test_an_interrupted_command_says_that_nothing_is_left(
    line: str,
    step: str,
    says: str,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def press(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    Path("text").write_text("words " * 999)
    monkeypatch.setattr(step, press)
    assert cli.run([*line.split(), *files[:2]]) == 130
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith(f"interrupted: {says}\n")


def test_interrupted_verify_keeps_compared_cases(
    files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Request, "__iter__", pressed(5))
    options = ["-c", "1024", "--long-tokens", "100", "-n", "8", "--cases", "4", "--draft-max", "2"]
    assert cli.run(["verify", *files, *options]) == 130
    captured = capsys.readouterr()
    assert "2 of 2 texts are the same" in captured.out
    assert "interrupted: 2 of 4 cases" in captured.err


# ---- a prompt of one's own


def test_verify_takes_a_prompt_and_settings(
    files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[verify.Case] = []
    monkeypatch.setattr(
        verify,
        "_submit",
        lambda engine, case, length, n: (
            seen.append(case)
            or engine.submit(case.prompt.encode(engine.tokenizer), Options(n, case.sampler, length))
        ),
    )
    words = ["verify", *files, "-c", "128", "-n", "8", "--cases", "3", "-p", "a text of one's own"]
    assert cli.run([*words, "--temp", "0.5", "--draft-max", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cases"] == 3
    assert {case.prompt.text for case in seen} == {"a text of one's own"}
    assert {case.sampler.temperature for case in seen} == {0.5}
    assert {case.length for case in seen} == {2}


def test_verify_without_a_draft_compares_a_batch(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", *files[:2], "-c", "128", "-n", "6", "--cases", "4"]
    words += ["-p", "a text of one's own"]
    assert cli.run([*words, "--parallel", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 of 4 texts are the same alone and with others, 2 at once: 24 tokens" in said
    assert "drafted" not in said
    assert cli.run(words) == 2
    assert "--parallel 2 to compare texts" in " ".join(capsys.readouterr().err.split())
    assert cli.run([*words, "--parallel", "2", "--draft-max", "2"]) == 2
    assert "--draft-max needs a draft" in capsys.readouterr().err


def test_a_temperature_limits_the_compared_settings() -> None:
    assert verify._settings(0) == [{}]
    assert verify._settings(None) == list(verify.SETTINGS)
    one = verify._settings(0.3)
    assert len(one) == len({str(s) for s in one}) == 6
    assert {s["temperature"] for s in one} == {0.3}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["-p", ""], 3, "empty"),
        (["-p", "a", "-f", "b"], 2, "exactly one"),
        (["--draft-max", "0"], 2, "0 drafts"),
        (["--draft-max", "99"], 2, "--draft-max"),
        (["--temp", "-1"], 2, "--temp"),
        (["-p", "a", "--long-tokens", "9"], 2, "built-in"),
    ],
)
def test_verify_wrong_use(
    files: list[str],
    options: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["verify", *files, *options]) == code
    assert message in capsys.readouterr().err
