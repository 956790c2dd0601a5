"""Wrong arguments: the error names the option that was probably intended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from g4spec import cli
from g4spec.cli import _output_files
from g4spec.errors import UsageError, did_you_mean
from g4spec.gguf import imatrix


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
        ("doctor RTX 4060 Ti", "--assume 'RTX 4060 Ti'"),
        ("recipe vllm -m 31b 2x H100", "--assume '2x H100'"),
        ("doctor 12b RTX 4090", "--assume 'RTX 4090' -m 12b"),
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


@pytest.mark.parametrize("flag", ["-n", "--predict", "--n-predict"])
@pytest.mark.parametrize("command", ["generate -p x", "chat", "bench", "serve"])
def test_every_spelling_of_the_number_of_tokens(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*command.split(), "-m", "missing.gguf", flag, "0"]) == 2
    assert re.match(rf"error: ({flag}|-n): expected (at least )?1", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("command", "message"),
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
        ("bench -m x.gguf -o -q", "-o needs a value: found the option -q. Write `-o VALUE`, or"),
        ("serve -a --port 80", "-a needs a value: found the option --port. Write `-a VALUE`, or"),
        ("serve -m x --port 99999", "--port: expected at most 65535, found '99999'. See `g4spec s"),
        ("generate -m x -p y -n many", "-n: expected a whole number, found 'many'. See `g4spec g"),
        ("generate -m x --json=3", "--json takes no value: found 3"),
        ("serve -m x --reasoning-budget 0", "`g4spec serve` --reasoning, and the field thinking_b"),
        ("generate -m x -p y -rea on", "-rea: use --thinking; `g4spec chat` has --think, `g4spec "),
        ("serve -m x -rea on --no-warmup", "--no-warmup: `bench` and `serve` always warm up"),
        ("serve -m x -rea maybe", "-rea: expected one of off, on, auto, found 'maybe'"),
        (
            "generate -p y",
            "-m or --model is missing: expected `g4spec generate -m MODEL [OPTIONS]`",
        ),
        ("quantize a", "OUT is missing: expected `g4spec quantize SOURCE OUT [OPTIONS]`"),
        ("quantize a -o b", "no option -o: expected `g4spec quantize SOURCE OUT [OPTIONS]`. See"),
        ("perplexity -f x", "no option -f: expected `g4spec perplexity FILE -m MODEL [OPTIONS]`."),
        ("doctor --context 4096", "no option --context. Did you mean --ctx-size? See"),
        (
            "recipe -m 12b",
            "ENGINE is missing: expected `g4spec recipe ENGINE -m MODEL [OPTIONS]`. ",
        ),
        ("recipe -m 12b", "vllm, sglang, llama.cpp or g4spec"),
        ("doctor -m 12b:q4 --assume H100", "Did you mean 12b:q4_"),
        ("bench compare a b c", "unexpected argument 'c': expected `g4spec bench compare OLD NEW"),
        ("generate -m x --foo -ngl 3", "--foo: no such option"),
    ],
)
def test_wrong_options(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(command.split()) == 2
    assert message in capsys.readouterr().err


def test_an_existing_file_as_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "t.gguf").touch()
    assert cli.run([str(tmp_path / "t.gguf")]) == 2
    assert "Put a command first, such as `g4spec inspect /" in capsys.readouterr().err


WRONG = {
    "generate -m MODEL -p y --temp -1": "--temp: expected a finite number >= 0, found -1.0",
    "generate -m MODEL -p y --draft-max 16": "--draft-max: expected 0 to 15, or auto, found 16",
    "generate -m MODEL -p y --draft-window 3": "--draft-window needs a draft",
    "generate -m MODEL -p y --device tpu": "--device: expected cpu, cuda",
    "generate -m MODEL -p y -md no.gguf": "no.gguf: no such file or folder",
    "generate -m no.gguf -p y": "no.gguf: no such file or folder",
    "generate -m MODEL -f no.txt": "no.txt",
    "chat -m MODEL --top-nsigma -1": "--top-nsigma: expected a finite number >= 0 (0 keeps all), "
    "found -1.0",
    "chat -m MODEL --top-p 2": "--top-p: expected in (0, 1], found 2.0",
    "verify -m MODEL -md ngram --cases 0": "--cases: expected 1 to 100000, found 0",
    "verify -m MODEL -md ngram --draft-max 0": "--draft-max 0 drafts no tokens",
    "bench -m MODEL --categories cod": "--categories: expected one of code, chat",
    "bench -m MODEL --categories code,chat,code": "--categories: expected each name once",
    "bench -m MODEL -n 64 -c 64": "-n: expected less than the context, -c 64, found 64",
    "verify -m MODEL -md ngram -n 99 -c 64": "-n: expected less than the context, -c 64",
    f"generate -m MODEL -p y -n {'9' * 5000}": "-n: expected a smaller number, found 5000 digits",
    f"generate -m MODEL -p y --draft-max {'9' * 5000}": "--draft-max: expected 0 to 15, or auto",
    "bench -m MODEL --prompts 99": "--prompts: expected 1 to",
    "bench -m MODEL -md ngram --draft-max 2,77": "--draft-max: expected",
    "bench -m MODEL -md ngram --draft-max 2;5": "--draft-max: expected sweep, auto, a number from",
    "generate -m MODEL -p y -n -2": "-n: expected 1 or more, or -1 to continue until the context",
    "bench -m MODEL --parallel 0": "--parallel: expected 1 to ",
    "bench -m MODEL -np 0": "-np: expected 1 to ",
    "bench -m MODEL --n-predict 64 --ctx-size 64": "--n-predict: expected less than the context, "
    "--ctx-size 64, found 64",
    "generate -m MODEL -p y -t 99999999": "-t: expected at most 1024, found '99999999'",
    "generate -m 12b -p y": "g4spec convert google/gemma-4-12B-it -o gemma-4-12B-it.gguf",
    "generate -m MODEL -md zlab-31b -p y": "give its hub id: z-lab/gemma-4-31B-it-DFlash",
    "generate -m other -p y": "give a hub id such as org/name:Q4_K_M to download a model",
    "bench -m MODEL --repeats 0": "--repeats: expected 1 to 100000, found 0",
    "serve -m MODEL --draft-p-min 2": "--draft-p-min: expected 0 to 1, found 2.0",
    "serve -m MODEL --cache-type q8": "--cache-type: expected f16 or q8_0",
    "perplexity -m MODEL no.txt": "no.txt",
    "perplexity -m MODEL MODEL --cache-type q8": "--cache-type: expected f16 or q8_0",
    "perplexity -m MODEL MODEL --chunks 0": "--chunks: expected at least 1, found 0",
    "perplexity -m MODEL no.txt -c 1": "-c: expected at least 4 tokens per chunk, found 1",
    "imatrix -m MODEL MODEL --ctx-size 3": "--ctx-size: expected at least 4 tokens per chunk, foun",
    "imatrix -m no.gguf MODEL --chunks -1": "--chunks: expected at least 1, found -1",
    "chat -m no.gguf": "no.gguf: no such file or folder",
    "serve -m no.gguf": "no.gguf: no such file or folder",
    "serve -m MODEL --pool -1": "--pool: expected at least 1, found '-1'",
    "serve -m MODEL --reasoning maybe": "--reasoning: expected one of off, on, auto, found 'maybe'",
    "serve -m MODEL --cors-origin foo": "--cors-origin: expected http://HOST:PORT",
    "serve -m MODEL --api-key-file MODEL": "no API key",
    "chat --url foo": "--url: expected an address such as http://127.0.0.1:8080, found foo",
    "serve --models no/such/dir": "no/such/dir: no such file or folder",
    "serve --models no-dir": "no-dir: no such file or folder: expected a folder of GGUF files",
    "imatrix -m no.gguf MODEL": "no.gguf: no such file or folder",
}
"""Command line -> part of its error."""


def test_wrong_options_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    lines = [line.replace("MODEL", str(model)).split() for line in WRONG]
    code = (
        "import json, sys\n"
        "sys.modules['torch'] = None\n"
        "from g4spec import cli\n"
        "sys.exit(max(cli.run(line) not in (2, 3) for line in json.loads(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(lines)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    errors = done.stderr.splitlines()
    for line, message, error in zip(WRONG, WRONG.values(), errors, strict=True):
        assert message in error, line
    assert done.returncode == 0


@pytest.mark.parametrize("line", ["generate -m {} -p x", "inspect {}", "generate -m x -f {}"])
def test_empty_texts_are_not_files(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([word.format("") for word in line.split()]) == 2
    assert "is an empty text" in capsys.readouterr().err


def test_a_similar_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "target.gguf").touch()
    assert cli.run(["generate", "-m", str(tmp_path / "taget.gguf"), "-p", "x"]) == 3
    assert "Did you mean target.gguf?" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"# A text\n", b"GGUF"])
def test_imatrix_replaces_only_an_imatrix(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text, out = (tmp_path / name for name in ("m.gguf", "text.txt", "out"))
    model.touch()
    text.write_text("some words")
    out.write_bytes(content)
    assert cli.run(["imatrix", "-m", str(model), str(text), "-o", str(out)]) in (2, 3)
    assert str(out) in capsys.readouterr().err and out.read_bytes() == content
    imatrix.save(out, imatrix.Imatrix({}, 1, 512, [], "x"))
    imatrix.check_output(out)
    out.write_bytes(b"")
    imatrix.check_output(out)


def test_results_replace_only_results(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# A text")
    with pytest.raises(UsageError, match="exists and is not a result of g4spec"):
        _output_files.prepare(path)
    for text in ('{\n "schema": "g4spec.bench/1"', "<html><title>Draft lengths: x</title>", ""):
        path.write_text(text)
        _output_files.prepare(path)


@pytest.mark.parametrize("command", ["imatrix", "perplexity"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-c", "1"], "-c: expected at least 4 tokens per chunk, found 1"),
        (["--chunks", "0"], "--chunks: expected at least 1, found 0"),
    ],
)
def test_sizes_of_chunks(
    command: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some words")
    assert cli.run([command, "-m", "text.txt", "text.txt", *options]) == 2
    assert message in capsys.readouterr().err


def test_help_ignores_other_invalid_arguments(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("command", ["quantize", "validate", "generate", "bench", "serve"])
def test_help_names_values_in_the_words_of_errors(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The placeholders are not types of Python, and arguments are spelled as in errors."""
    assert cli.run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^  --?[a-z].*<\w+", text, re.MULTILINE) == []
    if command == "quantize":
        assert "{SOURCE} {OUT}" in text or "SOURCE OUT" in text


def test_flags_that_say_what_chat_does_anyway_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error for -cnv was to use `g4spec chat`, also in `chat`."""
    missing = str(tmp_path / "m.gguf")
    assert cli.run(["chat", "-m", missing, "-cnv", "--jinja", "-sys", "hello"]) == 3
    assert "no such file" in capsys.readouterr().err
    assert cli.run(["generate", "-m", missing, "-cnv", "-p", "x"]) == 2
    assert "use `g4spec chat`" in capsys.readouterr().err
