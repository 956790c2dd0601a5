"""Options of `serve`, and what it needs before it loads anything."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli import _inputs
from g4spec.errors import EnvironmentProblem, UsageError

Model = Annotated[
    Path | None,
    typer.Option("-m", "--model", help="Target: a GGUF file, or the hub id of one."),
]
Models = Annotated[
    Path | None,
    typer.Option(
        "--models",
        metavar="DIR",
        help="Serve all targets in a folder, each with the "
        "draft in it that fits; loaded when they are asked for.",
    ),
]
ModelsMax = Annotated[
    int,
    typer.Option(
        "--models-max",
        min=1,
        help="Models of --models in memory at once, if they "
        "fit; the least recently used one goes first.",
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 picks a free one.")]
Parallel = Annotated[
    int, typer.Option("-np", "--parallel", min=1, help="Texts generated at once; more wait.")
]
Queue = Annotated[
    int, typer.Option("--queue", min=0, help="Texts that may wait; more are refused with 429.")
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar="G4SPEC_API_KEY",
        help="Key that requests have to carry; may be repeated. Default: none is needed.",
    ),
]
KeyFile = Annotated[Path | None, typer.Option("--api-key-file", help="File of keys, one a line.")]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        "-a", "--alias", help="Name of the model in requests; may be repeated. Default: the file's."
    ),
]
Origin = Annotated[
    list[str] | None,
    typer.Option("--cors-origin", help="Origin of web pages that may ask; may be repeated."),
]
Certificate = Annotated[
    Path | None, typer.Option("--ssl-cert-file", help="Certificate, for HTTPS.")
]
Key = Annotated[Path | None, typer.Option("--ssl-key-file", help="Key of the certificate.")]
Timeout = Annotated[
    float, typer.Option("--timeout", min=1, help="Seconds that a request may take.")
]
HangTimeout = Annotated[
    float | None,
    typer.Option(
        "--hang-timeout",
        min=0,
        help="Seconds without the end of a step, "
        "after which the engine is started again; 0: never. Default: 300, "
        "on a CPU never.",
    ),
]
PrefixCache = Annotated[
    int,
    typer.Option(
        "--prefix-cache",
        min=0,
        metavar="MIB",
        help="Host memory for the beginnings of prompts that may come again.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Seed of requests that name none. Default: a new one each."),
]
NPredict = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--predict",
        min=1,
        help="New tokens of requests that name no limit. Default: what the context has room for.",
    ),
]
Template = Annotated[
    Path | None,
    typer.Option("--chat-template-file", help="Chat template, instead of the one in the model."),
]
Pool = Annotated[
    int | None,
    typer.Option(
        "--pool",
        metavar="TOKENS",
        help="Tokens that all texts together may keep. Default, and least: one context.",
    ),
]


def check_models(
    model: Path | None, models: Path | None, draft: str | None, alias: list[str] | None
) -> None:
    """UsageError where it is not clear what to serve."""
    if (model is None) == (models is None):
        raise UsageError("what shall be served?", expected="either -m or --models")
    if models is not None and (draft is not None or alias):
        raise UsageError("-md and -a belong to one model", fix="leave them out with --models")


def template(file: Path | None) -> str | None:
    """Return the chat template in a file."""
    return _inputs.read_text(file) if file is not None else None


def require_packages() -> None:
    """EnvironmentProblem where a package of the extra `serve` is missing."""
    for name in ("anyio", "starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            fix = "install it: pip install 'g4spec[serve]'"
            raise EnvironmentProblem(f"serving needs the package {name}", fix=fix) from None


def keys(given: list[str] | None, file: Path | None) -> list[str]:
    """All API keys: those given, and the lines of a file."""
    lines = _inputs.read_text(file).split("\n") if file is not None else []
    return [key.strip() for key in [*(given or []), *lines] if key.strip()]
