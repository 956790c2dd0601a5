"""/v1/chat/completions: jobs, responses and streams."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from g4spec.server import constraints, grammar, options, response_parts
from g4spec.server.call_grammar import Function
from g4spec.server.fields import ChatRequest, NamedTool
from g4spec.server.generation import Delta, Token
from g4spec.server.grammar import Grammar
from g4spec.server.output_parser import ArgumentEvent, CallEvent, Event, TextEvent, ThoughtEvent
from g4spec.server.prompt import Prompt
from g4spec.server.request_errors import RequestError
from g4spec.server.service import Generation, Job, Service, Text
from g4spec.server.sse import Events, event


async def build_prompt(service: Service, request: ChatRequest, *, generates: bool = True) -> Prompt:
    """Render and tokenize the messages of a request; `generates`: see `Prompter.chat`."""
    messages = [m.model_dump(exclude_none=True) for m in request.messages]
    tools = [t.model_dump(exclude_none=True) for t in request.tools or []]
    for tool in tools:  # templates require a description
        tool["function"].setdefault("description", "")
    continued, add_prompt = _is_continued(service, request), request.add_generation_prompt
    if continued and add_prompt:
        raise RequestError(
            400,
            "continue_final_message and add_generation_prompt exclude each other; set only one",
            param="add_generation_prompt",
        )
    return await service.prompter.chat(
        messages,
        tools,
        thinking=thinks(request, service.settings.reasoning),
        continue_final_message=continued,
        add_generation_prompt=add_prompt is not False,
        generates=generates,
    )


def _is_continued(service: Service, request: ChatRequest) -> bool:
    """Return True if the answer continues the last message."""
    if request.continue_final_message is not None or not service.settings.prefill_assistant:
        return bool(request.continue_final_message)
    before, last = [None, *request.messages][-2:]
    assert last is not None
    if last.role != "assistant" or last.tool_calls or request.add_generation_prompt:
        return False
    if before is not None and before.role == "assistant":
        raise RequestError(
            400,
            "messages: the last two are the assistant's, but an answer continues only one; join "
            "them, or set continue_final_message to false",
            param="messages",
        )
    return True


def thinks(request: ChatRequest, default: bool | None = False) -> bool | None:
    """Return True if reasoning is requested; Gemma 4 has no reasoning levels, only on and off.

    Args:
        default: result for a request that does not say.
    """
    variables = request.chat_template_kwargs
    enable = variables.enable_thinking if variables is not None else None
    effort = request.reasoning_effort
    if enable is not None and effort is not None and enable != (effort != "none"):
        raise RequestError(
            400,
            "reasoning_effort and enable_thinking contradict each other; set only one",
            param="reasoning_effort",
        )
    if effort is not None:
        return effort != "none"
    return default if enable is None else enable


async def build_job(service: Service, request: ChatRequest) -> Job:
    """Build the job of a request."""
    service.check_model(request.model)
    n = options.count(service, request)
    choice = _choice(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError(400, "top_logprobs: set `logprobs: true` too", param="top_logprobs")
    prompt = await build_prompt(service, request)
    # In a thread: large schemas and grammars take seconds.
    wanted = await asyncio.to_thread(_grammar, service, request, choice, prompt)
    if wanted is not None and request.ignore_eos:
        raise RequestError(
            400,
            "ignore_eos cannot be combined with a grammar, schema or tools; leave it out",
            param="ignore_eos",
        )
    banned: tuple[int, ...] = ()
    if request.tools and choice == "none":
        assert service.prompter.marks is not None
        banned = (service.prompter.marks.call,)
    limits = [n for n in (request.max_tokens, request.max_completion_tokens) if n is not None]
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    job_options = options.options(
        service,
        request,
        min(limits or [options.room(service, prompt.ids)]),
        logprobs=logprobs,
        banned=banned,
    )
    job_options = replace(job_options, progress=bool(request.stream and request.return_progress))
    budget = request.thinking_budget_tokens
    if budget is not None and prompt.thinking == "no":
        raise RequestError(
            400,
            "thinking_budget_tokens: thinking is off; set reasoning_effort",
            param="thinking_budget_tokens",
        )
    return Job(
        prompt.ids,
        job_options,
        n,
        wanted,
        chat=True,
        calls=choice != "none",
        open_thought=prompt.thinking == "open",
        thinking_budget=budget,
        live=request.live,
    )


def _choice(request: ChatRequest) -> str | NamedTool:
    """Return `tool_choice`, or its default."""
    choice = request.tool_choice or ("auto" if request.tools else "none")
    names = [tool.function.name for tool in request.tools or []]
    if choice not in ("auto", "none") and not names:
        raise RequestError(
            400,
            "tool_choice requires a call, but there are no tools; send `tools`",
            param="tool_choice",
        )
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise RequestError(
            400,
            f"tool_choice: there is no tool {choice.function.name!r} in tools",
            param="tool_choice",
        )
    if len(set(names)) < len(names):
        raise RequestError(
            400, "tools: two functions have the same name; rename one", param="tools"
        )
    return choice


def functions(request: ChatRequest) -> list[Function]:
    """List the functions of a request."""
    found = [tool.function for tool in request.tools or []]
    return [Function(f.name, f.description or "", f.parameters, bool(f.strict)) for f in found]


def _grammar(
    service: Service, request: ChatRequest, choice: str | NamedTool, prompt: Prompt
) -> Grammar | None:
    wanted = constraints.of(request)
    if wanted and wanted.field != "response_format" and choice not in ("auto", "none"):
        raise RequestError(
            400,
            f"{wanted.field}: tool_choice requires a call, which has the form of its function; "
            "leave out one of them",
            param=wanted.field,
        )
    calls = functions(request) if choice != "none" else []
    most = 1 if request.parallel_tool_calls is False else None
    marks, thinking = service.prompter.marks, prompt.thinking
    if isinstance(choice, NamedTool):
        calls = [f for f in calls if f.name == choice.function.name]
        return grammar.whole_text(marks, calls=calls, most=1, thinking=thinking)
    if choice == "required":
        return grammar.whole_text(marks, calls=calls, most=most, thinking=thinking)
    if wanted:
        if prompt.begun:
            raise RequestError(
                400,
                "an answer that continues the last message cannot follow a schema or grammar, "
                "which are those of whole answers; leave out one of them",
                param="messages",
            )
        return grammar.whole_text(
            marks,
            answer=wanted.answer,
            user=wanted.user,
            calls=calls,
            most=most,
            thinking=thinking,
        )
    if calls:
        assert marks is not None
        return grammar.inside_calls(marks, calls, parallel=most is None)
    return None


# ---- responses


@dataclass(slots=True)
class Answered:
    """The message of one text, assembled from its deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Add a delta."""
        self.tokens += delta.tokens
        for piece in delta.events:
            if isinstance(piece, TextEvent):
                self.content += piece.text
            elif isinstance(piece, ThoughtEvent):
                self.reasoning += piece.text
            elif isinstance(piece, CallEvent):
                self.calls.append(_called(piece.name))
            else:
                self.calls[piece.index]["function"]["arguments"] += piece.json

    def json(self) -> dict[str, Any]:
        """Return the message in OpenAI's format."""
        content = None if self.calls and not self.content else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message | ({"tool_calls": self.calls} if self.calls else {})


def _called(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _head(generation: Generation, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{generation.id}",
        "object": kind,
        "created": generation.created,
        "model": generation.service.settings.model,
        "system_fingerprint": response_parts.SYSTEM_FINGERPRINT,
    }


def _verbose(generation: Generation, request: ChatRequest) -> dict[str, Any]:
    """Return the additional fields of llama.cpp if `verbose` is true."""
    if not request.verbose:
        return {}
    prompt = generation.service.tokenizer.decode(generation.job.prompt, special=True)
    return {"__verbose": {"prompt": prompt}}


async def full_response(generation: Generation, request: ChatRequest) -> dict[str, Any]:
    """Return the complete response body."""
    messages = [Answered() for _ in generation.texts]
    async with aclosing(generation.deltas()) as deltas:
        async for text, delta in deltas:
            messages[text.index].add(delta)
    choices = []
    for text, message in zip(generation.texts, messages, strict=True):
        logprobs = None
        if generation.job.options.logprobs is not None:
            content = response_parts.chat_logprobs(generation.service.tokenizer, message.tokens)
            logprobs = {"content": content, "refusal": None}
        choices.append(
            {
                "index": text.index,
                "message": message.json(),
                "logprobs": logprobs,
                "finish_reason": text.finish,
            }
        )
    out = {
        **_head(generation, "chat.completion"),
        "choices": choices,
        "usage": response_parts.usage(generation),
        **_verbose(generation, request),
    }
    return out | response_parts.timings_of_one(generation.texts)


async def stream_response(generation: Generation, request: ChatRequest) -> Events:
    """Yield the response as events."""
    writer = _Chunks(generation, request)
    async with aclosing(generation.deltas()) as deltas:
        async for text, delta in deltas:
            for piece in writer.pieces(text, delta):
                yield piece
    if writer.usage:
        last = {
            **_head(generation, "chat.completion.chunk"),
            "choices": [],
            "usage": response_parts.usage(generation),
        }
        yield event(last | response_parts.timings_of_one(generation.texts))
    yield event("[DONE]")


class _Chunks:
    """Converts deltas to chunks, one per event: some clients handle only one change per chunk."""

    def __init__(self, generation: Generation, request: ChatRequest) -> None:
        self._generation, self._request = generation, request
        self.usage = bool(request.stream_options and request.stream_options.include_usage)
        self._pending: list[list[Token]] = [[] for _ in generation.texts]
        self._begun: set[int] = set()

    def pieces(self, text: Text, delta: Delta) -> Sequence[str]:
        """Return the chunks of a delta. Clients take the first chunk, which has the role, for the
        first token, so there is none before."""
        pending = self._pending[text.index]
        pending += delta.tokens
        out = []
        if text.index not in self._begun:
            self._begun.add(text.index)
            out.append(self.chunk(text, {"role": "assistant", "content": None, "refusal": None}))
        if delta.progress is not None:
            news = {"prompt_progress": response_parts.progress(text, delta.progress)}
            out.append(self.chunk(text, {}, more=news))
        for piece in delta.events:
            tokens = list(pending) if isinstance(piece, TextEvent) else []
            if tokens:
                pending.clear()
            out.append(self.chunk(text, _delta(piece), tokens))
        if delta.finish:
            out.append(self.chunk(text, {}, list(pending), delta.finish))
        return out

    def chunk(
        self,
        text: Text,
        delta: dict[str, Any],
        tokens: Sequence[Token] = (),
        finish: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> str:
        """Return one chunk, formatted as an event.

        Args:
            more: fields in addition to OpenAI's.
        """
        logprobs = None
        if tokens:
            content = response_parts.chat_logprobs(self._generation.service.tokenizer, tokens)
            logprobs = {"content": content, "refusal": None}
        out = _head(self._generation, "chat.completion.chunk")
        out["choices"] = [
            {"index": text.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        ]
        out |= response_parts.chunk_usage(self._request.stream_options, text)
        if finish or (self._request.timings_per_token and "role" not in delta):
            out["timings"] = response_parts.timings(text)
        return event(out | (more or {}))


def _delta(piece: Event) -> dict[str, Any]:
    if isinstance(piece, TextEvent):
        return {"content": piece.text}
    if isinstance(piece, ThoughtEvent):
        return {"reasoning_content": piece.text}
    if isinstance(piece, CallEvent):
        return {"tool_calls": [{"index": piece.index, **_called(piece.name)}]}
    assert isinstance(piece, ArgumentEvent)
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.json}}]}
