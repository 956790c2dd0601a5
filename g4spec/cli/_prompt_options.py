"""Options that give a prompt, spelled as in other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Prompt = Annotated[str | None, typer.Option("-p", "--prompt", help="Prompt text.")]
File = Annotated[
    Path | None, typer.Option("-f", "--file", help="Read the prompt from a file; - is stdin.")
]
TokensFile = Annotated[
    Path | None,
    typer.Option(
        "--tokens-file",
        help="Read the prompt as token ids (see `tokenize`) and use them unchanged.",
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        help="Format the prompt with the model's chat template. Off by default, so that a prompt "
        "means the same as in other tools and works for models without a template."
    ),
]
System = Annotated[
    str | None, typer.Option("--system", help="System message; needs --chat or --messages.")
]
Messages = Annotated[
    Path | None,
    typer.Option(
        "--messages",
        metavar="JSON",
        help='JSON file with a conversation: [{"role": ..., "content": ...}, ...].',
    ),
]
Tools = Annotated[
    Path | None,
    typer.Option("--tools", metavar="JSON", help="JSON file with functions, as in OpenAI's API."),
]
Thinking = Annotated[
    bool, typer.Option(help="Let the model think first; needs --chat or --messages.")
]
MeasuredThinking = Annotated[
    bool,
    typer.Option(
        help="Let the model think first: in the built-in prompts that use the chat template, or "
        "with --chat or --messages."
    ),
]
ParseSpecial = Annotated[
    bool | None,
    typer.Option(
        "--parse-special/--no-parse-special",
        help="Read text such as <|turn> in the prompt as control tokens. Default: yes in a raw "
        "prompt, no in the messages of --chat and --messages.",
    ),
]
