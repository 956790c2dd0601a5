"""Keeps control tokens in user text from becoming control tokens of a chat.

Before the chat template sees messages and tools, a guard character that no text contains is
inserted into each of their marks (such as `<|turn>`). When the rendered text is tokenized, the
guard is removed and a mark that contained it is tokenized as plain text, while marks of the
template become control tokens (`Tokenizer.encode`, `guard`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from g4spec.errors import InputError

NONCHARACTERS = range(0xFDD0, 0xFDF0)
"""Code points that are never characters, so no text contains them."""

LONG = 10_000
"""Characters from which a text is encoded without Python's lock; fewer take milliseconds."""

TRUSTED = ("system", "developer")
"""Roles of the operator: marks in their messages are control tokens."""

Object = Mapping[str, Any]


def guard_messages(
    messages: Sequence[Object], tools: Sequence[Object], marks: Iterable[str], template: str
) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """Insert a guard character into every mark in tools and in messages of roles other than
    TRUSTED: in contents, thoughts, names, arguments and their keys.

    Returns:
        The guard character ("" if there are no such marks), and the guarded messages and tools.

    Raises:
        InputError: there are marks, and the text contains all of NONCHARACTERS.
    """
    texts = sorted((m for m in marks if len(m) > 1), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
    whole = template + json.dumps([messages, tools], ensure_ascii=False)
    guard = next((chr(c) for c in NONCHARACTERS if chr(c) not in whole), None)
    found = False

    def break_mark(mark: re.Match[str]) -> str:
        nonlocal found
        found = True
        if guard is None:
            raise InputError("the messages hold every noncharacter of Unicode", fix="remove them")
        return mark[0][:1] + guard + mark[0][1:]

    def guard_strings(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(break_mark, value)
        if isinstance(value, Mapping):
            return {guard_strings(key): guard_strings(each) for key, each in value.items()}
        return [guard_strings(each) for each in value] if isinstance(value, list | tuple) else value

    guarded = [dict(m) if m.get("role") in TRUSTED else guard_strings(m) for m in messages]
    guarded_tools = [guard_strings(tool) for tool in tools]
    return guard if found and guard else "", guarded, guarded_tools


def encode_guarded(
    encoder: tokenizers.Tokenizer,
    plain_encoder: tokenizers.Tokenizer,
    text: str,
    read: Iterable[str],
    guard: str,
) -> list[int]:
    """Tokenize a text in which only the special tokens in `read` count, and none that contains
    `guard`; all others are tokenized as plain text.

    Args:
        encoder: tokenizer with the special tokens.
        plain_encoder: the same without them. Two, because the server tokenizes several texts at
            once, in threads: `encode_special_tokens` of one would be in force for all of them.
    """
    texts = sorted(read, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, texts))})", text) if texts else [text]
    ids: list[int] = []
    for at, piece in enumerate(pieces):
        plain = piece.replace(guard, "") if guard else piece
        chosen = encoder if at % 2 else plain_encoder
        ids += encode(chosen, plain)
    return ids


def encode(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
    """Tokenize a text; a long one without Python's lock, so that other threads continue."""
    if len(text) < LONG:
        return list(encoder.encode(text, add_special_tokens=False).ids)
    return list(encoder.encode_batch([text], add_special_tokens=False)[0].ids)
