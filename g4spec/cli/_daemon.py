"""`serve --daemon`: a line protocol on stdin and a file descriptor instead of HTTP."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli import _engine, _option_checks, _signals
from g4spec.cli.render import Output
from g4spec.errors import UsageError

Daemon = Annotated[
    bool,
    typer.Option(
        "--daemon",
        help="Use a line protocol instead of HTTP: read lines `PROMPT_BIN N_GEN [samp=...]` from "
        "stdin and write tokens to --stream-fd (see docs/serving.md).",
    ),
]
StreamFd = Annotated[
    int | None,
    typer.Option(
        "--stream-fd",
        min=0,
        help="File descriptor that --daemon writes tokens to: int32, -1 at the end of a text.",
    ),
]
HTTP_ONLY = (
    "models",
    "models_max",
    "host",
    "port",
    "parallel",
    "queue",
    "api_key",
    "api_key_file",
    "alias",
    "tags",
    "slots",
    "metrics",
    "ui",
    "hang_timeout",
    "sleep_idle_seconds",
    "reasoning",
    "prefill_assistant",
    "models_autoload",
    "cors_origin",
    "ssl_cert_file",
    "ssl_key_file",
    "timeout",
    "seed",
    "n_predict",
    "draft_max",
    "chat_template_file",
)
"""Parameters of `serve` that have no effect with --daemon."""


def check(daemon: bool, stream_fd: int | None, given_flags: dict[str, str]) -> int:
    """Return the file descriptor to write to; raise UsageError for options that conflict."""
    if not daemon or stream_fd is None:
        raise UsageError("--daemon and --stream-fd need each other", fix="give both, or neither")
    _option_checks.refuse_without_effect(given_flags, HTTP_ONLY, "with --daemon")
    try:
        mode = fcntl.fcntl(stream_fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        raise UsageError(
            "--stream-fd", expected="an open file descriptor", found=stream_fd
        ) from None
    if mode == os.O_RDONLY:
        raise UsageError(
            "--stream-fd",
            expected="a file descriptor that is open for writing",
            found=f"{stream_fd}, which can only be read",
        )
    return stream_fd


@_signals.repeated()
def run(
    model: Path | None,
    draft: str | None,
    setup: _engine.Setup,
    out: Output,
    fd: int,
    sampling: dict[str, float | None],
    pool: int | None,
    prefix_cache: int,
) -> None:
    """Answer lines of stdin on the file descriptor `fd`, with the options `sampling`.

    Args:
        pool, prefix_cache: as for `Engine.load`.
    """
    from g4spec.ops.sampling import Sampler
    from g4spec.server import daemon

    if model is None:
        raise UsageError("--daemon needs a model", fix="name one with -m")
    sampler = Sampler(**{k: v for k, v in sampling.items() if v is not None})  # type: ignore[arg-type]
    path, file = _engine.files(model, draft, setup, out)
    with (
        open(fd, "wb", buffering=0) as stream,
        _engine.load(path, file, setup, out, pool=pool, prefix_cache=prefix_cache) as engine,
    ):
        out.stream(f"{daemon.READY}\n")
        daemon.serve(engine, sys.stdin, stream, sampler, out.log)
