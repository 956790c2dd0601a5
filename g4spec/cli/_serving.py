"""Options of `serve`, and what it needs before it loads anything."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli import _inputs
from g4spec.errors import EnvironmentProblem, UsageError

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
    typer.Option("--api-key", envvar="G4SPEC_API_KEY", help="Key that requests have to carry; may "
                 "be repeated. Default: none is needed."),
]  # fmt: skip
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", help="File of keys, one a line.")
]  # fmt: skip
Alias = Annotated[
    list[str] | None,
    typer.Option("-a", "--alias", help="Name of the model in requests; may be repeated. Default: "
                 "the file's."),
]  # fmt: skip
Origin = Annotated[
    list[str] | None,
    typer.Option("--cors-origin", help="Origin of web pages that may ask; may be repeated."),
]
Certificate = Annotated[
    Path | None, typer.Option("--ssl-cert-file", help="Certificate, for HTTPS.")
]  # fmt: skip
Key = Annotated[Path | None, typer.Option("--ssl-key-file", help="Key of the certificate.")]
Timeout = Annotated[
    float, typer.Option("--timeout", min=1, help="Seconds that a request may take.")
]  # fmt: skip
PrefixCache = Annotated[
    int,
    typer.Option("--prefix-cache", min=0, metavar="MIB", help="Host memory for the beginnings of "
                 "prompts that may come again."),
]  # fmt: skip
Pool = Annotated[
    int | None,
    typer.Option("--pool", metavar="TOKENS", help="Tokens that all texts together may keep. "
                 "Default, and least: one context."),
]  # fmt: skip


Daemon = Annotated[
    bool, typer.Option("--daemon", help="Speak no HTTP: read lines `PROMPT_BIN N_GEN [samp=...]` "
                       "from stdin and write tokens to --stream-fd (see docs/serving.md).")
]  # fmt: skip
StreamFd = Annotated[
    int | None,
    typer.Option("--stream-fd", min=0, help="File descriptor of --daemon's tokens: int32, -1 at "
                 "the end of a text."),
]  # fmt: skip
OF_HTTP = ("host", "port", "parallel", "queue", "api_key", "api_key_file", "alias", "cors_origin",
           "ssl_cert_file", "ssl_key_file", "timeout")  # fmt: skip
"""Parameters that say nothing to --daemon."""


def check_daemon(daemon: bool, stream_fd: int | None, typed: dict[str, str]) -> int:
    """The file descriptor of a daemon; UsageError where the options do not go together."""
    if not daemon or stream_fd is None:
        raise UsageError("--daemon and --stream-fd need each other")
    if given := [flag for name, flag in typed.items() if name in OF_HTTP]:
        raise UsageError(f"{', '.join(given)}: --daemon speaks no HTTP", fix="leave it out")
    try:
        os.fstat(stream_fd)
    except OSError:
        raise UsageError("--stream-fd", expected="a file descriptor that is open",
                         found=stream_fd) from None  # fmt: skip
    return stream_fd


def require_packages() -> None:
    """EnvironmentProblem where a package of the extra `serve` is missing."""
    for name in ("anyio", "starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            fix = "pip install 'g4spec[serve]'"
            raise EnvironmentProblem(f"serving needs the package {name}", fix=fix) from None


def keys(given: list[str] | None, file: Path | None) -> list[str]:
    """All API keys: those given, and the lines of a file."""
    lines = _inputs.read_text(file).split("\n") if file is not None else []
    return [key.strip() for key in [*(given or []), *lines] if key.strip()]
