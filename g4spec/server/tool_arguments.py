"""Convert the arguments of Gemma 4's native tool calls to JSON, incrementally.

    {city:<|"|>Paris<|"|>,days:3}    ->    {"city":"Paris","days":3}

Keys are unquoted, strings are enclosed in delimiter tokens and have no escapes; all else is JSON.
Malformed input (quoted keys, JSON strings, bare words, missing values, unbalanced brackets) is
repaired: the output is always valid JSON after `finish`.
"""

from __future__ import annotations

import json
import math
import re
from enum import Enum, auto

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NEARLY = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WORDS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}


class _State(Enum):
    """Parser states: what the next character belongs to."""

    KEY = auto()
    KEY_TEXT = auto()
    KEY_QUOTED = auto()
    COLON = auto()
    VALUE = auto()
    BARE = auto()
    TEXT = auto()
    QUOTED = auto()
    NEXT = auto()
    END = auto()


class Arguments:
    """A converter for the arguments of one call; input begins after the opening bracket.

    Args:
        closer: the bracket that ends the arguments, `}` or `)`.
    """

    def __init__(self, closer: str = "}") -> None:
        self._closer = closer
        self._open = ["{"]
        self._first = [True]
        self._state = _State.KEY
        self._held = ""
        self._out = ["{"]

    @property
    def ended(self) -> bool:
        """Return True once the last bracket is closed; later input does not belong to the call."""
        return self._state is _State.END

    def text(self, piece: str) -> str:
        """Add characters; return the JSON completed by them."""
        at = 0
        while at < len(piece) and not self.ended:
            if self._state is _State.TEXT:
                self._out.append(_escaped(piece[at:]))
                break
            self._character(piece[at])
            at += 1
        return self._flush()

    def delimiter(self) -> str:
        """Add a delimiter token; return the JSON completed by it."""
        self._delimiter()
        return self._flush()

    def _delimiter(self) -> None:
        if self._state is _State.KEY and not self._held.strip():
            self._state, self._held = _State.KEY_TEXT, ""
        elif self._state is _State.KEY_TEXT:
            self._state = _State.COLON
        elif self._state is _State.VALUE:
            self._begin_value()
            self._out.append('"')
            self._state = _State.TEXT
        elif self._state is _State.TEXT:
            self._out.append('"')
            self._state = _State.NEXT

    def finish(self) -> str:
        """Close open strings and brackets; return the rest of the JSON."""
        if not self.ended:
            if self._state is _State.TEXT:
                self._delimiter()
            elif self._state is _State.QUOTED:
                self._quoted_ends()
            self._end_member()
            while self._open:
                self._pop()
        return self._flush()

    # ---- characters

    def _character(self, c: str) -> None:
        at = self._state
        if at in (_State.QUOTED, _State.KEY_QUOTED):
            self._in_quotes(c)
        elif at is _State.KEY_TEXT:
            self._held += c
        elif c in "}])" and self._closes(c):
            self._close(c)
        elif at is _State.KEY:
            self._in_key(c)
        elif at is _State.COLON:
            if c == ":":
                self._begin_member()
        elif at is _State.VALUE:
            self._in_value(c)
        elif at is _State.BARE and c != ",":
            self._held += c
        elif c == ",":
            self._end_member()
            self._state = _State.KEY if self._open[-1] == "{" else _State.VALUE

    def _in_key(self, c: str) -> None:
        if c == ":":
            self._held = self._held.strip()
            self._begin_member()
        elif c == '"' and not self._held.strip():
            self._state, self._held = _State.KEY_QUOTED, ""
        elif c == "," and not self._held.strip():
            self._held = ""
        else:
            self._held += c

    def _in_value(self, c: str) -> None:
        if c.isspace():
            return
        if c == ",":
            self._end_member()
            self._state = _State.KEY if self._open[-1] == "{" else _State.VALUE
            return
        self._begin_value()
        if c in "{[":
            self._out.append(c)
            self._open.append(c)
            self._first.append(True)
            self._state = _State.KEY if c == "{" else _State.VALUE
        elif c == '"':
            self._state = _State.QUOTED
        else:
            self._state, self._held = _State.BARE, c

    def _in_quotes(self, c: str) -> None:
        escaped = (len(self._held) - len(self._held.rstrip("\\"))) % 2
        if c != '"' or escaped:
            self._held += c
        elif self._state is _State.QUOTED:
            self._quoted_ends()
        else:
            self._held = _unquoted(self._held)
            self._state = _State.COLON

    def _quoted_ends(self) -> None:
        self._out.append(json.dumps(_unquoted(self._held), ensure_ascii=False))
        self._state, self._held = _State.NEXT, ""

    # ---- structure

    def _begin_member(self) -> None:
        """Begin an object member whose key and colon have been read."""
        if not self._first[-1]:
            self._out.append(",")
        self._first[-1] = False
        self._out.append(json.dumps(self._held, ensure_ascii=False) + ":")
        self._state, self._held = _State.VALUE, ""

    def _begin_value(self) -> None:
        if self._open[-1] == "[":
            if not self._first[-1]:
                self._out.append(",")
            self._first[-1] = False

    def _end_member(self) -> None:
        """Emit the pending value at the comma or bracket that ends it."""
        if self._state is _State.BARE:
            self._out.append(_scalar(self._held.strip()))
        elif self._state is _State.VALUE and self._open[-1] == "{":
            self._out.append("null")
        self._held = ""

    def _closes(self, c: str) -> bool:
        """Return True if a bracket closes an open one; otherwise it is part of a bare word."""
        if c == ")":
            return self._closer == ")" and len(self._open) == 1
        return {"}": "{", "]": "["}[c] in self._open

    def _close(self, c: str) -> None:
        self._end_member()
        opener = "[" if c == "]" else "{"
        while self._open[-1] != opener:
            self._pop()
        self._pop()

    def _pop(self) -> None:
        self._out.append("}" if self._open.pop() == "{" else "]")
        self._first.pop()
        self._state = _State.NEXT if self._open else _State.END

    def _flush(self) -> str:
        out, self._out = "".join(self._out), []
        return out


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unquoted(raw: str) -> str:
    try:
        return str(json.loads(f'"{raw}"', strict=False))
    except ValueError:
        return raw


def _scalar(word: str) -> str:
    """Convert a bare value to JSON: a number, a constant, or else a string."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    if len(word) < 1000 and _NEARLY.fullmatch(word) and math.isfinite(float(word)):
        return json.dumps(float(word) if set(word) & set(".eE") else int(word))
    return json.dumps(word, ensure_ascii=False)
