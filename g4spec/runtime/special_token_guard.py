"""Keeps control tokens that users write from becoming control tokens in a chat.

A character that no text holds is put into every mark (`<|turn>`) of messages and tools before the
chat template sees them. It is left out again when the rendered text is tokenized, piece by piece,
so that such a mark is spelled while those of the template are not (`Tokenizer.encode`, `guard`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from g4spec.errors import InputError

NONCHARACTERS = range(0xFDD0, 0xFDF0)
"""Code points that never stand for a character: no text has them."""

TRUSTED = ("system", "developer")
"""Roles of whoever runs the model: marks in their messages are control tokens."""

Object = Mapping[str, Any]


def guarded(
    messages: Sequence[Object], tools: Sequence[Object], marks: Iterable[str], template: str
) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """Put a character into every mark of the messages, but those of TRUSTED, and of the tools:
    into contents, thoughts, names, arguments and their keys.

    Returns:
        The character, "" where there are no such marks; messages and tools with it.

    Raises InputError for marks beside all of NONCHARACTERS.
    """
    texts = sorted((m for m in marks if len(m) > 1), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
    whole = template + json.dumps([messages, tools], ensure_ascii=False)
    guard = next((chr(c) for c in NONCHARACTERS if chr(c) not in whole), None)
    found = False

    def broken(mark: re.Match[str]) -> str:
        nonlocal found
        found = True
        if guard is None:
            raise InputError("the messages hold every noncharacter of Unicode", fix="remove them")
        return mark[0][:1] + guard + mark[0][1:]

    def walked(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(broken, value)
        if isinstance(value, Mapping):
            return {walked(key): walked(each) for key, each in value.items()}
        return [walked(each) for each in value] if isinstance(value, list | tuple) else value

    said = [dict(m) if m.get("role") in TRUSTED else walked(m) for m in messages]
    offered = [walked(tool) for tool in tools]
    return guard if found and guard else "", said, offered


def spelled(encoder: tokenizers.Tokenizer, text: str, read: Iterable[str], guard: str) -> list[int]:
    """Tokens of a text of whose special tokens only those in `read` count as such, and none that
    `guard` stands in; all others are spelled like any text."""
    texts = sorted(read, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, texts))})", text) if texts else [text]
    ids: list[int] = []
    try:
        for at, piece in enumerate(pieces):
            encoder.encode_special_tokens = at % 2 == 0  # True: as ordinary text
            plain = piece.replace(guard, "") if guard else piece
            ids += encoder.encode(plain, add_special_tokens=False).ids
    finally:
        encoder.encode_special_tokens = False
    return ids
