"""Reads and tokenizes a prompt: text, a file, token ids, or a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4spec.cli import _inputs
from g4spec.errors import InputError, UsageError

if TYPE_CHECKING:
    from g4spec.runtime.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages, as in `POST /v1/chat/completions`."""


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The options of a command line that describe the prompt.

    Attributes:
        special: parse text such as <|turn> as control tokens; None: in raw prompts only.
    """

    text: str | None = None
    file: Path | None = None
    tokens_file: Path | None = None
    messages: Path | None = None
    chat: bool = False
    system: str | None = None
    tools: Path | None = None
    thinking: bool = False
    special: bool | None = None

    def __post_init__(self) -> None:
        sources = (self.text, self.file, self.tokens_file, self.messages)
        if sum(given is not None for given in sources) != 1:
            raise UsageError("expected exactly one of -p, --file, --tokens-file and --messages")
        for name, given in (
            ("--system", self.system is not None),
            ("--thinking", self.thinking),
            ("--tools", self.tools is not None),
        ):
            if given and not self.uses_template:
                raise UsageError(
                    f"{name} needs a chat template", fix="add --chat, or give --messages"
                )
        if self.tokens_file is not None and (self.uses_template or self.special is not None):
            name = "--chat" if self.uses_template else "--parse-special"
            raise UsageError(f"{name} has no effect on token ids", fix="leave it out")

    @property
    def uses_template(self) -> bool:
        """True if the prompt is formatted with the chat template."""
        return self.chat or self.messages is not None

    def read(self) -> Prompt:
        """Read the prompt; needs no model."""
        tools = _objects(self.tools, "type") if self.tools is not None else None
        if self.tokens_file is not None:
            ids = _inputs.parse_ids(_inputs.read_text(self.tokens_file), str(self.tokens_file))
            return Prompt(self, ids=ids)
        if self.messages is not None:
            messages = _objects(self.messages, "role")
            _check_roles(self.messages, messages)
            return Prompt(self, messages=messages, tools=tools)
        text = _inputs.read_text(self.file) if self.file is not None else self.text or ""
        if not text:
            raise InputError(
                "the prompt is empty",
                fix="give a text, or the id of BOS with --tokens-file to start from nothing",
            )
        if self.chat:
            return Prompt(self, messages=[{"role": "user", "content": text}], tools=tools)
        return Prompt(self, text=text)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The content of a prompt: text, token ids, or messages."""

    options: PromptOptions
    text: str = ""
    ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    def encode(self, tokenizer: Tokenizer, n_ctx: int) -> list[int]:
        """Return the token ids of the prompt."""
        if self.ids is not None:
            return self.ids
        if self.messages is not None:
            return tokenizer.chat(
                self.messages,
                system=self.options.system,
                tools=self.tools,
                thinking=self.options.thinking,
                n_ctx=n_ctx,
                special=bool(self.options.special),
            )
        return tokenizer.encode(self.text, n_ctx=n_ctx, special=self.options.special is not False)

    def chat_note(self, tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
        """Return a note if this is plain text for a chat model, else None.

        Args:
            ids: tokens of the prompt. Control tokens among them mean that it is formatted already.
        """
        plain = self.ids is None and self.messages is None
        if not plain or not tokenizer.template or tokenizer.control_ids & set(ids[1:]):
            return None
        return (
            "this is a chat model, and it continues the prompt as plain text; "
            "to ask it a question, add --chat"
        )


def _check_roles(path: Path, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError for a role that `serve` refuses too: a template may drop its message."""
    for message in messages:
        if message["role"] not in ROLES:
            raise InputError(
                f"{path}: role", expected=f"one of {', '.join(ROLES)}", found=message["role"]
            )


def _objects(path: Path, key: str) -> list[dict[str, Any]]:
    """Read a JSON list of objects that all have the text field `key`."""
    try:
        found = json.loads(_inputs.read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {str(error)[:80]}") from None
    if (
        not isinstance(found, list)
        or not found
        or not all(isinstance(x, dict) and isinstance(x.get(key), str) for x in found)
    ):
        raise InputError(
            f"{path}: not a list of JSON objects",
            expected=f'objects with a text field "{key}"',
            found=f"{found!r:.80}",
        )
    return found
