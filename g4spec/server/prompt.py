"""Render chat messages (OpenAI's format) with the chat template, and tokenize them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from g4spec.errors import InputError
from g4spec.runtime import special_token_guard
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server.field_errors import spelled_path
from g4spec.server.fields import Part
from g4spec.server.output_parser import Marks
from g4spec.server.request_errors import RequestError
from g4spec.server.templates import (
    Renderer,
    TemplateFeatures,
    TemplateKilled,
    capabilities,
    features,
)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered and tokenized conversation.

    Attributes:
        text: rendered text.
        ids: token ids.
        thinking: "no": the output has no reasoning; "may": it may begin with reasoning; "open":
            the prompt ends inside reasoning, which the output continues.
        begun: the prompt ends with the beginning of the answer's text.
    """

    text: str
    ids: list[int]
    thinking: str = "no"
    begun: bool = False


class Prompter:
    """Renders and tokenizes prompts for one model.

    Attributes:
        marks: ids of the tokens that delimit turns, reasoning and tool calls. None if the
            vocabulary lacks one; tools and reasoning are then unavailable.
    """

    def __init__(self, tokenizer: Tokenizer, n_ctx: int) -> None:
        self._tokenizer, self._n_ctx = tokenizer, n_ctx
        self.marks = Marks.of(tokenizer)
        self._mark_texts = tokenizer.marks
        self._renderer: Renderer | None = None
        self._features: TemplateFeatures | None = None
        self._capabilities: dict[str, bool] | None = None
        if tokenizer.template:
            bos, eos = (
                tokenizer.piece(i, special=True).decode(errors="replace")
                for i in (tokenizer.bos, min(tokenizer.stop_ids))
            )
            self._renderer = Renderer(tokenizer.template, bos=bos, eos=eos)

    async def close(self) -> None:
        """Stop the template process."""
        if self._renderer is not None:
            await self._renderer.close()

    async def features(self) -> TemplateFeatures:
        """Return the features of the template; probe them on the first call."""
        if self._features is None:
            self._features = await features(self._template())
        return self._features

    async def capabilities(self) -> dict[str, bool]:
        """Return the capabilities of the template, none without a template that ends; probe them on
        the first call."""
        if self._capabilities is None:
            found: dict[str, bool] = {}
            if self._renderer is not None:
                with suppress(TemplateKilled):
                    found = await capabilities(self._renderer)
            self._capabilities = found
        return self._capabilities

    def _template(self) -> Renderer:
        if self._renderer is None:
            raise RequestError(400, "the model has no chat template; use /v1/completions")
        return self._renderer

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        thinking: bool | None = False,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        generates: bool = True,
    ) -> Prompt:
        """Render and tokenize a conversation.

        Only the template and system messages can contain control tokens. In other messages and
        in tools their spellings, such as `<|turn>`, are tokenized as text.

        Args:
            messages: messages in OpenAI's format.
            tools: tools in OpenAI's format.
            thinking: enable reasoning; None: if the template supports it.
            continue_final_message: the last message is the beginning of the answer; its reasoning
                precedes it, if reasoning is enabled.
            add_generation_prompt: end the prompt with the start of the assistant's turn; always
                true with `continue_final_message`.
            generates: the output will be parsed, so tools and reasoning must use Gemma 4's tokens.
                False, for instance to count tokens: those of any template are rendered.

        Raises:
            RequestError: there is no template, it does not support the requested features, or a
                message is invalid.
            InputError: the template rejects the messages.
        """
        renderer = self._template()
        guard, plain, offered = special_token_guard.guard_messages(
            [_template_message(m, i) for i, m in enumerate(messages)],
            tools,
            self._mark_texts,
            renderer.template,
        )
        thought, beginning = _pop_beginning(plain) if continue_final_message else ("", "")
        call_texts: dict[str, str] = {}
        calls = any(m.get("tool_calls") or m["role"] == "tool" for m in plain)
        thinks = bool(thinking)
        if thinking is not False or tools or calls:
            features = await self.features()
            known = self.marks is not None or not generates
            if thinking is None:
                thinks = features.thinking and known
            has_calls = calls and generates
            self._check_features(features, known, thinks, bool(tools), has_calls)
            if features.text_last:
                plain, call_texts = _extract_call_texts(plain)
            if calls and features.results == "field":
                plain = _embed_tool_results(plain)
        text = await renderer.render(
            plain,
            tools=offered or None,
            enable_thinking=thinks,
            add_generation_prompt=add_generation_prompt or continue_final_message,
        )
        begun = bool(beginning)
        if thought and thinks:
            beginning = f"<|channel>thought\n{thought}\n<channel|>{beginning}"
        text = _restore_call_texts(text, call_texts) + beginning
        ids = await self._encode(text, guard)
        state = "may" if thinks else "no"
        if self.marks is not None and self.marks.thinking(ids):
            state = "open"
        return Prompt(text.replace(guard, "") if guard else text, ids, state, begun)

    @staticmethod
    def _check_features(
        features: TemplateFeatures, known: bool, thinking: bool, tools: bool, calls: bool
    ) -> None:
        """Raise RequestError unless the template has the features that a request needs, and
        their tokens are known."""
        if thinking and not (features.thinking and known):
            raise RequestError(
                400,
                "the model's chat template has no thinking; do not ask for it (reasoning_effort, "
                "or thinking)",
                param="reasoning_effort",
            )
        if (tools and not (features.tools and known)) or (calls and features.results is None):
            raise RequestError(
                400,
                "the model's chat template has no tools; leave out tools and tool messages",
                param="tools",
            )

    async def encode(self, text: str) -> list[int]:
        """Tokenize a text, with BOS first. Spellings of control tokens become control tokens."""
        return await self._encode(text)

    async def _encode(self, text: str, guard: str = "") -> list[int]:
        return await asyncio.to_thread(self._tokenizer.encode, text, n_ctx=self._n_ctx, guard=guard)


def _template_message(message: Message, index: int) -> dict[str, Any]:
    """Convert a message to the form that templates take: content as str, arguments as objects, the
    role developer as system."""
    role, where = message["role"], f"messages[{index}].content"
    if role != "assistant" and message.get("content") is None:
        raise RequestError(400, f"{where} is missing (role {role})", param=where)
    plain = {
        **message,
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content"), where),
    }
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            _call(call, f"messages[{index}].tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return plain


def _pop_beginning(messages: list[dict[str, Any]]) -> tuple[str, str]:
    """Remove the last message, the beginning of the answer; return its reasoning and its text."""
    last = messages.pop()
    if last["role"] != "assistant" or last.get("tool_calls") or not messages:
        raise RequestError(
            400,
            "an answer can be continued only if the last of at least two messages has the "
            "role assistant and no tool calls",
            param="messages",
        )
    thought = last.get("reasoning_content") or last.get("reasoning") or ""
    return thought, str(last["content"])


def _text(content: Any, where: str) -> str:
    """Return the content of a message; join text parts with line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part["type"] not in ("text", "input_text", "output_text"):
            kind = f"{part['type']:.60}"
            raise RequestError(
                400, f"{where}[{i}]: {kind} is not supported, only text", param=f"{where}[{i}]"
            )
        if part.get("text") is None:
            name = f"{where}[{i}].text"
            raise RequestError(400, f"{name}: missing; it is required", param=name)
        if unknown := part.keys() - Part.model_fields.keys():
            name = spelled_path([min(unknown)], f"{where}[{i}]")
            what = f"unknown field {name}; remove it"
            raise RequestError(400, what, param=name, code="unknown_field")
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
        raise RequestError(400, f"{where}.function.arguments: expected a JSON object", param=where)
    return {**call, "function": {**function, "arguments": value}}


def _extract_call_texts(
    messages: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Remove the text of messages with tool calls.

    Some templates write this text after the calls and their results, as if it were the answer to
    them, and end the turn there. `_restore_call_texts` inserts it before the calls.

    Returns:
        The messages, with a random marker before the name of the first call of each of these, and
        the removed texts by marker.
    """
    call_texts: dict[str, str] = {}
    out = list(messages)
    for i, message in enumerate(messages):
        words = message["content"].strip()
        if words and message.get("tool_calls"):
            mark = f"{secrets.token_hex(16)}_"
            call_texts[mark] = words
            first, *others = message["tool_calls"]
            function = {**first["function"], "name": mark + first["function"]["name"]}
            calls = [{**first, "function": function}, *others]
            out[i] = {**message, "content": "", "tool_calls": calls}
    return out, call_texts


def _restore_call_texts(text: str, call_texts: Mapping[str, str]) -> str:
    """Insert the removed texts before the calls of their messages, where a model generates
    them, and remove the markers."""
    for mark, words in call_texts.items():
        call = "<|tool_call>call:"
        if call + mark not in text:
            raise InputError(
                "the chat template failed", found="a tool call is missing from its output"
            )
        text = text.replace(call + mark, words + call + mark, 1).replace(mark, "")
    return text


def _embed_tool_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move tool results, and the answer that follows them, into the message with the calls.

    The first Gemma 4 templates expect this form.
    """
    out: list[dict[str, Any]] = []
    for message in messages:
        last = out[-1] if out else {}
        if message["role"] == "tool":
            calls = last.get("tool_calls", [])
            names = {c.get("id"): c["function"]["name"] for c in calls}
            name = names.get(message.get("tool_call_id")) or message.get("name") or "unknown"
            if not calls:
                raise RequestError(
                    400,
                    "a tool message follows no call; put it after its tool_calls",
                    param="messages",
                )
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
