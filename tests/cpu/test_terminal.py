"""Control characters of files, models or paths never reach a terminal."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from g4spec import cli
from g4spec.cli import render
from g4spec.convert import convert
from g4spec.gguf import ValueType, array, string, u32
from tests.cpu import gguf_fixtures as fixtures
from tests.support import tiny, tokens

BAD = "x\x1b]0;PWN\x07\x1b[8m\x9b31m\x7f\r\nFORGED: 124 rules, 0 errors\u202e\x1b]52;c;UFdO\x07"
"""Text that sets the title, hides text, contains C1, DEL and line breaks, reverses the direction
and writes the clipboard."""
OWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences of g4spec itself: colours, and cursor movements of rich's progress bars."""
FAST = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs a command and returns its terminal output."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*argv: object) -> str:
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            patch.setattr(sys, "stderr", terminal)
            code = cli.run([str(a) for a in argv])
        assert code in (0, 1, 2, 3, 4)
        return terminal.getvalue()

    return run


def check(text: str, lines: bool = False) -> None:
    """Check terminal output; `lines`: text or a script, which may contain line breaks."""
    assert text, "the command printed nothing to check"
    assert "\x1b[8m" not in text
    rest = OWN.sub("", text).replace("\r", "")  # of a progress bar; see the property below
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", rest), repr(rest[-2000:])
    assert lines or not re.search("^FORGED", rest, re.MULTILINE), rest[-2000:]


def hostile(folder: Path) -> dict[str, Path]:
    """Create files with BAD in every string that they contain."""
    name = folder / f"{BAD.replace('/', '')}.gguf"
    arch, tensor, key = fixtures.zlab(), fixtures.zlab(), fixtures.zlab()
    arch.kv["general.architecture"] = string(BAD)
    short = BAD[:30] + "\nFORGED: 0"
    tensor.tensors[short] = tensor.tensors["output_norm.weight"]
    key.kv[BAD] = string(BAD)
    key.kv["general.name"] = array(ValueType.STRING, [BAD] * 9)
    key.kv["dflash.block_size"] = string(BAD)
    target = tiny.target(folder / "t")
    convert(target, folder / "t.gguf")
    shutil.copy(folder / "t.gguf", name)
    config = json.loads((target / "config.json").read_text())
    bad = Path(shutil.copytree(target, folder / f"f{BAD}"))
    (bad / "config.json").write_text(json.dumps(config | {"architectures": [BAD], BAD: BAD}))
    return {
        "arch": arch.write(folder / "arch.gguf"),
        "tensor": tensor.write(folder / "x.gguf"),
        "key": key.write(folder / "key.gguf"),
        "path": name,
        "folder": bad,
        "target": folder / "t.gguf",
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hostile(tmp_path_factory.mktemp("hostile"))


COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "{}"],
    "inspect json": ["inspect", "{}", "--json"],
    "validate": ["validate", "{}"],
    "validate json": ["validate", "{}", "--json"],
    "validate against": ["validate", "{target}", "--against", "{}"],
    "convert": ["convert", "{}", "--target", "{target}", "-o", "{out}"],
    "convert target": ["convert", "{}", "-o", "{out}"],
    "quantize": ["quantize", "{}", "{out}", "--type", "q8_0", "--dry-run"],
    "generate": ["generate", "-m", "{}", "-p", "a", "-n", "2", "-c", "64"],
    "generate draft": ["generate", "-m", "{target}", "-md", "{}", "-p", "a", "-n", "2", "-c", "64"],
    "tokenize": ["tokenize", "-m", "{}", "a"],
    "doctor": ["doctor", "-m", "{}", "--assume", "H200"],
    "recipe": ["recipe", "llama.cpp", "-m", "{}", "--assume", "H200"],
    "bench compare": ["bench", "compare", "{}", "{}"],
    "not there": ["inspect", "{}" + BAD],
}


@pytest.mark.parametrize("file", ["arch", "tensor", "key", "path", "folder"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_shows_no_control_character(
    command: str, file: str, files: dict[str, Path], shown: Callable[..., str], tmp_path: Path
) -> None:
    given = {
        "{}": str(files[file]),
        "{target}": str(files["target"]),
        "{out}": str(tmp_path / f"{BAD}.gguf"),
    }
    argv = []
    for word in COMMANDS[command]:
        for name, value in given.items():
            word = word.replace(name, value)  # noqa: PLW2901
        argv.append(word)
    text = shown(*argv)
    check(text, lines=command == "recipe")


def test_tokens_show_no_control_character(shown: Callable[..., str], tmp_path: Path) -> None:
    """A vocabulary entry wrote to the clipboard; byte tokens can do that after any prompt
    injection."""
    texts, kinds, _ = tokens.vocabulary()
    texts, kinds = [*texts, BAD], [*kinds, 4]
    at = len(texts) - 1
    path = tokens.vocabulary_file(
        tmp_path / "v.gguf",
        tokens=array(ValueType.STRING, texts),
        token_type=array(ValueType.I32, kinds),
        merges=array(ValueType.STRING, ["d e"]),
    )
    text = shown("tokenize", "-m", path, "--ids-to-text", str(at))
    assert "PWN" in text
    check(text, lines=True)
    check(shown("tokenize", "-m", path, "--ids-to-text", str(at), "--json"))


def test_a_pipe_gets_unchanged_text(capsys: pytest.CaptureFixture[str]) -> None:
    render.Output().stream(BAD)
    assert capsys.readouterr().out == BAD


@pytest.mark.parametrize(
    "show",
    [
        lambda o, t: o.line(t, "bad"),
        lambda o, t: o.note(t),
        lambda o, t: o.stream(t, "good"),
        lambda o, t: o.stream_marked(t, "struck"),
        lambda o, t: o.table(t, [t], [[t]]),
        lambda o, t: render.error(t, 3),
        lambda o, t: render.error(t, 3, json=True),
        lambda o, t: render.Output(json=True).result({t: t}),
        lambda o, t: o.legend([(t, "good")]),
    ],
)
@FAST
@given(
    text=st.text(
        st.characters(max_codepoint=0xA0) | st.sampled_from("\x1b\x9b\x7f\r\n[]m;0"),
        min_size=1,
        max_size=12,
    )
)
@example(text=BAD)
@example(text="\x1b[31m\x1b]")
def test_no_output_has_control_characters(
    show: Callable[[render.Output, str], Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        render.Output.printed = False
        show(render.Output(), text)
    rest = re.sub(r"\x1b\[(0|1|2|3|31|32|9;31)m", "", terminal.getvalue())
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", rest), repr(rest)


@FAST
@given(text=st.text(st.characters(max_codepoint=0x2100), max_size=12))
@example(text="\nFORGED")
def test_line_prints_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    render.Output().line(text + ".")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_json_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    render.Output(json=True).result({"a": BAD, "b": u32(1).data})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": BAD, "b": 1}
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", out), "also in a pipe"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_has_every_character(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """Where stdout is not UTF-8, a character that it lacks became `?` and others other bytes."""
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding=encoding, errors="replace")  # as `cli.main` sets
    monkeypatch.setattr(sys, "stdout", stdout)
    render.Output(json=True).result({"text": "grüße → 例"})
    assert json.loads(written.getvalue().decode("utf-8")) == {"text": "grüße → 例"}


def test_reading_several_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second read once raised an error, because a stream cannot be reconfigured after a
    read."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\nb")))
    out = render.Output()
    assert [out.read_line("> ") for _ in range(3)] == ["a", "\ufffd", "b"]
    with pytest.raises(EOFError):
        out.read_line("> ")
