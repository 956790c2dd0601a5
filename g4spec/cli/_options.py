"""Options that several commands share, spelled as in llama.cpp.

Those whose type differs between commands, `T`, take it: `Model[Path]`, `Model[Path | None]`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import typer

from g4spec.cli import _threads
from g4spec.core import MAX_DRAFT
from g4spec.errors import UsageError
from g4spec.runtime.cuda.cache.cache_types import KINDS

T = TypeVar("T")
Model = Annotated[
    T, typer.Option("-m", "--model", help="Target: a GGUF file, or the hub id of one.")
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
        help="Context length in tokens; 0: the model's maximum. Default: the model's maximum, but "
        "at most 8192.",
    ),
]
ChunkSize = Annotated[int, typer.Option("-c", "--ctx-size", help="Tokens per chunk.")]
Chunks = Annotated[
    int | None, typer.Option("--chunks", help="Maximum number of chunks to read. Default: all.")
]
NPredict = Annotated[
    int,
    typer.Option(
        "-n", "--n-predict", help="Maximum number of new tokens; -1: until the context is full."
    ),
]


def draft_max_option(help: str, metavar: str = "N|auto") -> Any:
    """Return the option `--draft-max`, whose meaning depends on the command."""
    return typer.Option("--draft-max", "--spec-draft-n-max", metavar=metavar, help=help)


DRAFT_RANGE = (
    f"0 to {MAX_DRAFT}; `auto` chooses it at each step from measured costs and acceptance."
)
DraftMax = Annotated[str, draft_max_option(f"Maximum draft length, {DRAFT_RANGE}")]
DraftWindow = Annotated[
    int | None,
    typer.Option(
        "--draft-window",
        help="Number of tokens that the draft's full-attention layers see. Default: all.",
    ),
]
DraftPMin = Annotated[
    float | None,
    typer.Option(
        "--draft-p-min",
        "--spec-draft-p-min",
        metavar="P",
        help="End a proposal before the first token with a confidence below P, 0 to 1. Needs a "
        "DSpark draft with a confidence head. Default: the value in the draft's file, else 0, "
        "which keeps all.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda",
        help="Device to run on; `auto`: the first GPU if there is one; `cuda:1`: the second GPU; "
        "`cuda:portable`: a GPU with the kernels for GPUs before sm_80, as a workaround.",
    ),
]
CacheType = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(KINDS),
        help="KV cache type. Default: f16 on a GPU. A CPU stores 32-bit floats, rounded to the "
        "values of this type if it is given.",
    ),
]
Threads = _threads.Threads
Temperature = Annotated[float, typer.Option("--temp", help="Temperature; 0 is greedy.")]
TopK = Annotated[T, typer.Option("--top-k", help="Keep only the K likeliest tokens; 0 keeps all.")]
TopP = Annotated[
    T,
    typer.Option(
        "--top-p", help="Keep the likeliest tokens up to this total probability; 1 keeps all."
    ),
]
MinP = Annotated[
    T,
    typer.Option(
        "--min-p",
        help="Keep tokens with at least this fraction of the top probability; 0 keeps all.",
    ),
]
TopNSigma = Annotated[
    T,
    typer.Option(
        "--top-n-sigma",
        help="Keep logits at most this many standard deviations below the top one; 0 keeps all.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", help="Random seed; the same seed gives the same text.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", help="Stop string: the output ends before it; may be repeated."
    ),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Continue after stop tokens.")]
ShowDraft = Annotated[
    bool, typer.Option("--show-draft", help="Mark accepted and rejected draft tokens.")
]
ShowRejected = Annotated[
    bool,
    typer.Option(
        "--show-rejected",
        help="Like --show-draft, but show all rejected tokens of a proposal, not only the first.",
    ),
]


def draft_max(text: str) -> int | Literal["auto"]:
    """Parse `--draft-max`; its range is checked where it is used."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            "--draft-max", expected=f"0 to {MAX_DRAFT}, or auto", found=f"{text:.40}"
        ) from None
