"""Options that give a prompt, spelt as other tools spell them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Prompt = Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt.")]
File = Annotated[Path | None, typer.Option("-f", "--file", help="Prompt from a file; - is stdin.")]
TokensFile = Annotated[
    Path | None,
    typer.Option("--tokens-file", help="Prompt as token ids (see `tokenize`), taken as they are."),
]
Chat = Annotated[
    bool,
    typer.Option(
        help="Put the prompt into the file's chat template. Off by default: a prompt then means "
        "the same here as in other tools, and works with models that have no template."
    ),
]
System = Annotated[str | None, typer.Option("--system", help="System message for --chat.")]
Messages = Annotated[
    Path | None,
    typer.Option(
        "--messages",
        metavar="JSON",
        help='Conversation for the chat template: [{"role": ..., "content": ...}, ...].',
    ),
]
Tools = Annotated[
    Path | None, typer.Option("--tools", metavar="JSON", help="Functions, as in OpenAI's API.")
]
Thinking = Annotated[bool, typer.Option(help="Let the model think first; needs a chat template.")]
ParseSpecial = Annotated[
    bool | None,
    typer.Option(
        "--parse-special/--no-parse-special",
        help="Read control tokens such as <|turn> in a prompt as such. Default: in raw prompts; "
        "with --chat and --messages not inside what users say.",
    ),
]
