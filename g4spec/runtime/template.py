"""Chat templates: Jinja code from a model file, and therefore untrusted.

Jinja's sandbox keeps a template from accessing the system, but not from looping for hours or
filling the memory in one expression. So it runs in a separate process with limits on time and
memory; this costs about a tenth of a second.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from g4spec.errors import InputError

MAX_TEMPLATE_CHARS = 1 << 20
"""Maximum length of a template in characters; Gemma 4's has about 17,000."""

MAX_EXTRA_CHARS = 1 << 16
"""Number of characters that a template may write beyond twice the size of the messages."""

TIMEOUT_SECONDS, MEMORY_LIMIT = 10, 256 << 20
"""Limits of a template. Memory is limited where the system supports it (Linux)."""

PASSED_ENVIRONMENT = ("LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TZ")
"""The environment variables that a template process gets; others may contain keys."""

_WORKER = (
    "import json, sys; job = json.load(sys.stdin); sys.path[:] = job.pop('path'); "
    "from g4spec.runtime import template; template.run_worker(job)"
)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], *, bos: str, eos: str, **more: Any
) -> str:
    """Render a conversation up to the start of the model's answer.

    Args:
        more: other variables of the template.

    Templates get what transformers gives them: `messages`, `add_generation_prompt`, the tokens,
    `raise_exception`, `strftime_now` and a `tojson` that does not escape HTML.

    Raises:
        InputError: the template is invalid or refuses the messages.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InputError(
            "chat template too long", expected=f"at most {MAX_TEMPLATE_CHARS}", found=len(template)
        )
    job = {
        "path": sys.path,
        "template": template,
        "messages": [dict(m) for m in messages],
        "bos": bos,
        "eos": eos,
        **more,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _WORKER],
            input=json.dumps(job),
            capture_output=True,
            encoding="utf-8",
            timeout=TIMEOUT_SECONDS,
            check=False,
            env={k: os.environ[k] for k in PASSED_ENVIRONMENT if k in os.environ},
        )
    except subprocess.TimeoutExpired:
        raise _failed(f"no end after {TIMEOUT_SECONDS} s") from None
    if done.returncode:
        raise _failed("it was stopped, probably for the memory it took")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise _failed(answer["error"])
    return str(answer["text"])


def run_worker(job: dict[str, Any]) -> None:
    """Render in this process, which exists for nothing else, and write the answer to stdout."""
    limit_memory()
    json.dump(render_job(job), sys.stdout)


def limit_memory() -> None:
    """Limit the memory of this process, which only renders templates."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ImportError, ValueError, OSError):
        pass  # a system without such limits


def render_job(job: dict[str, Any]) -> dict[str, str]:
    """Return the text or the error of a job: the arguments of `render_in_process`."""
    try:
        return {"text": render_in_process(job.pop("template"), **job)}
    except (InputError, MemoryError) as error:
        return {"error": getattr(error, "found", None) or "it takes too much memory"}


def render_in_process(
    template: str, messages: Sequence[Mapping[str, Any]], *, bos: str, eos: str, **more: Any
) -> str:
    """Render like `render`, without limits of time and memory.

    Args:
        more: other variables, for instance `tools`.
    """
    variables = {
        "messages": list(messages),
        "add_generation_prompt": True,
        "bos_token": bos,
        "eos_token": eos,
        "enable_thinking": False,
        "tools": None,
        "documents": None,
        **more,
    }
    parts: list[str] = []
    rendered_values = json.dumps([variables["messages"], variables["tools"]], ensure_ascii=False)
    size, limit = 0, MAX_EXTRA_CHARS + 2 * len(rendered_values)
    try:
        for part in _compiled(template).generate(**variables):
            size += len(part)
            if size > limit:
                _refuse(f"more than {limit} characters of output")
            parts.append(part)
        "".join(parts).encode()  # half a surrogate pair is no text
    except (
        jinja2.TemplateError,
        ArithmeticError,
        LookupError,
        NameError,  # jinja2 compiles the constant 1e999 to the name `inf`
        TypeError,
        ValueError,
        AttributeError,
        AssertionError,
        RecursionError,
        SyntaxError,
    ) as error:
        raise _failed(str(error) or type(error).__name__) from error
    return "".join(parts)


def syntax_error(template: str) -> str:
    """Return the syntax error of a template, or "" if it compiles. Runs nothing."""
    if len(template) > MAX_TEMPLATE_CHARS:
        return f"{len(template)} characters"
    try:
        _environment().parse(template)
    except (jinja2.TemplateError, RecursionError) as error:
        return str(error)[:80] or type(error).__name__
    return ""


def _failed(why: str) -> InputError:
    return InputError(
        "the chat template failed",
        found=why[:500],
        fix="repair tokenizer.chat_template, or give the whole prompt as text, without `chat`",
    )


@functools.lru_cache(maxsize=2)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the model's text for training. Its
    content is rendered, and variables set inside stay local, as in transformers."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block as a call that returns its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_written")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _tojson
    return environment


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON. The parameters and their order are transformers'."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
