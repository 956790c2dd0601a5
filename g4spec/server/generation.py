"""Convert the engine's cycles to deltas of an answer: parsed events, stop strings, logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from g4spec.core import Cycle, Logprobs
from g4spec.runtime.request import Stats, stop_prefix_length
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server.output_parser import CallEvent, Event, TextEvent, merge_events


class Reader(Protocol):
    """Interface of output parsers: `g4spec.server.output_parser.Parser` or `PlainReader`."""

    @property
    def answering(self) -> bool: ...

    @property
    def thinking(self) -> bool: ...

    @property
    def part(self) -> str: ...

    def push(self, ids: Iterable[int]) -> list[Event]: ...

    def finish(self, *, whole: bool = True) -> list[Event]: ...


class PlainReader:
    """A parser of unstructured text."""

    answering, thinking, part = True, False, "text"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = tokenizer.stream()

    def push(self, ids: Iterable[int]) -> list[Event]:
        """Decode tokens; return the completed text."""
        text = self._stream.push(ids)
        return [TextEvent(text)] if text else []

    def finish(self, *, whole: bool = True) -> list[Event]:
        """Return the rest of the text."""
        text = self._stream.finish()
        return [TextEvent(text)] if text else []


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its log-probability and the most likely alternatives (id, log-probability)."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Delta:
    """The increment of an answer since the previous delta.

    Attributes:
        events: parsed events, in order.
        tokens: tokens of the answer's text, if log-probabilities are requested.
        finish: finish reason, "stop", "length" or "tool_calls"; only in the last delta.
        stop: the stop string that ended the answer.
        ids: all tokens generated since the previous delta, including marks.
        progress: prompt tokens read so far, if requested (`Options.progress`).
        prompt_logprobs: those of the next prompt tokens, if requested.
    """

    events: list[Event] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None
    ids: list[int] = field(default_factory=list)
    progress: int | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.events or self.tokens or self.finish)


class Assembler:
    """Assembles one answer. Text that may be the beginning of a stop string is held back.

    Args:
        reader: parser of the tokens.
        stops: texts that end the answer.
        special: ids of control tokens.

    Attributes:
        thoughts: number of reasoning tokens.
        parts: what each token of the newest cycle belongs to: "text", "thought", "call" or "mark".
    """

    def __init__(
        self, reader: Reader, stops: Sequence[str] = (), special: frozenset[int] = frozenset()
    ) -> None:
        self._reader, self._stops, self._special = reader, tuple(stops), special
        self._held: list[tuple[Event, Token | None]] = []
        self._has_calls = False
        self._stop: str | None = None
        self.thoughts = 0
        self.parts: list[str] = []

    def cycle(self, cycle: Cycle) -> Delta:
        """Add a cycle of the engine; return its delta."""
        self.parts = []
        for i, token in enumerate(cycle.tokens):
            self.parts.append("mark" if token in self._special else self._reader.part)
            self.thoughts += self._reader.thinking
            events = self._reader.push([token])
            text_token = None
            if cycle.logprobs:
                text_token = Token(token, *cycle.logprobs[i])
            if not events and self._reader.answering and token not in self._special:
                events = [TextEvent("")]  # an incomplete UTF-8 character
            for event in events:
                is_text = isinstance(event, TextEvent)
                self._held.append((event, text_token if is_text else None))
                text_token = None if is_text else text_token
        return self._release(self._safe_length())

    def finish(self, stats: Stats) -> Delta:
        """Return the last delta of a text that ended normally."""
        reason = stats.stop_reason
        if self._stop is None:
            ended = reason.startswith("stop")
            self._held += [(event, None) for event in self._reader.finish(whole=ended)]
        delta = self._release(self._held_length())
        delta.finish = "length" if reason in ("length", "context") else "stop"
        if delta.finish == "stop" and self._has_calls and self._stop is None:
            delta.finish = "tool_calls"
        delta.stop = self._stop
        return delta

    def _held_length(self) -> int:
        return sum(len(e.text) for e, _ in self._held if isinstance(e, TextEvent))

    def _safe_length(self) -> int:
        """Return the number of held characters that can be released; look for stop strings."""
        if not self._stops:
            return self._held_length()
        text = "".join(e.text for e, _ in self._held if isinstance(e, TextEvent))
        found = [(at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            cut, self._stop = min(found)
            return cut
        return len(text) - stop_prefix_length(text, self._stops)

    def _take(self, length: int) -> list[tuple[Event, Token | None]]:
        """Remove and return the first `length` held characters, with the events before the next."""
        taken, left = [], length
        while self._held:
            event, token = self._held[0]
            size = len(event.text) if isinstance(event, TextEvent) else 0
            if size > left:
                break
            taken.append(self._held.pop(0))
            left -= size
        if left and self._held:
            event, token = self._held[0]
            assert isinstance(event, TextEvent)
            taken.append((TextEvent(event.text[:left]), token))
            self._held[0] = (TextEvent(event.text[left:]), None)
        return taken

    def _release(self, length: int) -> Delta:
        taken = self._take(length)
        if self._stop is not None:
            self._held.clear()
        events = [
            event for event, _ in taken if not (isinstance(event, TextEvent) and not event.text)
        ]
        self._has_calls |= any(isinstance(event, CallEvent) for event in events)
        return Delta(merge_events(events), [token for _, token in taken if token is not None])
