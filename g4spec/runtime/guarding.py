"""Keeps control tokens that users write from becoming control tokens in a chat.

A character that no text holds is put into every mark (`<|turn>`) of what users say before the chat
template sees it. It is left out again when the rendered text is tokenized, piece by piece, so that
such a mark is spelled while those of the template are not (`Tokenizer.encode`, `guard`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from g4spec.errors import InputError

NONCHARACTERS = range(0xFDD0, 0xFDF0)
"""Code points that never stand for a character: no text has them."""
ROLES = ("user", "tool")
"""Whose words come from elsewhere than the model and who runs it."""

Message = Mapping[str, Any]


def guarded(
    messages: Sequence[Message], marks: Iterable[str], template: str
) -> tuple[str, Sequence[Message]]:
    """The character, and the messages with it inside every mark of what users say and tools return;
    "" where there are no such marks.

    Raises InputError for messages that hold all of NONCHARACTERS.
    """
    texts = sorted((m for m in marks if len(m) > 1), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
    if not any(m.get("role") in ROLES and pattern.search(_text(m)) for m in messages):
        return "", messages
    whole = template + "".join(_text(m) for m in messages)
    guard = next((chr(c) for c in NONCHARACTERS if chr(c) not in whole), None)
    if guard is None:
        raise InputError("the messages hold every noncharacter of Unicode", fix="remove them")

    def broken(found: re.Match[str]) -> str:
        return found[0][:1] + guard + found[0][1:]

    return guard, [
        {**m, "content": pattern.sub(broken, text)}
        if m.get("role") in ROLES and (text := _text(m)) else m for m in messages
    ]  # fmt: skip


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


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
