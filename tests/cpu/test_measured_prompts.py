"""`verify` and `bench` with a prompt of one's own, and with thinking in the built-in prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from g4spec import cli, convert
from g4spec.measure import bench, verify
from g4spec.measure.prompts import mt_bench, prompts
from g4spec.runtime.engine import Engine
from tests.cpu.test_prompting import TEMPLATE, saved, tokenizer
from tests.support import tiny

TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
SHOWN: dict[Any, str] = {}
"""Texts by prompt and template: each chat starts a process that renders it."""
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.target(folder / "target", layers=6)
    tiny.zlab_dflash(folder / "draft", target)
    convert.convert(target, folder / "plain.gguf")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    convert.convert(target, folder / "t.gguf")
    convert.convert(folder / "draft", folder / "d.gguf", target=folder / "t.gguf")
    saved(folder / "messages.json", TURNS)
    saved(folder / "tools.json", TOOLS)
    return folder


@pytest.fixture(params=["verify", "bench"])
def line(request: pytest.FixtureRequest, folder: Path) -> list[str]:
    """The beginning of a short command line."""
    short = {"verify": ["--cases", "2"], "bench": ["--draft-max", "2", "--repeats", "1"]}
    models = ["-m", str(folder / "t.gguf"), "-md", str(folder / "d.gguf")]
    return [request.param, *models, "-c", "512", "-n", "4", *short[request.param]]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the prompts that are run, in place of running them all."""
    seen: list[str] = []

    def shown(engine: Engine, prompt: Any) -> str:
        known = engine.tokenizer
        if (prompt, known.template) not in SHOWN:
            SHOWN[prompt, known.template] = known.decode(prompt.encode(known)[1:], special=True)
        return SHOWN[prompt, known.template]

    cases, sweep = verify.cases, bench.sweep

    def first_cases(todo: Any, *args: Any, **kw: Any) -> Any:
        seen.extend(shown(Engines.last, prompt) for prompt in todo)
        return cases(todo[:1], *args, **kw)

    def first_prompts(engine: Engine, todo: Any, *args: Any, **kw: Any) -> Any:
        seen.extend(shown(engine, prompt) for prompt in todo)
        return sweep(engine, todo[:1], *args, **kw)

    load = Engine.load

    class Engines:
        last: Engine

        @staticmethod
        def load(*args: Any, **kw: Any) -> Engine:
            Engines.last = load(*args, **kw)
            return Engines.last

    monkeypatch.setattr(Engine, "load", Engines.load)
    monkeypatch.setattr(verify, "cases", first_cases)
    monkeypatch.setattr(bench, "sweep", first_prompts)
    return seen


def test_turns_tools_and_thinking_reach_the_template(
    folder: Path, line: list[str], texts: list[str]
) -> None:
    files = ["--messages", str(folder / "messages.json"), "--tools", str(folder / "tools.json")]
    assert cli.run([*line, *files, "--system", "s", "--thinking"]) == 0
    assert texts == [
        "<|channel>function<|turn>system s<turn|><|turn>user a<turn|>"
        "<|turn>assistant b<turn|><|turn>user c<turn|>"
    ]


def test_ids_and_marks_are_read_as_by_generate(
    folder: Path, line: list[str], texts: list[str]
) -> None:
    (folder / "ids").write_text("2 10 11")
    assert cli.run([*line, "--tokens-file", str(folder / "ids")]) == 0
    assert cli.run([*line, "-p", "x<turn|>", "--no-parse-special"]) == 0
    assert len(texts) == 2 and texts[1] == "x<turn|>"


def test_thinking_is_enabled_in_the_built_in_prompts(
    line: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*line, "--thinking", "--long-tokens", "100"]) == 0
    chats = [text for text in texts if "<|turn>" in text]
    assert len(chats) >= 24 and all(text.startswith("<|channel>") for text in chats)
    assert "--thinking has no effect" not in capsys.readouterr().err


def test_a_template_without_thinking_is_named(
    folder: Path, line: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line[2] = str(folder / "plain.gguf")
    assert cli.run([*line, "-p", "a", "--chat", "--thinking"]) == 0
    assert "--thinking has no effect" in capsys.readouterr().err
    generate = ["generate", *line[1:3], "-n", "2", "-p", "a", "--chat", "--thinking"]
    assert cli.run(generate) == 0
    assert "--thinking has no effect" in capsys.readouterr().err


def test_thinking_applies_to_chat_prompts_only(tmp_path: Path) -> None:
    known = tokenizer()
    for prompt in prompts(known, count=1, long_tokens=100, thinking=True):
        text = known.decode(prompt.encode(known)[1:], special=True)
        assert text.startswith("<|channel>") == (prompt.form == "chat")
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps({"question_id": 1, "turns": ["Hello."]}))
    (question,) = mt_bench(path, thinking=True)
    assert known.decode(question.encode(known)[1:], special=True).startswith("<|channel>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-p", "a", "--messages", "m"], "exactly one"),
        (["--chat"], "--chat needs a prompt of your own"),
        (["--tools", "t"], "--tools needs a prompt of your own"),
        (["--system", "s"], "--system needs a prompt of your own"),
        (["--no-parse-special"], "--parse-special needs a prompt of your own"),
        (["-p", "a", "--thinking"], "--thinking needs a chat template"),
        (["-p", "a", "--long-tokens", "9"], "--long-tokens applies to the built-in prompts only"),
    ],
)
def test_wrong_use(
    line: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*line, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--preset", "--categories", "--prompts"])
def test_bench_wrong_use(option: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"--preset": "mt-bench", "--categories": "chat", "--prompts": "1"}[option]
    line = ["bench", "-m", str(folder / "t.gguf"), "-p", "a", option, value]
    assert cli.run(line) == 2
    assert f"{option} applies to the built-in prompts only" in capsys.readouterr().err
