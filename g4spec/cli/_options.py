"""Options that several commands share, spelt as other tools for GGUF files spell them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from g4spec.cli import _threads
from g4spec.core import MAX_DRAFT
from g4spec.errors import UsageError
from g4spec.runtime.cuda.cache.cuda_kv_size import KINDS

Model = Annotated[
    Path, typer.Option("-m", "--model", help="Target: a GGUF file, or the hub id of one.")
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "-md",
        "--model-draft",
        help="Draft: a GGUF file, a checkpoint folder (converted into a cache), a hub id, or "
        "`ngram` for n-gram lookup. Default: none.",
        metavar="FILE|DIR|ID|ngram",
    ),
]
ContextSize = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        help="Context in tokens; 0: all of the model's. Default: the model's, at most 8192.",
    ),
]
NPredict = Annotated[
    int,
    typer.Option("-n", "--n-predict", help="Most new tokens; -1: until the context is full."),
]
DraftMax = Annotated[
    str,
    typer.Option(
        "--draft-max",
        "--spec-draft-n-max",
        metavar="N|auto",
        help=f"Most tokens drafted a step, 0 to {MAX_DRAFT}; `auto` picks the length each step "
        "from measured costs and acceptance.",
    ),
]
DraftWindow = Annotated[
    int | None,
    typer.Option(
        "--draft-window", help="Context that full-attention layers of the draft see. Default: all."
    ),
]
DraftPMin = Annotated[
    float | None,
    typer.Option(
        "--draft-p-min",
        "--spec-draft-p-min",
        metavar="P",
        help="For DSpark drafts with a confidence head: end a proposal before the first token of "
        "less confidence than P, 0 to 1. Default: 0, which keeps all.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda",
        help="Where to run; `cuda:1` is the second GPU. By default the first one if there is any. "
        "`cuda:portable` takes the kernels for GPUs before sm_80, to compare or to work around.",
    ),
]
CacheType = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(KINDS),
        help="How keys and values are stored. Default: f16 on a "
        "GPU; a CPU keeps 32 bits, of numbers rounded as this type rounds them.",
    ),
]
Threads = _threads.Threads
Temperature = Annotated[float, typer.Option("--temp", help="Temperature; 0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the K likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep this much probability; 1 keeps all.")]
MinP = Annotated[
    float, typer.Option("--min-p", help="Keep tokens this likely relative to the best; 0: all.")
]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated."),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after stop tokens.")]
ShowDraft = Annotated[
    bool, typer.Option("--show-draft", help="Mark drafted, accepted and corrected tokens.")
]
ShowRejected = Annotated[
    bool,
    typer.Option(
        "--show-rejected",
        help="As --show-draft, with every rejected token of a proposal and not only the first.",
    ),
]


def draft_max(text: str) -> int | Literal["auto"]:
    """The value of `--draft-max`; its range is checked where it is used."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise UsageError("--draft-max", expected=f"0 to {MAX_DRAFT}, or auto", found=text) from None
