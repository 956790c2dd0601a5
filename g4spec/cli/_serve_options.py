"""Options of `serve`, and the checks before it loads a model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli._option_checks import refuse_without_effect
from g4spec.errors import EnvironmentProblem, InputError, UsageError

Models = Annotated[
    Path | None,
    typer.Option(
        "--models",
        metavar="DIR",
        help="Serve every target in a folder, each with its matching draft from the same folder. "
        "Models are loaded on their first request.",
    ),
]
ModelsMax = Annotated[
    int,
    typer.Option(
        "--models-max",
        min=1,
        help="Maximum number of --models in memory at once, if they fit; the least recently used "
        "one is unloaded first.",
    ),
]
Autoload = Annotated[
    bool,
    typer.Option(
        "--models-autoload/--no-models-autoload",
        help="Load one of --models when a request names it; otherwise only POST /models/load "
        "loads it.",
    ),
]
Parallel = Annotated[
    int, typer.Option("-np", "--parallel", help="Texts generated at once; others wait.")
]
Queue = Annotated[
    int,
    typer.Option(
        "--queue", min=0, help="Requests that may wait; further ones are refused with 429."
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        "-a",
        "--alias",
        help="Model name in requests; may be repeated, or separated by commas. Default: the file's "
        "name.",
    ),
]
Tags = Annotated[
    list[str] | None,
    typer.Option(
        "--tags",
        help="Tag of the model in /v1/models; may be repeated, or separated by commas.",
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=1, help="Time limit of a request in seconds.")
]
HangTimeout = Annotated[
    float | None,
    typer.Option(
        "--hang-timeout",
        min=0,
        help="Restart the engine if a step takes longer than this many seconds; 0: never. "
        "Default: 300, on a CPU never.",
    ),
]
SleepSeconds = Annotated[
    float | None,
    typer.Option(
        "--sleep-idle-seconds",
        min=1,
        help="Free the memory of a model after this many seconds without a request; the next one "
        "loads it again. Default: never.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Random seed of requests that set none. Default: random."),
]
NPredict = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--predict",
        min=1,
        help="Maximum number of new tokens of requests that set none. Default: what fits.",
    ),
]
Pool = Annotated[
    int | None,
    typer.Option(
        "--pool",
        min=1,
        metavar="TOKENS",
        help="KV cache size in tokens, shared by all texts. Default and minimum: one context.",
    ),
]


def check_models(
    model: Path | None,
    models: Path | None,
    draft: str | None,
    alias: list[str] | None,
    tags: list[str] | None,
    given_flags: Mapping[str, str],
) -> None:
    """Raise UsageError unless the options name either one model or a folder and fit it, and
    InputError if the folder does not exist."""
    if (model is None) == (models is None):
        raise UsageError(
            "expected either -m or --models", fix="name a model with -m, or a folder with --models"
        )
    if models is None:
        refuse_without_effect(given_flags, ("models_max", "models_autoload"), "without --models")
    elif draft is not None or alias or tags:
        raise UsageError("-md, -a and --tags need -m", fix="leave them out with --models")
    elif not models.exists():
        raise InputError(
            f"{models}: no such file or folder",
            expected="a folder of GGUF files",
            fix="check the path of --models",
        )


def split_commas(values: list[str] | None) -> tuple[str, ...]:
    """Return the values of a repeatable option whose values are also separated by commas."""
    words = [word.strip() for value in values or [] for word in value.split(",")]
    return tuple(word for word in words if word)


def require_packages() -> None:
    """Raise EnvironmentProblem if a package of the extra `serve` is missing."""
    for name in ("anyio", "starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            fix = "install it: pip install 'g4spec[serve]'"
            raise EnvironmentProblem(f"serving needs the package {name}", fix=fix) from None
