"""Chat templates: Jinja text that comes with a file, so it is not trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from g4spec.errors import InputError

LONGEST_TEMPLATE = 1 << 20
"""Characters of a template; Gemma 4's has about 17,000."""

LONGEST_TEXT = 1 << 24
"""Characters it may write: a loop in it must not fill the memory."""


def render(template: str, messages: Sequence[Mapping[str, Any]], *, bos: str, eos: str) -> str:
    """The text of a conversation, ready for the model's answer.

    Templates get what transformers gives them: `messages`, `add_generation_prompt`, the tokens,
    `raise_exception`, `strftime_now` and a `tojson` that does not escape HTML.

    Raises InputError when the template is wrong or refuses the messages.
    """
    if len(template) > LONGEST_TEMPLATE:
        raise InputError("chat template too long", expected=f"at most {LONGEST_TEMPLATE}",
                         found=len(template))  # fmt: skip
    variables = {
        "messages": list(messages), "add_generation_prompt": True, "bos_token": bos,
        "eos_token": eos, "enable_thinking": False, "tools": None,
    }  # fmt: skip
    parts: list[str] = []
    size = 0
    try:
        for part in _environment().from_string(template).generate(**variables):
            size += len(part)
            if size > LONGEST_TEXT:
                _refuse(f"more than {LONGEST_TEXT} characters of output")
            parts.append(part)
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError,
            AttributeError, RecursionError) as error:  # fmt: skip
        raise InputError(
            "the chat template failed",
            found=str(error) or type(error).__name__,
            fix="give the whole prompt as text, with --no-chat",
        ) from error
    return "".join(parts)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _tojson
    return environment


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
