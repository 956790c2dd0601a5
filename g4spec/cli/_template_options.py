"""Options of `serve` about chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from g4spec.cli import _inputs
from g4spec.errors import InputError

Reasoning = Annotated[
    Literal["off", "on", "auto"],
    typer.Option(
        "--reasoning",
        help="Whether answers begin with reasoning if the request does not say; auto: if the chat "
        "template has reasoning, as in llama.cpp.",
    ),
]
PrefillAssistant = Annotated[
    bool,
    typer.Option(
        "--prefill-assistant/--no-prefill-assistant",
        help="Continue the last message of a chat if it is the assistant's, as llama.cpp does; "
        "otherwise only with continue_final_message.",
    ),
]
Template = Annotated[
    Path | None,
    typer.Option(
        "--chat-template-file", help="File with a chat template to use instead of the model's own."
    ),
]


def template(file: Path | None) -> str | None:
    """Return the chat template in `file`, or None without a file; raise InputError if it does not
    compile."""
    if file is None:
        return None
    from g4spec.runtime.template import syntax_error

    text = _inputs.read_text(file)
    why = syntax_error(text) if text.strip() else "an empty file"
    if why:
        raise InputError(
            f"{file}: not a chat template", found=why, fix="correct it, or leave the option out"
        )
    return text
