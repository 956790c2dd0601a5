"""Render chat templates in a persistent, sandboxed subprocess.

Templates are untrusted: `g4spec.runtime.template` starts a process per text, which takes 0.1 s. The
server reuses one process, and replaces it when a template takes too much time or memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from g4spec.errors import InputError
from g4spec.runtime import template as runtime_template

_WORKER_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from g4spec.server.template_worker import work; work()"
)


START_SECONDS = 120
"""Maximum time for starting the process, in seconds."""

MAX_ANSWER_BYTES = 1 << 28
"""Maximum size of a result of the process."""


class Renderer:
    """The template process. Used from one event loop only.

    Args:
        template: Jinja source.
        bos, eos: texts of the BOS and EOS tokens.
    """

    def __init__(self, template: str, *, bos: str, eos: str) -> None:
        self.template = template
        self._job_defaults = {"template": template, "bos": bos, "eos": eos}
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render a conversation; raise InputError if the template is invalid or rejects it."""
        job = {**self._job_defaults, "messages": [dict(m) for m in messages], **variables}
        line = json.dumps(job).encode() + b"\n"
        async with self._lock:
            try:
                is_new = await self._ensure_started()
                answer = await self._exchange(line)
                if answer is None and not is_new:  # it may have been killed before this job
                    await self.close()
                    await self._ensure_started()
                    answer = await self._exchange(line)
            except TimeoutError:
                await self.close()
                raise _killed_error(f"no end after {runtime_template.TIMEOUT_SECONDS} s") from None
            except asyncio.CancelledError:
                await self.close()  # otherwise the next text would get this answer
                raise
        if answer is None:
            await self.close()
            raise _killed_error("its process was killed, probably for using too much memory")
        if "error" in answer:
            raise _template_error(answer["error"])
        return str(answer["text"])

    async def _ensure_started(self) -> bool:
        """Start the process if none runs, and wait until it accepts jobs; return True if it is
        new."""
        process = self._process
        if process is not None and process.returncode is None:
            return False
        with anyio.fail_after(START_SECONDS):  # imports take long on a busy machine
            process = self._process = await self._start()
            assert process.stdout is not None
            await process.stdout.readline()
        return True

    async def _exchange(self, line: bytes) -> dict[str, Any] | None:
        """Return the result of a job, or None if the process has ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None and process.stdout is not None
        try:
            with anyio.fail_after(runtime_template.TIMEOUT_SECONDS):
                process.stdin.write(line)
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except ConnectionError:
            return None
        except ValueError:
            await self.close()
            raise _template_error(f"its text has more than {MAX_ANSWER_BYTES} bytes") from None
        return dict(json.loads(answer)) if answer.endswith(b"\n") else None

    async def _start(self) -> asyncio.subprocess.Process:
        names = runtime_template.PASSED_ENVIRONMENT
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            _WORKER_PROGRAM,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_ANSWER_BYTES,
            env={k: os.environ[k] for k in names if k in os.environ},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(sys.path).encode() + b"\n")
        return process

    async def close(self) -> None:
        """Kill the process; the next text starts a new one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


class TemplateKilled(InputError):
    """A template whose process was killed; a retry may succeed."""


def _template_error(why: str) -> InputError:
    return InputError("the chat template failed", found=why[:500])


def _killed_error(why: str) -> TemplateKilled:
    return TemplateKilled("the chat template failed", found=why)


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """Features of a chat template.

    Attributes:
        thinking: `enable_thinking` changes the output.
        tools: tool declarations appear in the output.
        results: form of tool results: "messages" with the role tool, a "field" `tool_responses` of
            the message with the calls, or None if unsupported.
        text_last: the text of a message is written after its calls and their results.
    """

    thinking: bool
    tools: bool
    results: str | None
    text_last: bool = False


async def _attempt(
    renderer: Renderer, messages: Sequence[Mapping[str, Any]], **variables: Any
) -> str:
    """Render a conversation; return an empty text if the template rejects it."""
    try:
        return await renderer.render(messages, **variables)
    except TemplateKilled:
        raise
    except InputError:
        return ""


async def capabilities(renderer: Renderer) -> dict[str, bool]:
    """Probe what llama.cpp's `chat_template_caps` say of a template, without those that only a look
    into it shows: whether it keeps reasoning, or knows its levels."""
    user = {"role": "user", "content": "g4spec_user"}
    parts = [{"role": "user", "content": [{"type": "text", "text": "g4spec_part"}]}]
    names = ("g4spec_a", "g4spec_b")
    functions = [{"name": n, "description": "x", "parameters": {"type": "object"}} for n in names]
    tools = [{"type": "function", "function": function} for function in functions]
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}
        for name in names
    ]
    calling = {"role": "assistant", "content": "", "tool_calls": calls}
    declared = await _attempt(renderer, [user], tools=tools)
    called = await _attempt(renderer, [user, calling])
    typed = await _attempt(renderer, parts)
    system = await _attempt(renderer, [{"role": "system", "content": "g4spec_system"}, user])
    return {
        "supports_string_content": "g4spec_user" in await _attempt(renderer, [user]),
        "supports_typed_content": "g4spec_part" in typed and "[{" not in typed,
        "supports_tools": names[0] in declared,
        "supports_tool_calls": names[0] in called,
        "supports_parallel_tool_calls": all(name in called for name in names),
        "supports_system_role": "g4spec_system" in system,
    }


async def features(renderer: Renderer) -> TemplateFeatures:
    """Probe the features of a template by rendering test conversations."""
    name = "g4spec_probe"
    user = {"role": "user", "content": "x"}
    function = {"name": name, "description": "x", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "g4spec_result"}
    embedded = {**calling, "tool_responses": [{"name": name, "response": "g4spec_result"}]}

    attempt = partial(_attempt, renderer)
    plain = await attempt([user])
    thinking = await attempt([user], enable_thinking=True)
    declared = await attempt([user], tools=tools)
    as_messages = await attempt([user, calling, result], tools=tools)
    as_field = await attempt([user, embedded], tools=tools)
    results = None
    if f"response:{name}" in as_messages and "g4spec_result" in as_messages:
        results = "messages"
    elif f"response:{name}" in as_field and "g4spec_result" in as_field:
        results = "field"
    talking = await attempt([user, {**calling, "content": "g4spec_text"}], tools=tools)
    text_last = 0 <= talking.find(f"<|tool_call>call:{name}") < talking.find("g4spec_text")
    return TemplateFeatures(
        bool(thinking) and thinking != plain, name in declared, results, text_last
    )
