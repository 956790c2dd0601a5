"""Serves a target, with or without a draft, over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from g4spec.cli import _chatting, _defaults, _engine, _inputs, _options, _serving
from g4spec.cli.render import Output, Quiet


def command(
    context: typer.Context,
    model: _options.Model,
    draft: _options.DraftModel = None,
    host: _serving.Host = "127.0.0.1",
    port: _serving.Port = 8080,
    parallel: _serving.Parallel = 4,
    queue: _serving.Queue = 64,
    api_key: _serving.ApiKey = None,
    api_key_file: _serving.KeyFile = None,
    alias: _serving.Alias = None,
    cors_origin: _serving.Origin = None,
    ssl_cert_file: _serving.Certificate = None,
    ssl_key_file: _serving.Key = None,
    timeout: _serving.Timeout = 600,
    prefix_cache: _serving.PrefixCache = 1024,
    pool: _serving.Pool = None,
    ctx_size: _options.ContextSize = None,
    temp: _chatting.Temperature = None,
    top_k: _chatting.TopK = None,
    top_p: _chatting.TopP = None,
    min_p: _chatting.MinP = None,
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    daemon: _serving.Daemon = False,
    stream_fd: _serving.StreamFd = None,
    quiet: Quiet = False,
) -> None:
    """Serve the model to OpenAI's, Anthropic's and llama.cpp's clients, and a page to chat with it;
    a draft makes it faster and never changes an answer. The first SIGTERM or Ctrl-C lets requests
    end, a second stops."""
    setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type,
                          1 if daemon else parallel)  # fmt: skip
    asked: dict[str, float | None] = {"temperature": temp, "top_k": top_k, "top_p": top_p,
                                      "min_p": min_p}  # fmt: skip
    if daemon or stream_fd is not None:
        fd = _serving.check_daemon(daemon, stream_fd, _inputs.typed(context))
        return _daemon(model, draft, setup, Output(quiet=quiet), fd, pool, prefix_cache, asked)
    _serving.require_packages()
    from g4spec.server import run
    from g4spec.server.service import Service, Settings

    out, keys = Output(quiet=quiet), _serving.keys(api_key, api_key_file)
    place = run.Place(host, port, ssl_cert_file, ssl_key_file)
    if run.exposed(place) and not keys:
        out.note(f"anybody who reaches {host} may use this server: give it an --api-key")
    with run.listen(place) as at:
        path, draft_file = _engine.files(model, draft, setup, out)
        sampler, names = _defaults.sampler(path, out, **asked), alias or [path.stem]
        where = f"{names[0]} is served at {run.address(place, at)}"
        with _engine.load(path, draft_file, setup, out, pool=pool,
                          prefix_cache=prefix_cache << 20) as engine:  # fmt: skip
            settings = Settings(names[0], tuple(names[1:]), queue, time_limit=timeout,
                                sampler=sampler)  # fmt: skip
            run.serve(Service(engine, settings), place, at, lambda: out.note(where), keys=keys,
                      origins=cors_origin or ())  # fmt: skip


def _daemon(
    model: Path, draft: str | None, setup: _engine.Setup, out: Output, fd: int, pool: int | None,
    prefix_cache: int, asked: dict[str, float | None],
) -> None:  # fmt: skip
    """Answer lines of stdin on a file descriptor."""
    from g4spec.ops.sampling import Sampler
    from g4spec.server import daemon

    sampler = Sampler(**{k: v for k, v in asked.items() if v is not None})  # type: ignore[arg-type]
    path, file = _engine.files(model, draft, setup, out)
    with (open(fd, "wb", buffering=0) as stream,
          _engine.load(path, file, setup, out, pool=pool, prefix_cache=prefix_cache << 20)
          as engine):  # fmt: skip
        out.stream(f"{daemon.READY}\n")
        daemon.serve(engine, sys.stdin, stream, sampler, out.say)
