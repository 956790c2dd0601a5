"""Prompts of `generate`: conversations, tools, thinking, and control tokens in user text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from g4spec.cli._prompt import PromptOptions
from g4spec.errors import InputError, UsageError
from g4spec.runtime.tokenizer import Tokenizer
from tests.support import tokens as tiny

TEMPLATE = (
    "{% if enable_thinking %}<|channel>{% endif %}{% for t in tools or [] %}{{ t.type }}"
    "{% endfor %}{% for m in messages %}<|turn>{{ m.role }} {{ m.content }}<turn|>"
    "{% endfor %}"
)

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def tokenizer() -> Tokenizer:
    tokens, types, merges = tiny.vocabulary()
    return Tokenizer(tokens, types, merges, bos=2, template=TEMPLATE)


def text(options: PromptOptions) -> str:
    known = tokenizer()
    return known.decode(options.read().encode(known, 4096)[1:], special=True)


def saved(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_turns_tools_and_thinking_reach_the_template(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    options = PromptOptions(
        messages=saved(tmp_path / "m.json", turns),
        system="s",
        thinking=True,
        tools=saved(tmp_path / "t.json", TOOLS),
    )
    assert text(options) == (
        "<|channel>function<|turn>system s<turn|><|turn>user a<turn|>"
        "<|turn>assistant b<turn|><|turn>user c<turn|>"
    )


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_in_the_file_and_in_the_options(role: str, tmp_path: Path) -> None:
    """The template got both, and may read only the first."""
    turns = [{"role": role, "content": "own"}, {"role": "user", "content": "a"}]
    path = saved(tmp_path / "m.json", turns)
    with pytest.raises(UsageError, match=f"message of the role {role}"):
        PromptOptions(messages=path, system="s").read()
    for alone in (PromptOptions(messages=path), PromptOptions(messages=path, system="")):
        assert text(alone) == f"<|turn>{role} own<turn|><|turn>user a<turn|>"


def test_files_with_a_byte_order_mark(tmp_path: Path) -> None:
    """A file with only the mark was a prompt that is not empty."""

    def marked(name: str, content: str) -> Path:
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        return tmp_path / name

    messages = marked("m.json", json.dumps([{"role": "user", "content": "a"}]))
    assert text(PromptOptions(messages=messages, tools=marked("t.json", json.dumps(TOOLS)))) == (
        "function<|turn>user a<turn|>"
    )
    assert PromptOptions(tokens_file=marked("ids", "2 5")).read().ids == [2, 5]
    assert PromptOptions(file=marked("p", "a")).read().text == "a"
    with pytest.raises(InputError, match="the prompt is empty"):
        PromptOptions(file=marked("none", "")).read()


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("tools or []", "[]")])
def test_tools_that_the_template_ignores_are_noted(tmp_path: Path, template: str) -> None:
    known = tokenizer()
    known.template = template
    tools = saved(tmp_path / "t.json", TOOLS)
    prompt = PromptOptions("a", chat=True, tools=tools).read()
    note = prompt.chat_note(known, prompt.encode(known, 4096))
    assert (note is None) == (template == TEMPLATE) and "--tools" in (note or "--tools")


@pytest.mark.parametrize(
    ("options", "turns"),
    [
        (PromptOptions("x<turn|>"), 1),
        (PromptOptions("x<turn|>", special=False), 0),
        (PromptOptions("x<turn|>", chat=True), 1),
        (PromptOptions("x<turn|>", chat=True, special=True), 2),
    ],
)
def test_control_tokens_in_a_prompt(options: PromptOptions, turns: int) -> None:
    known = tokenizer()
    mark = known.encode("<turn|>", bos=False)[0]
    assert options.read().encode(known, 4096).count(mark) == turns
    assert "x<turn|>" in text(options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"text": "a", "messages": Path("m")},
        {"text": "a", "thinking": True},
        {"text": "a", "tools": Path("t")},
        {"text": "a", "system": "s"},
        {"tokens_file": Path("i"), "chat": True},
        {"tokens_file": Path("i"), "special": False},
    ],
)
def test_contradicting_options(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        PromptOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '[{"content": "a"}]',
        "[1]",
        '[{"role": "pirate", "content": "a"}]',
        '[{"role": "user", "content": "\\ud800"}]',
    ],
)
def test_invalid_conversations(tmp_path: Path, content: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(content)
    with pytest.raises(InputError):
        PromptOptions(messages=path).read()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (None, 'list is empty: expected one or more objects with a text field "role"'),
        ({}, "message 2, of the role user, has no text"),
        ({"content": None}, "has no text"),
        ({"content": 5}, "has no text"),
        ({"content": []}, "has no text"),
        ({"content": ["hi"]}, "has no text"),
        ({"content": [{"type": "text"}]}, "has no text"),
        ({"content": [{"type": "image_url", "image_url": "x"}]}, "has no text"),
        ({"tool_calls": [{"function": {"name": "f"}}]}, "has no text"),
        ({"role": "assistant"}, "of the role assistant, has no text"),
        ({"role": "assistant", "tool_calls": []}, "has no text"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, None),
        ({"role": "tool", "content": ""}, None),
        ({"content": [{"type": "text", "text": "hi"}]}, None),
    ],
)
def test_messages_without_text(tmp_path: Path, message: Any, says: str | None) -> None:
    first = {"role": "user", "content": "hi"}
    path = tmp_path / "m.json"
    path.write_text(json.dumps([] if message is None else [first, {"role": "user", **message}]))
    if says is None:
        assert len(PromptOptions(messages=path).read().messages or ()) == 2
        return
    with pytest.raises(InputError, match=says):
        PromptOptions(messages=path).read()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ('{"tools": []}', 'not a list of objects .*"type": found {"tools'),
        (
            '[{"name": "f"}]',
            'entry 1 of the list: expected an object .*"type", found {"name": "f"}',
        ),
        ("[1]", "entry 1 of the list: .*found 1$"),
        ([{"type": "web_search"}], 'tool 2: "type": expected function, found web_search'),
        ([{"type": "function"}], 'tool 2: "function": expected an object .*found nothing'),
        ([{"type": "function", "function": "f"}], 'tool 2: "function".*found "f"'),
        ([{"type": "function", "function": {}}], r'tool 2: "function\.name".*text, found nothing'),
        ({"name": 5}, r'tool 2: "function\.name": expected a text, found 5'),
        ({"name": "f", "description": []}, r'"function\.description": expected a text, found \[\]'),
        ({"name": "f", "parameters": []}, r'"function\.parameters": .*an object, found \[\]'),
        ({"name": "f", "description": None, "parameters": None}, None),
    ],
)
def test_tools(tmp_path: Path, content: Any, says: str | None) -> None:
    path = tmp_path / "t.json"
    if isinstance(content, dict):
        content = [{"type": "function", "function": content}]
    path.write_text(content if isinstance(content, str) else json.dumps(TOOLS + content))
    options = PromptOptions("a", chat=True, tools=path)
    if says is None:
        tools = options.read().tools
        assert tools and [tool["function"]["description"] for tool in tools] == ["", ""]
        return
    with pytest.raises(InputError, match=f"t.json: {says}|t.json: tool 2: {says}"):
        options.read()
