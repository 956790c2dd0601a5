"""Wrong arguments: the error names the option that was probably intended."""

from __future__ import annotations

from pathlib import Path

import pytest

from g4spec import cli
from g4spec.errors import did_you_mean


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("quantize a.gguf b.gguf q4_0", "--type q4_0"),
        ("quantize a.gguf b.gguf Q4_K_M", "--type Q4_K_M"),
        ("convert folder out.gguf", "-o out.gguf"),
        ("validate draft.gguf target.gguf", "--target target.gguf"),
        ("validate draft.gguf org/name", "--target org/name"),
        ("generate -m target.gguf once", "-p once"),
        ("generate target.gguf once", "-m target.gguf -p once"),
        ("generate -m target.gguf -p once draft.gguf", "-md draft.gguf"),
        ("generate -m target.gguf -p once ngram", "-md ngram"),
        ("generate -m target.gguf -p once cuda", "--device cuda"),
        ("generate -m target.gguf -p once 64", "-n 64"),
        ("verify target.gguf draft.gguf", "-m target.gguf -md draft.gguf"),
        ("tokenize target.gguf hello", "-m target.gguf"),
        ("imatrix target.gguf text.txt", "-m target.gguf"),
        ("bench target.gguf", "-m target.gguf"),
        ("serve target.gguf", "-m target.gguf"),
        ("chat target.gguf", "-m target.gguf"),
        ("doctor 31b", "-m 31b"),
        ("recipe vllm 31b", "-m 31b"),
    ],
)
def test_words_without_an_option(
    command: str,
    meant: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("draft", "target"):
        (tmp_path / f"{name}.gguf").touch()
    assert cli.run(command.split()) == 2
    err = capsys.readouterr().err
    assert "error: unexpected argument" in err and f"Did you mean {meant}? See `g4spec " in err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("verfy", "Did you mean verify? See `g4spec --help`"),
        ("bench compar a b", "Did you mean compare? See `g4spec bench --help`"),
        ("verify -d x", "no option -d. Did you mean -md, "),
        ("generate --modle x", "no option --modle. Did you mean --model? See"),
        ("generate -temp 1", "no option -temp. Did you mean --temp? See"),
        ("-m x -p y", "no option -m -p. Put a command first, such as `g4spec generate -m ...`"),
        ("quantize a b --type Q4", "found Q4. Did you mean q4_0"),
        ("quantize a b --tensor-type x=q4k", "found q4k. Did you mean q4_k"),
        ("generate -m x -p y --cache-type q8", "found q8. Did you mean q8_0?"),
        ("generate -m x -p y --device gpu", "found gpu. Use cuda for the first GPU"),
        ("serve -a", "-a needs a value: found the end of the command. Write `-a VALUE`. See `g4"),
        ("serve -a --port 80", "-a needs a value: found the option --port. Write `-a VALUE`, or"),
        ("serve -m x --port 99999", "--port: expected at most 65535, found '99999'. See `g4spec s"),
        ("generate -m x -p y -n many", "-n: expected a whole number, found 'many'. See `g4spec g"),
        ("generate -m x --json=3", "--json takes no value: found 3"),
        (
            "generate -p y",
            "-m or --model is missing: expected `g4spec generate -m MODEL [OPTIONS]`",
        ),
        ("quantize a", "OUT is missing: expected `g4spec quantize SOURCE OUT [OPTIONS]`"),
        ("bench compare a b c", "unexpected argument 'c': expected `g4spec bench compare OLD NEW"),
        ("generate -m x --foo -ngl 3", "--foo: no such option"),
    ],
)
def test_wrong_options(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(command.split()) == 2
    assert said in capsys.readouterr().err


def test_an_existing_file_as_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "t.gguf").touch()
    assert cli.run([str(tmp_path / "t.gguf")]) == 2
    assert "Put a command first, such as `g4spec inspect /" in capsys.readouterr().err


def test_help_needs_no_valid_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "word", "--nope", "-h"]) == 0
    assert capsys.readouterr().out.startswith("Usage: g4spec generate")


@pytest.mark.parametrize(
    ("found", "similar"),
    [
        ("Q4_K", "did you mean q4_k?"),
        ("q4", "did you mean q4_k or q4_0?"),
        ("--q4-0", "did you mean q4_0?"),
        ("zzz", None),
        ("", None),
    ],
)
def test_similar_names(found: str, similar: str | None) -> None:
    assert did_you_mean(found, ["q4_k", "q4_0", "bf16"]) == similar
