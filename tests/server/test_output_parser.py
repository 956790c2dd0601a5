"""The parser of Gemma 4's output."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server.output_parser import (
    AnswerStream,
    ArgumentEvent,
    CallEvent,
    Event,
    Marks,
    Parser,
    TextEvent,
    ThoughtEvent,
    merge_events,
)
from g4spec.server.tool_arguments import Arguments


@pytest.fixture(scope="module")
def marks(tokenizer: Tokenizer) -> Marks:
    found = Marks.of(tokenizer)
    assert found == Marks(105, 106, 100, 101, 48, 49, 50, 52)
    return found


def parse(tokenizer: Tokenizer, text: str, whole: bool = True, **how: Any) -> list[Event]:
    marks = Marks.of(tokenizer)
    assert marks
    parser = Parser(tokenizer, marks, **how)
    return merge_events(
        [*parser.push(tokenizer.encode(text, bos=False)), *parser.finish(whole=whole)]
    )


def called(index: int, name: str, arguments: Any) -> list[Event]:
    compact = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
    return [CallEvent(index, name), ArgumentEvent(index, compact)]


THOUGHT = "<|channel>thought\nLet me see.\n<channel|>"
F = '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'
F_CALLED = called(0, "f", {"a": "x"})

CASES: dict[str, list[Event]] = {
    "Hello.\nYou": [TextEvent("Hello.\nYou")],
    THOUGHT + "Hi": [ThoughtEvent("Let me see."), TextEvent("Hi")],
    "<|channel>thought\n<channel|>Hi": [TextEvent("Hi")],
    "Hi<|channel>thought\n<channel|>": [TextEvent("Hi")],
    "Hi<channel|>": [TextEvent("Hi")],
    "<channel|>Hi": [TextEvent("Hi")],
    "<|channel>" + THOUGHT + "Hi": [ThoughtEvent("Let me see."), TextEvent("Hi")],
    "<|channel><|channel>" + THOUGHT + "Hi": [ThoughtEvent("Let me see."), TextEvent("Hi")],
    "<|channel><channel|>Hi": [TextEvent("Hi")],
    "<|channel>thoughtLet me see.<channel|>Hi": [ThoughtEvent("Let me see."), TextEvent("Hi")],
    "<|channel>Hi": [TextEvent("Hi")],
    "<|channel>Hi" + THOUGHT: [TextEvent("Hi"), ThoughtEvent("Let me see.")],
    "<|channel>thought\nLet me see.": [ThoughtEvent("Let me see.")],
    THOUGHT + "Hi" + THOUGHT: [
        ThoughtEvent("Let me see."),
        TextEvent("Hi"),
        ThoughtEvent("\nLet me see."),
    ],
    "<|channel>thought\nA<|channel>thought\nB<channel|>C": [ThoughtEvent("A\nB"), TextEvent("C")],
    F: F_CALLED,
    THOUGHT + F: [ThoughtEvent("Let me see."), *F_CALLED],
    THOUGHT + "Now." + F: [ThoughtEvent("Let me see."), TextEvent("Now."), *F_CALLED],
    "<|channel>thought\nLet me see." + F: [ThoughtEvent("Let me see."), *F_CALLED],
    F + F.replace("call:f", "call:g"): [*F_CALLED, *called(1, "g", {"a": "x"})],
    F + "Done": [*F_CALLED, TextEvent("Done")],
    F + "<tool_call|>" + "Done": [*F_CALLED, TextEvent("Done")],
    "<tool_call|>Hi": [TextEvent("Hi")],
    '<|tool_call>:f{a:<|"|>x<|"|>}<tool_call|>': F_CALLED,
    '<|tool_call>f{a:<|"|>x<|"|>}<tool_call|>': F_CALLED,
    '<|tool_call>call:f(a:<|"|>x<|"|>)<tool_call|>': F_CALLED,
    "<|tool_call>call:f(a:[1,g(x)],b:2)<tool_call|>": called(0, "f", {"a": [1, "g(x)"], "b": 2}),
    '<|tool_call>call:f{a:<|"|>x<|"|>}': F_CALLED,
    '<|tool_call>call:f{a:<|"|>x<|"|>}}<tool_call|>': F_CALLED,
    '<|tool_call>call:f{a:<|"|>x<|"|><tool_call|>': F_CALLED,
    '<|tool_call>call:f{a:<|"|>x<tool_call|>': F_CALLED,
    '<|tool_call>call:f{a:<|"|>x<|"|>' + F: [*F_CALLED, *called(1, "f", {"a": "x"})],
    '<|tool_call>call:f{a:<|"|>x<|"|>' + THOUGHT: [*F_CALLED, ThoughtEvent("Let me see.")],
    "<|tool_call><|tool_call>call:callback{}<tool_call|>": called(0, "callback", {}),
    "<|tool_call>callback{}<tool_call|>": called(0, "callback", {}),
    "<|tool_call>call:f<tool_call|>": called(0, "f", {}),
    "<|tool_call><tool_call|>": [],
    "<|tool_call>I will {": [TextEvent("I will {")],
    "<|tool_call>" + "so" * 200: [TextEvent("so" * 200)],
    'say <|"|>so<|"|>': [TextEvent('say "so"')],
}

ARGUMENTS = {
    "": {},
    "n:42,ok:true,x:null,r:-1.5e3": {"n": 42, "ok": True, "x": None, "r": -1.5e3},
    'o:{k:{d:[1,[],{}]}},a:[<|"|>p<|"|>,<|"|>q<|"|>]': {
        "o": {"k": {"d": [1, [], {}]}},
        "a": ["p", "q"],
    },
    't:<|"|>a,b:{"c"}\n\\n]é😀<|"|>,u:<|"|><|"|>': {"t": 'a,b:{"c"}\n\\n]é😀', "u": ""},
    '<|"|>k<|"|>:<|"|>v<|"|>,"l":1': {"k": "v", "l": 1},
    't:"say \\"so\\", yes",n:2': {"t": 'say "so", yes', "n": 2},
    " a : 1 , b : [ 1 , 2 ] , ": {"a": 1, "b": [1, 2]},
    "city:New York,n:1": {"city": "New York", "n": 1},
    "a:,b:": {"a": None, "b": None},
    "a:True,b:None,c:+5,d:.5,e:1.": {"a": True, "b": None, "c": 5, "d": 0.5, "e": 1.0},
    "a:" + "0" * 5000: {"a": "0" * 5000},  # more digits than int() takes
    "a:[1,2": {"a": [1, 2]},
    "a:[{b:1": {"a": [{"b": 1}]},
    'a:<|"|>x<|"|><|"|>y<|"|>,b:1': {"a": "x", "b": 1},
    "a:1],b:f(x)": {"a": "1]", "b": "f(x)"},
}


@pytest.mark.parametrize("text", CASES, ids=range(len(CASES)))
def test_shapes(tokenizer: Tokenizer, text: str) -> None:
    assert parse(tokenizer, text) == CASES[text]


@pytest.mark.parametrize("text", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments(tokenizer: Tokenizer, text: str) -> None:
    events = parse(tokenizer, "<|tool_call>call:f{" + text + "}<tool_call|>")
    assert events[0] == CallEvent(0, "f") and len(events) == 2
    assert isinstance(events[1], ArgumentEvent) and json.loads(events[1].json) == ARGUMENTS[text]


def test_a_call_that_was_cut_off_stays_open(tokenizer: Tokenizer) -> None:
    text = '<|tool_call>call:rm{path:<|"|>/tmp'
    assert parse(tokenizer, text, False) == [CallEvent(0, "rm"), ArgumentEvent(0, '{"path":"/tmp')]
    assert parse(tokenizer, text)[1] == ArgumentEvent(0, '{"path":"/tmp"}')
    assert parse(tokenizer, "<|tool_call>call:rm", False) == []


def test_without_tools_calls_are_text(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, F, calls=False) == [TextEvent('<|tool_call>call:f{a:"x"}<tool_call|>')]


def test_a_prompt_may_end_in_a_thought(tokenizer: Tokenizer, marks: Marks) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text)

    assert marks.thinking(ids("<|turn>model\n<|channel>thought\n"))
    assert not marks.thinking(ids("<|turn>model\n<|channel>thought\n<channel|>"))
    assert not marks.thinking(ids("<|channel>x<|turn>model\n"))
    assert not marks.thinking([])
    assert parse(tokenizer, "So.<channel|>Hi", thinking=True) == [
        ThoughtEvent("So."),
        TextEvent("Hi"),
    ]
    # The model may open a second thought.
    again = "<|channel>thought\nSo.<channel|>Hi"
    assert parse(tokenizer, again, thinking=True) == [ThoughtEvent("So."), TextEvent("Hi")]


def test_the_answer_alone_is_a_stream(tokenizer: Tokenizer, marks: Marks) -> None:
    stream = AnswerStream(Parser(tokenizer, marks))
    ids = tokenizer.encode(THOUGHT + "Hi é" + F + "!", bos=False)
    assert "".join(stream.push([i]) for i in ids) + stream.finish() == "Hi é!"


PARTS = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|turn>",
    "thought",
    "thought\n",
    "call:",
    ":",
    "f",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ",",
    "a:",
    "1",
    "true",
    '"',
    "\\",
    " ",
    "\n",
    "é",
    "😀",
    "text",
    *CASES,
]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_chunking_gives_the_same_events(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS), max_size=12)))
    ids = tokenizer.encode(text, bos=False)
    ids += data.draw(st.lists(st.integers(0, 4095), max_size=6))
    how = {"calls": data.draw(st.booleans()), "thinking": data.draw(st.booleans())}
    whole = data.draw(st.booleans())
    marks = Marks.of(tokenizer)
    assert marks
    once = Parser(tokenizer, marks, **how)
    wanted = merge_events([*once.push(ids), *once.finish(whole=whole)])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    parser, events = Parser(tokenizer, marks, **how), []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        events += parser.push(ids[start:end])
    events += parser.finish(whole=whole)
    assert merge_events(events) == wanted

    arguments: dict[int, str] = {}
    for event in wanted:
        if isinstance(event, CallEvent):
            assert event.name and event.index == len(arguments)
            arguments[event.index] = ""
        elif isinstance(event, ArgumentEvent):
            arguments[event.index] += event.json
    for i, made in arguments.items():
        if whole or i < len(arguments) - 1:
            assert isinstance(json.loads(made), dict)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*'{}[](),:"\\ \n1a.-', "true", "é", None]), max_size=30))
def test_arguments_are_always_json(pieces: list[str | None]) -> None:
    arguments = Arguments()
    text = "".join(arguments.delimiter() if p is None else arguments.text(p) for p in pieces)
    assert isinstance(json.loads(text + arguments.finish()), dict)
    assert arguments.ended and arguments.text("x") == ""


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.from_regex(r"[\w$@.-]+", fullmatch=True), inner)
    ),
    max_leaves=8,
)


def native(value: Any) -> str:
    """Return a value in the syntax of Gemma 4's template."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{native(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(native, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.from_regex(r"[\w$@.-]+", fullmatch=True), JSON, max_size=4))
def test_parsing_inverts_the_template(tokenizer: Tokenizer, value: dict[str, Any]) -> None:
    events = parse(tokenizer, f"<|tool_call>call:f{native(value)}<tool_call|>")
    assert events[0] == CallEvent(0, "f") and isinstance(events[1], ArgumentEvent)
    assert json.loads(events[1].json) == value
