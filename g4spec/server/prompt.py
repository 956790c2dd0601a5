"""Turn messages in the form of OpenAI's API into the tokens of a prompt."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from g4spec.errors import InputError
from g4spec.runtime import special_token_guard
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server.gemma import Marks
from g4spec.server.refusals import Refused
from g4spec.server.templates import Abilities, Renderer, abilities

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation up to where the model goes on.

    Attributes:
        thinking: "no", "may" begin with a thought, or "open": it ends inside of one.
    """

    text: str
    ids: list[int]
    thinking: str = "no"


class Prompter:
    """Makes prompts of one model.

    Attributes:
        marks: of Gemma 4's format, or None if the vocabulary lacks them: then there are no tools
            and no thinking.
    """

    def __init__(self, tokenizer: Tokenizer, n_ctx: int) -> None:
        self._tokenizer, self._n_ctx = tokenizer, n_ctx
        self.marks = Marks.of(tokenizer)
        self._marks = tokenizer.marks
        self._renderer: Renderer | None = None
        self._abilities: Abilities | None = None
        if tokenizer.template:
            bos, eos = (
                tokenizer.piece(i, special=True).decode(errors="replace")
                for i in (tokenizer.bos, min(tokenizer.stop_ids))
            )
            self._renderer = Renderer(tokenizer.template, bos=bos, eos=eos)

    async def close(self) -> None:
        """End the process of the template."""
        if self._renderer is not None:
            await self._renderer.close()

    async def abilities(self) -> Abilities:
        """Return what the template can do, found out once."""
        if self._abilities is None:
            self._abilities = await abilities(self._template())
        return self._abilities

    def _template(self) -> Renderer:
        if self._renderer is None:
            raise Refused(400, "the model has no chat template: use /v1/completions")
        return self._renderer

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        thinking: bool = False,
        continued: bool = False,
        opened: bool = True,
    ) -> Prompt:
        """Render and tokenize a conversation. Control tokens are the template's and the system
        message's alone: those that other messages and tools spell are text (`special_token_guard`).

        Args:
            tools: as in OpenAI's API. thinking: let the model think first.
            continued: the last message is the beginning of the answer. opened: end with the
                beginning of a turn of the model; that of a `continued` one is always there.

        Raises:
            Refused: the template has no place for what is asked.
            InputError: the template refuses the messages.
        """
        renderer = self._template()
        guard, plain, offered = special_token_guard.guard_messages(
            [_plain(m, i) for i, m in enumerate(messages)], tools, self._marks, renderer.template
        )
        begun = _begun(plain) if continued else ""
        aside: dict[str, str] = {}
        calls = any(m.get("tool_calls") or m["role"] == "tool" for m in plain)
        if thinking or tools or calls:
            able = await self.abilities()
            if thinking and not (able.thinking and self.marks):
                raise Refused(400, "the model's template has no thinking", param="reasoning_effort")
            if (tools and not (able.tools and self.marks)) or (calls and able.results is None):
                raise Refused(400, "the model's chat template has no tools", param="tools")
            if able.text_last:
                plain, aside = _set_aside(plain)
            if calls and able.results == "field":
                plain = _embedded(plain)
        text = await renderer.render(
            plain,
            tools=offered or None,
            enable_thinking=thinking,
            add_generation_prompt=opened or continued,
        )
        text = _put_back(text, aside) + begun
        ids = await self._encode(text, guard)
        state = "may" if thinking else "no"
        if self.marks is not None and self.marks.thinking(ids):
            state = "open"
        return Prompt(text.replace(guard, "") if guard else text, ids, state)

    async def encode(self, text: str) -> list[int]:
        """Tokenize a text and the control tokens that it spells; the tokens begin with BOS."""
        return await self._encode(text)

    async def _encode(self, text: str, guard: str = "") -> list[int]:
        return await asyncio.to_thread(self._tokenizer.encode, text, n_ctx=self._n_ctx, guard=guard)


def _plain(message: Message, index: int) -> dict[str, Any]:
    """Convert a message to what templates expect: one text, arguments as objects."""
    role = message["role"]
    plain = {
        **message,
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content"), f"messages[{index}].content"),
    }
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            _call(call, f"messages[{index}].tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return plain


def _begun(messages: list[dict[str, Any]]) -> str:
    """Take the last message, the beginning of the answer, off a conversation."""
    last = messages.pop()
    if last["role"] != "assistant" or last.get("tool_calls") or not messages:
        raise Refused(
            400,
            "an answer can be continued only where the last of several messages is "
            "the assistant's and has no calls",
            param="messages",
        )
    return str(last["content"])


def _text(content: Any, where: str) -> str:
    """Join the text of a message."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part["type"] not in ("text", "input_text", "output_text"):
            raise Refused(400, f"{where}: {part['type']} is not supported, only text", param=where)
    return "\n".join(part["text"] for part in content)


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call["function"]
    value = function.get("arguments") or {}
    if isinstance(value, str):
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise Refused(400, f"{where}.function.arguments: expected a JSON object", param=where)
    return {**call, "function": {**function, "arguments": value}}


def _set_aside(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Take the text out of messages with calls, for templates that would write it behind the calls
    and their results, as if it was the answer to them, and end the turn there.

    Returns:
        The messages, the first call of each marked by its name, and the texts by their marks.
    """
    aside: dict[str, str] = {}
    out = list(messages)
    for i, message in enumerate(messages):
        words = message["content"].strip()
        if words and message.get("tool_calls"):
            mark = f"{secrets.token_hex(16)}_"
            aside[mark] = words
            first, *others = message["tool_calls"]
            function = {**first["function"], "name": mark + first["function"]["name"]}
            calls = [{**first, "function": function}, *others]
            out[i] = {**message, "content": "", "tool_calls": calls}
    return out, aside


def _put_back(text: str, aside: Mapping[str, str]) -> str:
    """Write texts that were set aside before the calls of their messages, as the model does."""
    for mark, words in aside.items():
        call = "<|tool_call>call:"
        if call + mark not in text:
            raise InputError("the chat template failed", found="it leaves a call out")
        text = text.replace(call + mark, words + call + mark, 1).replace(mark, "")
    return text


def _embedded(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move results of functions into the message that called them, and the answer that follows
    as its text: the form of Gemma 4's first templates."""
    out: list[dict[str, Any]] = []
    for message in messages:
        last = out[-1] if out else {}
        if message["role"] == "tool":
            calls = last.get("tool_calls", [])
            names = {c.get("id"): c["function"]["name"] for c in calls}
            name = names.get(message.get("tool_call_id")) or message.get("name") or "unknown"
            if not calls:
                raise Refused(400, "a message of the role tool follows no call", param="messages")
            result = {"name": name, "response": message["content"]}
            out[-1] = {**last, "tool_responses": [*last.get("tool_responses", []), result]}
        elif (
            message["role"] == "assistant"
            and last.get("tool_responses")
            and not message.get("tool_calls")
            and not last["content"]
        ):
            out[-1] = {**last, "content": message["content"]}
        else:
            out.append(message)
    return out
