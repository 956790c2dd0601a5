"""Options of `chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path | None,
    typer.Option("-m", "--model", help="Target: a GGUF file, or the hub id of one."),
]
Url = Annotated[
    str | None, typer.Option("--url", help="Talk with the server at this address instead.")
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="G4SPEC_API_KEY", help="Key of that server.")
]
System = Annotated[str | None, typer.Option("--system", help="System message.")]
Think = Annotated[bool, typer.Option("--think", help="Let the model think before it answers.")]
NPredict = Annotated[
    int | None,
    typer.Option("-n", "--n-predict", min=1, help="Most tokens of an answer. Default: what fits."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temp",
        help="Temperature; 0 is greedy. Default of this and the next three: what the file says.",
    ),
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the K likeliest; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep this much probability.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Keep tokens this likely relative to the best.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Seed of the first answer; later ones count up. Default: random."),
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
"""Parameters that say nothing to a server elsewhere."""
