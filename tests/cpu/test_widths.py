"""Output on terminals of 60, 80 or 120 columns: no line is longer, and no word or cell is cut."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from g4spec import cli
from g4spec.cli import _bench_results, _layout
from g4spec.cli.render import Output, error
from g4spec.convert import convert
from tests.cpu.test_terminal import OWN, Terminal
from tests.support import bench_result, tiny
from tests.support.selection import sample

WIDTHS = (60, 80, 120)
LONG = "A draft that was trained for another target changes no text either, it only gains nothing."


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("widths")
    convert(tiny.target(folder / "t"), folder / "t.gguf")
    return folder / "t.gguf"


def _bench(columns: int) -> None:
    out = Output()
    _bench_results.show(bench_result.result(), out)
    _bench_results.show_averages(bench_result.result()["rows"], out)
    error(f"{LONG} {LONG}", 1)
    out.note(LONG * 2)


COMMANDS = {
    "doctor": ["doctor", "--assume", "CPU 64GB"],
    "doctor card": ["doctor", "--assume", "4060 ti"],
    "doctor pair": ["doctor", "--assume", "3090", "-m", "31b", "-md", "zlab-dflash", "--verbose"],
    "doctor no": ["doctor", "--assume", "4060 ti", "-m", "31b", "-md", "mtp"],
    "doctor cards": ["doctor", "--cards"],
    "doctor why": ["doctor", "--why", "rtx-3090"],
    "doctor unknown": ["doctor", "--assume", "24GB"],
    "recipe": ["recipe", "llama.cpp", "-m", "31b", "-md", "zlab-dflash", "--assume", "3090"],
    "recipe no": ["recipe", "vllm", "-m", "31b", "--assume", "3060"],
    "inspect": ["inspect", "{target}"],
    "validate": ["validate", "{target}"],
    "quantize": ["quantize", "{target}", "{out}", "--type", "q8_0", "--dry-run"],
}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None, Callable[[], object]], str]:
    """Return what is written to stdout and stderr on a terminal with this many columns, or on a
    pipe."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(columns: int | None, what: Callable[[], object]) -> str:
        place = Terminal()
        with monkeypatch.context() as patch:
            size = os.terminal_size((columns or 80, 24))
            patch.setattr(shutil, "get_terminal_size", lambda *_: size)
            patch.setattr(place, "isatty", lambda: columns is not None)
            patch.setattr(sys, "stdout", place)
            patch.setattr(sys, "stderr", place)
            what()
        text = OWN.sub("", place.getvalue())
        return "\n".join(line for line in text.splitlines() if "━" not in line)  # progress bars

    return run


def words(text: str) -> set[str]:
    """Return words without the punctuation that a list of `name: value` adds."""
    return {w.strip(",:;") for w in text.split()} - {"", "\\"}


def check(
    shown: Callable[..., str], what: Callable[[], object], columns: int, whole: bool = False
) -> None:
    """Check output; `whole`: no columns of a table may be left out either."""
    narrow, pipe = shown(columns, what), shown(None, what)
    for line in narrow.splitlines():
        longest = max(map(cell_len, line.split()), default=0)
        assert cell_len(line) <= columns or longest > columns - 10, line
    note = words("columns not shown (output too narrow): --json has all")
    lost = words(narrow) - words(pipe) - note
    assert not {w for w in lost if not set(w) <= set("─-")}, lost
    assert not whole or words(pipe) <= words(narrow)


@pytest.mark.parametrize("columns", sample(WIDTHS, 2))
@pytest.mark.parametrize("name", COMMANDS)
def test_commands(
    name: str, columns: int, target: Path, shown: Callable[..., str], tmp_path: Path
) -> None:
    given = {"{target}": str(target), "{out}": str(tmp_path / "o.gguf")}
    argv = [given.get(word, word) for word in COMMANDS[name]]
    whole = argv[0] in ("doctor", "recipe") and "--cards" not in argv
    check(shown, lambda: cli.run(argv), columns, whole)


@pytest.mark.parametrize("columns", WIDTHS)
def test_bench(columns: int, shown: Callable[..., str]) -> None:
    check(shown, lambda: _bench(columns), columns)
    table = shown(columns, lambda: _bench(columns))
    assert "tokens/s" in table and "x plain" in table, "the main columns are shown at every width"


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", ["bench", "inspect", "validate", "doctor cards", "doctor pair"])
def test_pipes_follow_the_variable(
    name: str,
    columns: int,
    target: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    if name == "bench":
        _bench_results.show(bench_result.result(), Output())
    else:
        cli.run([word.replace("{target}", str(target)) for word in COMMANDS[name]])
    out = capsys.readouterr().out
    assert out
    for line in out.splitlines():
        longest = max(map(cell_len, line.split()), default=0)
        assert cell_len(line) <= columns or longest > columns - 10, line


def test_a_wrong_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0", "-3", "many", "9" * 5000):
        monkeypatch.setenv("COLUMNS", value)
        assert _layout.text_width(Terminal()) == _layout.width(Terminal())
        with open(os.devnull, "w") as file:
            assert _layout.text_width(file) is None


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", ["", *cli.names()])
def test_help(name: str, columns: int, shown: Callable[..., str]) -> None:
    text = shown(columns, lambda: cli.run([*name.split(), "--help"]))
    assert "Usage:" in text
    assert max(map(cell_len, text.splitlines())) <= columns


def test_a_broken_command_can_be_pasted() -> None:
    text = 'g4spec recipe llama.cpp -m 31b -md zlab-dflash --assume "2x RTX 3090 nvlink" -c 32768'
    for columns in WIDTHS:
        lines = _layout.command("  command   ", text, columns)
        pasted = re.sub(r"\s*\\\n\s*", " ", lines).split("command", 1)[1].strip()
        assert re.sub(r"\s+", " ", pasted) == text
        assert all(len(line) <= columns for line in lines.splitlines())


def test_prose_hangs_below_its_beginning() -> None:
    assert _layout.wrap("  ! one two three four", 14) == "  ! one two\n    three four"
    assert _layout.wrap("  1. one two three", 16) == "  1. one two\n     three"
    assert _layout.wrap("#   -c 1: it fits", 12) == "#   -c 1: it\n#     fits"
    assert _layout.wrap("a word", None) == "a word"


def test_a_column_without_a_name_has_no_colon() -> None:
    names, row = ["source", "", "type", "why"], ["fc.weight", "copy", "Q8_0", ""]
    assert _layout.records(names, [row], 60) == "  fc.weight\n    copy, type: Q8_0"
