"""Renders conversations by the chat template of a file, in a process of its own that stays.

Templates are not trusted: see `g4spec.runtime.template`, which starts a process a text. A server
has no tenth of a second for that, so its process renders one text after the other, and is replaced
when one takes too long or too much.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from g4spec.errors import InputError
from g4spec.runtime import template as runtime_template

_WORKER_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from g4spec.server.template_worker import work; work()"
)


START_SECONDS = 120
"""Time that the process may take to start."""


class Renderer:
    """The process that renders. Usable from one event loop.

    Args:
        template: Jinja. bos, eos: texts of these tokens.
    """

    def __init__(self, template: str, *, bos: str, eos: str) -> None:
        self.template = template
        self._fixed = {"template": template, "bos": bos, "eos": eos}
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render a conversation; InputError where the template is wrong or refuses it."""
        job = {**self._fixed, "messages": [dict(m) for m in messages], **variables}
        line = json.dumps(job).encode() + b"\n"
        async with self._lock:
            try:
                with anyio.fail_after(START_SECONDS):  # its imports take long on a busy machine
                    await self._started()
                with anyio.fail_after(runtime_template.SECONDS):
                    answer = await self._ask(line)
            except TimeoutError:
                await self.close()
                raise _stopped(f"no end after {runtime_template.SECONDS} s") from None
            except asyncio.CancelledError:
                await self.close()  # its answer would be taken for that of the next text
                raise
        if answer is None:
            await self.close()
            raise _stopped("its process was killed, probably for using too much memory")
        if "error" in answer:
            raise _failed(answer["error"])
        return str(answer["text"])

    async def _started(self) -> None:
        """Start the process if there is none, and wait until it takes jobs."""
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
            assert process.stdout is not None
            await process.stdout.readline()

    async def _ask(self, line: bytes) -> dict[str, Any] | None:
        process = self._process
        assert process is not None
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            await process.stdin.drain()
            answer = await process.stdout.readline()
        except (ConnectionError, ValueError):  # it has ended, or answers without end
            return None
        return dict(json.loads(answer)) if answer.endswith(b"\n") else None

    async def _start(self) -> asyncio.subprocess.Process:
        names = runtime_template.ENVIRONMENT
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            _WORKER_PROGRAM,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=1 << 28,
            env={k: os.environ[k] for k in names if k in os.environ},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(sys.path).encode() + b"\n")
        return process

    async def close(self) -> None:
        """End the process; the next text starts another one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


class Stopped(InputError):
    """A template that was stopped: another try may succeed."""


def _failed(why: str) -> InputError:
    return InputError("the chat template failed", found=why[:500])


def _stopped(why: str) -> Stopped:
    return Stopped("the chat template failed", found=why)


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """Features of a template.

    Attributes:
        thinking: `enable_thinking` changes what it writes.
        tools: it writes what functions there are.
        results: how it takes a function's results: as messages of the role `tool`, as
            `tool_responses` of the message with the calls, or not at all.
        text_last: it writes the text of a message behind its calls, and their results.
    """

    thinking: bool
    tools: bool
    results: str | None
    text_last: bool = False


async def features(renderer: Renderer) -> TemplateFeatures:
    """Find out what a template can do, by rendering."""
    name = "g4spec_probe"
    user = {"role": "user", "content": "x"}
    function = {"name": name, "description": "x", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "g4spec_result"}
    embedded = {**calling, "tool_responses": [{"name": name, "response": "g4spec_result"}]}

    async def attempt(messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        try:
            return await renderer.render(messages, **variables)
        except Stopped:
            raise
        except InputError:
            return ""

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
