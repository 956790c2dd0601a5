"""Options of `chat`."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option("--url", help="Chat with the server at this address instead of loading a model."),
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="G4SPEC_API_KEY", help="API key for --url.")
]
System = Annotated[str | None, typer.Option("--system", help="System message.")]
Think = Annotated[
    bool, typer.Option("--think", "--thinking", help="Let the model think before it answers.")
]
NPredict = Annotated[
    int | None,
    typer.Option(
        "-n", "--n-predict", min=1, help="Maximum number of tokens per answer. Default: what fits."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temp",
        help="Temperature; 0 is greedy. Default of this, --top-k, --top-p and --min-p: the model "
        "file's recommendation.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", help="Random seed of the first answer; grows by 1 per answer. Default: random."
    ),
]
LOCAL_ONLY = (
    "model",
    "draft",
    "ctx_size",
    "draft_window",
    "draft_p_min",
    "device",
    "cache_type",
    "threads",
)
"""Parameters that have no effect with --url."""
