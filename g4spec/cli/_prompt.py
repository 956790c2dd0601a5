"""Reads and tokenizes a prompt: text, a file, token ids, or a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4spec.cli import _inputs, _json_messages
from g4spec.cli._option_checks import refuse
from g4spec.errors import InputError, UsageError

if TYPE_CHECKING:
    from g4spec.runtime.tokenizer import Tokenizer


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
        if not self.uses_template:
            needing = {"system": self.system, "thinking": self.thinking, "tools": self.tools}
            refuse("needs a chat template", "add --chat, or give --messages", **needing)
        if self.tokens_file is not None and (self.uses_template or self.special is not None):
            name = "--chat" if self.uses_template else "--parse-special"
            raise UsageError(f"{name} has no effect on token ids", fix="leave it out")

    @property
    def uses_template(self) -> bool:
        """True if the prompt is formatted with the chat template."""
        return self.chat or self.messages is not None

    def read(self) -> Prompt:
        """Read the prompt; needs no model.

        Raises UsageError if both `system` and the conversation have a system message.
        """
        tools = _json_messages.read_tools(self.tools) if self.tools is not None else None
        if self.tokens_file is not None:
            ids = _inputs.parse_ids(_inputs.read_text(self.tokens_file), str(self.tokens_file))
            return Prompt(self, ids=ids)
        if self.messages is not None:
            messages = _json_messages.read_messages(self.messages)
            own = {message["role"] for message in messages} & {"system", "developer"}
            if self.system and own:
                raise UsageError(
                    f"--system: {self.messages} has a message of the role {min(own)}",
                    fix="leave out --system, or remove that message",
                )
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
            return self._chat(tokenizer, self.tools, n_ctx)
        return tokenizer.encode(self.text, n_ctx=n_ctx, special=self.options.special is not False)

    def _chat(
        self, tokenizer: Tokenizer, tools: list[dict[str, Any]] | None, n_ctx: int | None = None
    ) -> list[int]:
        assert self.messages is not None
        return tokenizer.chat(
            self.messages,
            system=self.options.system,
            tools=tools,
            thinking=self.options.thinking,
            n_ctx=n_ctx,
            special=bool(self.options.special),
        )

    def chat_note(self, tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
        """Return a note if this is plain text for a chat model, or if the chat template ignores
        the tools, else None.

        Args:
            ids: tokens of the prompt. Control tokens among them mean that it is formatted already.
        """
        if self.messages is not None and self.tools and self._chat(tokenizer, None) == list(ids):
            return "--tools has no effect: this model's chat template does not know it"
        plain = self.ids is None and self.messages is None
        if not plain or not tokenizer.template or tokenizer.control_ids & set(ids[1:]):
            return None
        return (
            "this is a chat model, and it continues the prompt as plain text; "
            "to ask it a question, add --chat"
        )
