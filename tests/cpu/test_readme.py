"""Commands and code of README and docs/guides/many-texts.md run as written on the files of `make
demo`."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from g4spec import cli, convert

ROOT = Path(__file__).resolve().parents[2]
FAMILY = ROOT / "examples" / "tiny"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMPANY = (ROOT / "docs" / "guides" / "many-texts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", COMPANY, re.MULTILINE | re.DOTALL)
LINES = [
    shlex.split(line, comments=True)
    for line in re.findall(r"^    (\w.*)", COMPANY, re.M)
    if line.startswith(("g4spec ", "curl "))
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the files of the demo that README uses."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "demo").mkdir()
    convert.convert(FAMILY / "target", folder / "demo" / "target.gguf")
    convert.convert(
        FAMILY / "dflash", folder / "demo" / "dflash.gguf", target=folder / "demo" / "target.gguf"
    )
    return folder


@pytest.fixture(autouse=True)
def in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def test_python(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    assert len(BLOCKS) == 2
    for block in BLOCKS:
        exec(compile(block, "many-texts.md", "exec"), names)
    output = capsys.readouterr().out
    assert re.search(r"^\d+ tokens, \d+ of \d+ drafted$", output, re.MULTILINE)
    assert output.rstrip().endswith("length")


def test_the_first_screen_shows_what_one_gets() -> None:
    """The picture of the live view had been lost."""
    first = PAGES[0].read_text(encoding="utf-8").split("\n## ")[0]
    assert "g4spec serve" in first and "make demo" in first
    pictures = re.findall(r"^!\[.+\]\((.+)\)$", first, re.MULTILINE)
    assert pictures == ["docs/colours.png", "docs/live.png", "docs/sweep.png"]
    assert all((ROOT / picture).exists() for picture in pictures)


@pytest.mark.parametrize("command", ["bench", "verify"])
def test_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for line in LINES if line[:2] == ["g4spec", command])
    assert cli.run([*line[1:], "--device", "cpu"]) == 0
    assert re.search("4 streams at once|4 of 4 texts are the same", capsys.readouterr().out)


@pytest.fixture
def server() -> Iterator[str]:
    """Start the page's `serve` line on a free port and return its address."""
    (line,) = (line for line in LINES if line[:2] == ["g4spec", "serve"])
    command = [sys.executable, "-m", *line, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stderr is not None
        seen = []
        for stderr_line in process.stderr:
            seen.append(stderr_line)
            if found := re.search(r"is served at (http://127.0.0.1:\d+)$", stderr_line.strip()):
                break
        else:
            raise AssertionError("".join(seen))
        yield found[1]
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 0


def test_serve(server: str) -> None:
    (line,) = (line for line in LINES if line[0] == "curl")
    url, data = line[1], line[line.index("-d") + 1]
    answer = httpx.post(url.replace("http://127.0.0.1:8080", server), content=data, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens_predicted"] == json.loads(data)["n_predict"]


def commands(page: Path) -> list[str]:
    """Return every `g4spec ...` of a page, in code blocks and in the text."""
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"^    (?:\$ )?(g4spec .*)$", text, re.MULTILINE)
    return shown + re.findall(r"`(g4spec [a-z][^`]*)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_options_exist(page: Path) -> None:
    """Commands and options must exist, the named files need not."""
    known: Any = typer.main.get_command(cli.app())
    for text in commands(page):
        name, *words = shlex.split(text, comments=True)[1:]
        command = known.commands[name]
        takes = (command, *getattr(command, "commands", {}).values())
        flags = {flag for one in takes for p in one.params for flag in (*p.opts, *p.secondary_opts)}
        wrong = [w for w in words if w.startswith("-") and w.split("=")[0] not in flags]
        assert not wrong, text
