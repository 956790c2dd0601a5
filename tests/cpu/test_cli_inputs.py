"""Invalid files for -m and -md: one line says what the file is and what to do.

The error comes before anything is downloaded or converted.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from g4spec.cli import run
from tests.support import tiny, tokens
from tests.support.commands import Cli, in_folder

RUNS = {
    "generate": ("-p", "x", "-n", 4, "-c", 128),
    "verify": ("--cases", 1, "-n", 4, "-c", 128),
    "bench": ("--prompts", 1, "--categories", "chat", "-n", 4, "-c", 128),
}
BROKEN = ("missing.gguf", "half.gguf", "head.gguf", "empty.gguf", "text.gguf", "no-model", "no/hub")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with valid and invalid files for -m and -md."""
    home = tmp_path_factory.mktemp("home")
    target = tokens.target_file(home / "target.gguf")
    tokens.draft_file(home / "draft.gguf")
    tiny.target(home / "target")
    tiny.zlab_dflash(home / "draft", home / "target")
    for name in ("target", "draft"):
        (home / f"{name}-gguf").mkdir()
        shutil.copy(home / f"{name}.gguf", home / f"{name}-gguf" / "m.gguf")
    whole = target.read_bytes()
    (home / "half.gguf").write_bytes(whole[: len(whole) // 2])
    (home / "head.gguf").write_bytes(whole[:100])
    (home / "empty.gguf").touch()
    (home / "text.gguf").write_text("not a model\n" * 9)
    (home / "no-model").mkdir()
    return home


@pytest.fixture
def g4spec(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return in_folder(home, tmp_path / "cache", monkeypatch, capsys)


# ---- generate, verify, bench


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize("name", ["target.gguf", "target", "target-gguf"])
def test_a_target_given_as_draft(g4spec: Cli, command: str, name: str) -> None:
    stderr = g4spec.refused(command, "-m", "target.gguf", "-md", name, *RUNS[command])
    assert f"{name}: not a draft: found Gemma 4 target" in stderr
    assert "pass it with -m, and a draft made for it with -md" in stderr


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize("name", ["draft.gguf", "draft", "draft-gguf"])
def test_a_draft_given_as_target(g4spec: Cli, command: str, name: str) -> None:
    stderr = g4spec.refused(command, "-m", name, "-md", "draft", *RUNS[command])
    assert f"{name}: not a target: found DFlash draft" in stderr
    assert "pass it with -md, and its target with -m" in stderr


@pytest.mark.parametrize("command", RUNS)
def test_a_folder_given_as_target(g4spec: Cli, command: str) -> None:
    stderr = g4spec.refused(command, "-m", "target", "-md", "draft", *RUNS[command])
    assert "Convert it first: g4spec convert target -o target.gguf" in stderr


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_folder_with_a_targets_gguf_runs_it(
    g4spec: Cli, home: Path, tmp_path: Path, checkpoint: bool
) -> None:
    """Take it as -md does, also beside a checkpoint and the vision part; a note says so."""
    folder = tmp_path / "target"
    shutil.copytree(home / "target", folder) if checkpoint else folder.mkdir()
    shutil.copy(home / "target.gguf", folder / "m.gguf")
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    options = ("-p", "x", "-n", 2, "-c", 128)
    out, err = g4spec("generate", "-m", folder, *options)
    assert f"{folder} holds a GGUF: took m.gguf" in err
    assert out == g4spec("generate", "-m", "target.gguf", *options)[0]


def test_a_folder_with_several_files(g4spec: Cli, home: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(home / "draft.gguf", tmp_path / f"{name}.gguf")
    stderr = g4spec.refused("generate", "-m", "target.gguf", "-md", tmp_path, *RUNS["generate"])
    assert "several GGUF files: found a.gguf, b.gguf. Name the one to use" in stderr


def test_unknown_synthetic_model(g4spec: Cli) -> None:
    assert "--synthetic: expected 31b" in g4spec.refused("bench", "--synthetic", "32b")
    stderr = g4spec.refused("bench", "--synthetic", "31b", "--type", "q4")
    assert "--type: expected one of f32" in stderr and "found q4" in stderr
    stderr = g4spec.refused("bench", "--synthetic", "26b", "--type", "q4")
    assert "--type: expected one of f32" in stderr
    stderr = g4spec.refused("bench", "--synthetic", "e4b", "-md", "dflash")
    assert "-md with --synthetic e4b: expected assistant, found dflash" in stderr


def test_options_without_effect_are_refused(g4spec: Cli) -> None:
    stderr = g4spec.refused("bench", "--synthetic", "31b", "--report", "r.html")
    assert "--report has no effect with --synthetic" in stderr
    stderr = g4spec.refused("bench", "-m", "target.gguf", "--accept-length", 3)
    assert "--accept-length needs --synthetic" in stderr
    stderr = g4spec.refused("bench", "-m", "target.gguf", "--dataset", "nowhere.jsonl")
    assert "--dataset needs --preset" in stderr


def test_a_result_does_not_replace_a_model(g4spec: Cli, home: Path) -> None:
    run = ("bench", "-m", "target.gguf", "-md", "draft.gguf", *RUNS["bench"])
    before = (home / "target.gguf").read_bytes()
    assert "target.gguf exists and is not a result of g4spec" in g4spec.refused(
        *run, "-o", "target.gguf"
    )
    assert "would be written twice" in g4spec.refused(*run, "-o", "r.x", "--report", "r.x")
    assert (home / "target.gguf").read_bytes() == before


def test_a_model_does_not_replace_other_files(g4spec: Cli, home: Path, tmp_path: Path) -> None:
    stderr = g4spec.refused("convert", "target", "-o", "target/config.json")
    assert "target/config.json exists and is not a GGUF file" in stderr
    os.mkfifo(tmp_path / "pipe")
    assert "is a device or pipe" in g4spec.refused("convert", "target", "-o", tmp_path / "pipe")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "real.gguf")
    g4spec("convert", "target", "-o", tmp_path / "link.gguf")
    assert (tmp_path / "link.gguf").is_symlink() and (tmp_path / "real.gguf").stat().st_size


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("generate", ("--draft-max", 4)),
        ("generate", ("--show-draft",)),
        ("bench", ("--draft-max", "sweep")),
    ],
)
def test_draft_options_need_a_draft(g4spec: Cli, command: str, option: tuple[Any, ...]) -> None:
    run = (command, "-m", "target.gguf", *RUNS[command])
    assert f"{option[0]} needs a draft. Pass one with -md" in g4spec.refused(*run, *option)


def test_options_that_have_no_effect_are_named(g4spec: Cli) -> None:
    run = ("generate", "-m", "target.gguf", *RUNS["generate"], "--top-k", 5, "--seed", 3)
    assert "--top-k, --seed: no effect at --temp 0" in g4spec(*run)[1]
    assert "no effect" not in g4spec(*run, "--temp", 1)[1]
    stderr = g4spec.refused("bench", "-n", 5, "compare", "a", "b")
    assert "--n-predict has no effect before `compare`" in stderr
    assert "-n: expected at least 1" in g4spec.refused("demo", "-n", 0)


def test_invalid_draft_window(g4spec: Cli) -> None:
    run = ("generate", "-m", "target.gguf", *RUNS["generate"], "--draft-window")
    stderr = g4spec.refused(*run, -3, "-md", "draft")
    assert "--draft-window: expected 1 to 16777216, found -3" in stderr
    assert "--draft-window needs a draft with a cache" in g4spec.refused(*run, 64)
    assert "--draft-window needs a draft" in g4spec.refused(*run, 64, "-md", "ngram")


def test_validate_refuses_ignored_options(g4spec: Cli) -> None:
    stderr = g4spec.refused("validate", "draft.gguf", "--upstream", "--target", "target.gguf")
    assert "--upstream runs no checks. Leave out --target" in stderr
    assert "Leave out FILE" in g4spec.refused("validate", "draft.gguf", "--list-rules")
    assert "a target: expected a draft" in g4spec.refused("validate", "target.gguf", "--upstream")
    stderr = g4spec.refused("validate", "draft.gguf", "--rule", "G4-PAIR-001")
    assert "rule G4-PAIR-001 was not checked" in stderr


@pytest.mark.parametrize("option", ["--target", "-m"])
def test_validate_refuses_a_target_with_a_target(g4spec: Cli, option: str) -> None:
    """It checked no pair, and nothing said so."""
    line = ("validate", "target.gguf", option)
    stderr = g4spec.refused(*line, "target.gguf", codes=(2,))
    assert f"target.gguf is a target; {option} is for drafts. Omit {option}, or give the" in stderr
    stderr = g4spec.refused(*line, "draft.gguf")
    assert "draft.gguf is not a target" in stderr and "Give the draft first" in stderr


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_and_missing_files(g4spec: Cli, command: str, name: str) -> None:
    assert name in g4spec.refused(command, "-m", name, "-md", "draft", *RUNS[command])
    assert name in g4spec.refused(command, "-m", "target.gguf", "-md", name, *RUNS[command])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-c", 999999), "-c: expected 1 to"),
        (("--device", "cuda:x"), "--device: expected"),
        (("--cache-type", "q4_0"), "--cache-type: expected"),
    ],
)
@pytest.mark.parametrize("command", RUNS)
def test_options_are_checked_before_a_draft_is_converted(
    g4spec: Cli, command: str, options: tuple[object, ...], says: str
) -> None:
    more = (*RUNS[command], *options)
    assert says in g4spec.refused(command, "-m", "target.gguf", "-md", "draft", *more)


def test_prompts_and_outputs_are_checked_before_a_draft_is_converted(g4spec: Cli) -> None:
    pair = ("-m", "target.gguf", "-md", "draft")
    assert "missing.txt" in g4spec.refused("generate", *pair, "-f", "missing.txt")
    assert "--categories" in g4spec.refused("bench", *pair, "--categories", "poetry")
    for count in (0, 99):
        assert "--prompts: expected 1 to 8" in g4spec.refused("bench", *pair, "--prompts", count)
    assert "--cases" in g4spec.refused("verify", *pair, "--cases", 0)
    assert "-n: expected" in g4spec.refused("verify", *pair, "-n", 0)
    for option in ("-o", "--report"):
        assert "is a folder" in g4spec.refused("bench", *pair, option, "no-model")
        assert "text.gguf" in g4spec.refused("bench", *pair, option, "text.gguf/o")


def test_preset_prompts(g4spec: Cli, tmp_path: Path) -> None:
    questions = [
        {"question_id": i, "category": "writing", "turns": [f"Say {i}."]} for i in range(80)
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))
    preset = ("--preset", "mt-bench", "--dataset", tmp_path / "q.jsonl", "--prompts", 40)
    assert "not a target" in g4spec.refused("bench", "-m", "draft.gguf", *preset)


def test_local_files_are_checked_before_downloads(
    g4spec: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*args: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("g4spec.convert.hub.fetch", asked)
    run = RUNS["generate"]
    assert "not a draft" in g4spec.refused("generate", "-m", "a/b", "-md", "target", *run)
    assert "not a target" in g4spec.refused("generate", "-m", "draft", "-md", "a/b", *run)
    assert "is a file" in g4spec.refused("convert", "a/b", "-o", "target.gguf/o.gguf")
    assert "q3_x" in g4spec.refused("convert", "a/b", "-o", "o.gguf", "--type", "q3_x")
    assert "is a folder" in g4spec.refused("quantize", "a/b:x.gguf", "no-model")


# ---- other commands


@pytest.mark.parametrize("name", ["target", "target-gguf", "no-model"])
def test_a_folder_instead_of_a_file(g4spec: Cli, name: str) -> None:
    for argv in (
        ("tokenize", "-m", name, "x"),
        ("quantize", name, "o.gguf"),
        ("validate", name),
        ("validate", "draft.gguf", "-m", name),
        ("validate", "--upstream", name),
    ):
        stderr = g4spec.refused(*argv)
        assert f"{name}" in stderr and "a folder" in stderr
        says = "target-gguf/m.gguf" if name == "target-gguf" else "onvert"
        assert says in stderr or (name == "no-model" and argv[0] == "validate"), stderr


def test_hub_ids_instead_of_files(g4spec: Cli) -> None:
    for argv in (
        ("tokenize", "-m", "no/hub", "x"),
        ("validate", "no/hub"),
        ("validate", "--upstream", "no/hub"),
        ("inspect", "no/hub"),
    ):
        assert "HF_HUB_OFFLINE is set" in g4spec.refused(*argv)


@pytest.mark.parametrize("command", [("doctor",), ("recipe", "llama.cpp")])
def test_questions_about_a_machine(g4spec: Cli, command: tuple[str, ...]) -> None:
    for name in ("target.gguf", "target"):
        stderr = g4spec.refused(*command, "-m", "31b", "-md", name)
        assert f"{name}: not a draft: found Gemma 4 target" in stderr and "-m" in stderr
    for name in ("draft.gguf", "draft"):
        stderr = g4spec.refused(*command, "-m", name)
        assert f"{name}: not a Gemma 4 target" in stderr and "-md" in stderr
    for options in (("-m", "draft-gguf"), ("-m", "31b", "-md", "draft-gguf")):
        assert "Name the file in it: draft-gguf/m.gguf" in g4spec.refused(*command, *options)
    stderr = g4spec.refused(*command, "-m", "target", "-md", "mtp")
    assert "not for target (Gemma 4 of another size)" in stderr and "one of ," not in stderr


def test_a_draft_given_as_the_target_of_a_conversion(g4spec: Cli, tmp_path: Path) -> None:
    stderr = g4spec.refused("convert", "draft", "--target", "draft", "-o", tmp_path / "o.gguf")
    assert "draft: not a target: found DFlash draft" in stderr and "with --target" in stderr


def test_the_right_pair_works(g4spec: Cli, tmp_path: Path) -> None:
    target = tmp_path / "t.gguf"
    g4spec("convert", "target", "-o", target, "--quiet")
    run = ("-p", "x", "-n", 4, "-c", 128, "--json")
    result = json.loads(g4spec("generate", "-m", target, "-md", "draft", *run)[0])
    assert len(result["ids"]) == 4 and list(g4spec.cache.rglob("*.gguf"))


@pytest.mark.parametrize(
    "argv", [("recipe", "vllm", "-m", "12b", "--assume", "H100"), ("demo",)], ids=["recipe", "demo"]
)
@pytest.mark.parametrize("below", ["", "scripts"])
def test_a_file_in_place_of_a_folder_for_results(
    argv: tuple[str, ...], below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results"
    file.write_text("")
    assert run([*argv, "-o", str(file / below)]) == 2
    captured = capsys.readouterr()
    assert f"{file} is a file" in captured.err and "folder" in captured.err and not captured.out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("convert target -o no-model", "no-model is a folder"),
        ("convert target -o text.gguf/o/p.gguf", "text.gguf is a file"),
        ("convert target -o ~/o.gguf", "~: no such folder. Write"),
        ("quantize draft.gguf no-model", "no-model is a folder"),
        ("convert target -o -", "cannot be standard output: expected the name of a file"),
        ("quantize draft.gguf -", "cannot be standard output"),
        ("imatrix -m target.gguf -o - text.gguf", "cannot be standard output"),
        ("bench -m target.gguf -o -", "cannot be standard output: expected the name of a file"),
        ("imatrix -m target.gguf -o no-model text.gguf", "no-model is a folder"),
        ("bench -m target.gguf -o no-model", "no-model is a folder"),
        ("bench -m target.gguf --report text.gguf/o/p", "text.gguf is a file"),
    ],
)
def test_a_place_where_no_result_can_be(g4spec: Cli, line: str, says: str) -> None:
    assert says in g4spec.refused(*line.split(), codes=(2,))


LOCKED = [
    "inspect locked",
    "generate -m locked -p x",
    "generate -m target.gguf -md locked -p x",
    "generate -m target.gguf -f locked",
    "generate -m target.gguf --messages locked",
    "doctor -m target.gguf -md locked",
    "doctor --log locked",
    "validate draft.gguf --target locked",
    "perplexity -m target.gguf locked",
]


@pytest.mark.parametrize("line", LOCKED)
def test_an_input_that_may_not_be_read(
    line: str, g4spec: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: root may read every file."""
    locked = tmp_path / "locked"
    locked.write_text("x")

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path) == str(locked):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return io.open(path, *args, **kwargs)  # noqa: UP020 (`open` may be this function)

    monkeypatch.setattr("os.access", lambda path, mode, **_: str(path) != str(locked))
    monkeypatch.setattr("pathlib.Path.open", refuse)
    monkeypatch.setattr("g4spec.gguf.regular_files.open", refuse, raising=False)
    stderr = g4spec.refused(*line.replace("locked", str(locked)).split(), codes=(3,))
    assert str(locked) in stderr and "permission denied" in stderr.lower(), stderr
    assert "Check its permissions" in stderr


@pytest.mark.parametrize(
    "line",
    [
        "quantize draft.gguf locked/o.gguf",
        "bench -m target.gguf -md draft.gguf -o locked/o.json",
        "demo -o locked/o",
    ],
)
def test_an_output_that_may_not_be_written(
    line: str, g4spec: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def refuse(path: Path, **kwargs: Any) -> Any:
        if path.parent == tmp_path / "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **kwargs)

    locked = tmp_path / "locked"
    locked.mkdir()
    monkeypatch.setattr("pathlib.Path.stat", refuse)
    # Since Python 3.14 `Path.exists` is False there, and does not call `Path.stat`.
    monkeypatch.setattr("os.access", lambda path, mode, **_: path != locked)
    stderr = g4spec.refused(*line.replace("locked", str(tmp_path / "locked")).split(), codes=(4,))
    assert "cannot write" in stderr and "permission denied" in stderr


@pytest.mark.parametrize(
    "line",
    [
        "convert draft --target target.gguf -o locked/o.gguf",
        "quantize draft.gguf locked/o.gguf",
        "imatrix -m target.gguf text.txt -o locked/o.gguf",
        "bench -m target.gguf -md draft.gguf -o locked/o.json",
    ],
)
def test_a_folder_that_may_not_be_written(
    line: str, g4spec: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before any work. Simulated: root may write every folder."""
    locked = tmp_path / "locked"
    locked.mkdir()
    Path("text.txt").write_text("some words")
    monkeypatch.setattr("os.access", lambda path, mode, **_: path != locked or mode != os.W_OK)
    stderr = g4spec.refused(*line.replace("locked", str(locked)).split(), codes=(4,))
    assert f"cannot write {locked}" in stderr and "permission denied" in stderr


def test_a_folder_given_to_validate(g4spec: Cli) -> None:
    stderr = g4spec.refused("validate", "draft")
    assert "g4spec convert draft --target TARGET -o draft.gguf" in stderr
    assert "g4spec convert target -o target.gguf" in g4spec.refused("validate", "target")
    assert "target-gguf/m.gguf" in g4spec.refused("validate", "target-gguf")
    assert "onvert" not in g4spec.refused("validate", "no-model")


# ---- what is meant instead


def test_a_quant_type_in_place_of_the_output(g4spec: Cli) -> None:
    _, err = g4spec("quantize", "draft.gguf", "q4_0", code=2)
    assert "q4_0 is a quant type: expected the file to write. Use --type q4_0 for it" in err


def test_quantize_in_the_wrong_order(g4spec: Cli, home: Path, tmp_path: Path) -> None:
    """The copy of a quantized file over its source would destroy the source."""
    small, wide = tmp_path / "small.gguf", tmp_path / "wide.gguf"
    g4spec("quantize", "draft.gguf", str(small), "--type", "q4_0", "--allow-requantize")
    shutil.copy(home / "draft.gguf", wide)
    before = wide.read_bytes()
    _, err = g4spec("quantize", str(small), str(wide), "--type", "q4_0", code=2)
    assert "has these types already" in err and wide.read_bytes() == before
    g4spec("quantize", str(small), str(tmp_path / "copy.gguf"), "--type", "q4_0")


def test_links_that_lead_nowhere(g4spec: Cli, tmp_path: Path) -> None:
    """A link to itself did not exist, and the suggestion was its own name."""
    for name, to in (("circle", "circle"), ("broken", "gone.gguf")):
        (tmp_path / name).symlink_to(to)
        for line in (("inspect",), ("validate",), ("generate", "-p", "x", "-m")):
            stderr = g4spec.refused(*line, tmp_path / name, codes=(3,))
            assert "a symbolic link that leads to no file" in stderr and f"link to {to}" in stderr


def test_suggestions_for_missing_models(g4spec: Cli) -> None:
    """Two names are not similar because both end in .gguf."""
    assert "Did you mean target.gguf?" in g4spec("inspect", "targt.gguf", code=3)[1]
    assert "Did you mean" not in g4spec("inspect", "nofile.gguf", code=3)[1]
    words = ("generate", "-m", "target.gguf", "-md", "n-gram", "-p", "x")
    assert "write -md ngram" in g4spec(*words, code=3)[1]


def test_a_tilde_that_the_shell_left(
    g4spec: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--model=~/m.gguf` and `--out=~/o.gguf`: creating a folder named ~ would be no fix."""
    monkeypatch.setenv("HOME", str(tmp_path))
    fix = f"Write {tmp_path}/m.gguf: the shell leaves ~ unchanged in quotes and after ="
    assert fix in g4spec("inspect", "~/m.gguf", code=3)[1]
    assert fix in g4spec("quantize", "target.gguf", "~/m.gguf", code=2)[1]


@pytest.mark.parametrize(
    ("address", "fix"),
    [
        ("https://huggingface.co/org/name", "Give the hub id: org/name\n"),
        ("https://huggingface.co/org/name/tree/main", "Give the hub id: org/name\n"),
        ("hf://org/name@v1/", "Give the hub id: org/name\n"),
        ("https://hf.co/o/n/blob/v1/a/b.gguf?x=1", "Give the hub id: o/n@v1:a/b.gguf\n"),
        ("https://example.org/name/file.gguf", "Download the file"),
    ],
)
def test_addresses_of_pages(address: str, fix: str, g4spec: Cli) -> None:
    for line in (("inspect",), ("generate", "-p", "x", "-m")):
        stderr = g4spec.refused(*line, address, codes=(3,))
        assert "an address is not a model" in stderr and fix in stderr


def test_serve_refuses_impossible_numbers(g4spec: Cli) -> None:
    words = ("serve", "-m", "target.gguf")
    assert "the RAM of this machine" in g4spec(*words, "--prefix-cache", 99999999, code=2)[1]
    assert "expected 0 to 15, or auto" in g4spec(*words, "--draft-max", 99, code=2)[1]
    assert "--draft-max needs a draft" in g4spec(*words, "--draft-max", 5, code=2)[1]


def test_short_files_are_not_empty(g4spec: Cli, tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_text("hi\n")
    assert "found a file of 3 bytes" in g4spec("validate", str(tmp_path / "short.gguf"), code=1)[0]


def test_only_the_first_part_of_a_split_model_is_suggested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in (1, 2, 3):
        (tmp_path / f"model-0000{part}-of-00003.gguf").touch()
    assert run(["inspect", str(tmp_path / "model.gguf")]) == 3
    assert "Did you mean model-00001-of-00003.gguf?" in capsys.readouterr().err
