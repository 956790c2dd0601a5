"""Parse Gemma 4's output token by token: reasoning, text and native tool calls.

    <|channel>thought
    ...<channel|>text<|tool_call>call:NAME{key:<|"|>text<|"|>,n:42}<tool_call|>

Marks are control tokens; text that merely looks like a mark is text. Events depend only on the
tokens, not on how they are batched. Deviations that models produce are accepted: empty or stray
channel marks, a second `<|channel>` before the real one, calls without `call`, with `(` instead of
`{`, without their end, or inside reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from enum import Enum, auto

from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server.tool_arguments import Arguments

_HEAD = re.compile(r"\s*(?:call\s*:|:)?\s*([^\s:]*)\s*")

MAX_CALL_HEAD = 256
"""Maximum characters between `<|tool_call>` and the arguments; a longer head is text."""


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ThoughtEvent:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEvent:
    """The beginning of a tool call; `index` counts from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentEvent:
    """A piece of a tool call's arguments, as JSON text."""

    index: int
    json: str


Event = TextEvent | ThoughtEvent | CallEvent | ArgumentEvent


@dataclass(frozen=True, slots=True)
class Marks:
    """Token ids of Gemma 4's structural marks."""

    turn: int
    turn_end: int
    channel: int
    channel_end: int
    call: int
    call_end: int
    response: int
    delimiter: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Marks | None:
        """Return the marks of a vocabulary, or None if one is missing."""
        names = (
            "<|turn>",
            "<turn|>",
            "<|channel>",
            "<channel|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            '<|"|>',
        )
        ids = [tokenizer.encode(name, bos=False) for name in names]
        return cls(*(i[0] for i in ids)) if all(len(i) == 1 for i in ids) else None

    def thinking(self, prompt: Sequence[int]) -> bool:
        """Return True if a prompt ends inside reasoning, which the model continues."""
        for token in reversed(prompt):
            if token in (self.channel_end, self.turn, self.turn_end):
                return False
            if token == self.channel:
                return True
        return False


class _State(Enum):
    """Parser states: what the next token belongs to."""

    TEXT = auto()
    HEADER = auto()
    THOUGHT = auto()
    CALL_HEAD = auto()
    ARGUMENTS = auto()
    CALL_TAIL = auto()


_PART_NAMES = {_State.TEXT: "text", _State.THOUGHT: "thought", _State.HEADER: "mark"}


class Parser:
    """An incremental parser of the tokens of one text.

    Args:
        calls: parse tool calls; otherwise they are text, including their marks.
        thinking: the prompt ends inside reasoning.
    """

    def __init__(
        self, tokenizer: Tokenizer, marks: Marks, *, calls: bool = True, thinking: bool = False
    ) -> None:
        self._marks, self._calls = marks, calls
        self._special = tokenizer.control_ids | set(astuple(marks))
        self._bytes = tokenizer.stream(special=True)
        self._state = _State.THOUGHT if thinking else _State.TEXT
        self._state_before_header = (
            _State.TEXT
        )  # state to return to if a channel header turns out to be text
        self._held = ""  # pending header, call head, or trailing white space of reasoning
        self._thought_begun = False  # reasoning text has been emitted
        self._n_calls = 0
        self._arguments: Arguments | None = None
        self._events: list[Event] = []

    @property
    def answering(self) -> bool:
        """Return True if the next token belongs to the answer's text."""
        return self._state is _State.TEXT

    @property
    def thinking(self) -> bool:
        """Return True if the next token belongs to reasoning."""
        return self._state in (_State.THOUGHT, _State.HEADER)

    @property
    def part(self) -> str:
        """Return what the next token belongs to: "text", "thought", "call" or "mark"."""
        return _PART_NAMES.get(self._state, "call")

    @property
    def calling(self) -> bool:
        """Return True while a call is open."""
        return self._state in (_State.CALL_HEAD, _State.ARGUMENTS)

    def push(self, ids: Iterable[int]) -> list[Event]:
        """Add tokens; return the completed events, adjacent ones of one type merged."""
        for token in ids:
            self._add_token(token)
        return self._flush()

    def finish(self, *, whole: bool = True) -> list[Event]:
        """End the text; return the last events.

        Args:
            whole: True if the model ended the text: an open call is closed. An open call of a
                truncated text stays incomplete, so that clients do not run it.
        """
        self._add_text(self._bytes.finish())
        if self._state is _State.HEADER:
            self._header_ends()
        elif self._state is _State.CALL_HEAD:
            self._head_ends(whole)
        elif self._state is _State.ARGUMENTS and whole:
            self._close_call()
        return self._flush()

    # ---- tokens

    def _add_token(self, token: int) -> None:
        m = self._marks
        shown = token == m.delimiter or (token in (m.call, m.call_end) and not self._calls)
        if token not in self._special:
            self._add_text(self._bytes.push([token]))
            return
        self._add_text(self._bytes.finish())
        if token == m.channel:
            self._open_channel()
        elif token == m.channel_end:
            self._close_channel()
        elif shown:
            self._visible_mark(token)
        elif token == m.call:
            self._open_call()
        elif token == m.call_end:
            self._end_call()

    def _visible_mark(self, token: int) -> None:
        if token == self._marks.delimiter and self._state is _State.ARGUMENTS:
            assert self._arguments is not None
            self._argument(self._arguments.delimiter())
        elif token == self._marks.delimiter:
            self._add_text('"')
        else:
            self._add_text(self._bytes.push([token]) + self._bytes.finish())

    def _open_channel(self) -> None:
        self._end_call()
        if self._state is _State.HEADER:  # a second `<|channel>` before the real one
            self._header_ends()
        self._state_before_header = self._state
        self._state, self._held = _State.HEADER, ""

    def _close_channel(self) -> None:
        if self._state in (_State.HEADER, _State.THOUGHT):
            self._state, self._held = _State.TEXT, ""

    def _open_call(self) -> None:
        self._end_call()
        if self._state is _State.HEADER:
            self._header_ends()
        self._state, self._held = _State.CALL_HEAD, ""

    def _end_call(self) -> None:
        """Close an open call at its end, or when another mark follows."""
        if self._state is _State.CALL_HEAD:
            self._head_ends(True)
        elif self._state is _State.ARGUMENTS:
            self._close_call()
        self._leave_call()

    def _leave_call(self) -> None:
        if self._state in (_State.CALL_HEAD, _State.ARGUMENTS, _State.CALL_TAIL):
            self._state, self._held = _State.TEXT, ""

    # ---- characters

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._state is _State.TEXT:
            self._events.append(TextEvent(text))
        elif self._state is _State.THOUGHT:
            self._add_thought(text)
        elif self._state is _State.HEADER:
            self._add_to_header(text)
        elif self._state is _State.CALL_HEAD:
            self._add_to_call_head(text)
        elif self._state is _State.ARGUMENTS:
            assert self._arguments is not None
            self._argument(self._arguments.text(text))

    def _add_thought(self, text: str) -> None:
        """Add reasoning text, stripped of leading and trailing white space."""
        text = self._held + text
        if not self._thought_begun:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :] if kept or self._thought_begun else ""
        if kept:
            self._thought_begun = True
            self._events.append(ThoughtEvent(kept))

    def _add_to_header(self, text: str) -> None:
        self._held += text
        if self._held.startswith("thought") and len(self._held) > len("thought"):
            self._begin_thought()
        elif not "thought".startswith(self._held):
            self._header_ends()

    def _begin_thought(self) -> None:
        rest = self._held.removeprefix("thought")
        again = self._thought_begun
        self._state, self._held = _State.THOUGHT, "\n" if again else ""
        self._add_thought(rest.lstrip() if again else rest)

    def _header_ends(self) -> None:
        """Leave a header that is not `thought`; treat its text as if the mark were absent."""
        held, self._held = self._held, ""
        self._state = self._state_before_header
        if held and held != "thought":
            self._add_text(held)

    def _add_to_call_head(self, text: str) -> None:
        self._held += text
        at = min((i for i in map(self._held.find, "{(") if i >= 0), default=-1)
        if at < 0:
            if len(self._held) > MAX_CALL_HEAD:
                self._reject_call()
            return
        opener, rest = self._held[at], self._held[at + 1 :]
        name = _name(self._held[:at])
        if not name:
            self._reject_call()
            return
        self._begin_call(name, ")" if opener == "(" else "}")
        self._add_text(rest)

    def _head_ends(self, whole: bool) -> None:
        """End a call without arguments; emit it with empty arguments if the model ended it."""
        name = _name(self._held)
        if name and whole:
            self._begin_call(name, "}")
            self._close_call()
        self._leave_call()

    def _reject_call(self) -> None:
        held = self._held
        self._leave_call()
        self._add_text(held)

    def _begin_call(self, name: str, closer: str) -> None:
        self._events.append(CallEvent(self._n_calls, name))
        self._n_calls += 1
        self._arguments = Arguments(closer)
        self._state, self._held = _State.ARGUMENTS, ""
        self._argument(self._arguments.text(""))

    def _close_call(self) -> None:
        assert self._arguments is not None
        self._argument(self._arguments.finish())

    def _argument(self, json: str) -> None:
        assert self._arguments is not None
        if json:
            self._events.append(ArgumentEvent(self._n_calls - 1, json))
        if self._arguments.ended:
            self._state = _State.CALL_TAIL

    def _flush(self) -> list[Event]:
        events, self._events = merge_events(self._events), []
        return events


class AnswerStream:
    """A `g4spec.runtime.request.TextStream` of the answer without reasoning and calls."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    @classmethod
    def of(cls, tokenizer: Tokenizer, marks: Marks, calls: bool, thinking: bool) -> AnswerStream:
        """Create the stream with its own parser; arguments as for `Parser`."""
        return cls(Parser(tokenizer, marks, calls=calls, thinking=thinking))

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; return the completed part of the answer."""
        return answer_text(self._parser.push(ids))

    def finish(self) -> str:
        """Return the rest of the answer."""
        return answer_text(self._parser.finish())


def answer_text(events: Iterable[Event]) -> str:
    """Return the text of the answer, without reasoning and calls."""
    return "".join(event.text for event in events if isinstance(event, TextEvent))


def merge_events(events: Iterable[Event]) -> list[Event]:
    """Merge adjacent events of one type."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextEvent) and isinstance(last, TextEvent):
            out[-1] = TextEvent(last.text + event.text)
        elif isinstance(event, ThoughtEvent) and isinstance(last, ThoughtEvent):
            out[-1] = ThoughtEvent(last.text + event.text)
        elif isinstance(event, ArgumentEvent) and isinstance(last, ArgumentEvent):
            assert event.index == last.index
            out[-1] = ArgumentEvent(event.index, last.json + event.json)
        else:
            out.append(event)
    return out


def _name(head: str) -> str:
    """Return NAME of `call:NAME`, `:NAME` or `NAME`, or "" if there is none."""
    found = _HEAD.fullmatch(head)
    return found[1] if found else ""
