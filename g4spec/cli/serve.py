"""Serves targets, with or without a draft, over HTTP or a line protocol."""

from __future__ import annotations

from typing import Any

import typer

from g4spec.cli import _chatting, _daemon, _engine, _inputs, _options, _serving, _serving_http
from g4spec.cli.render import Output, Quiet


def command(
    context: typer.Context,
    model: _serving.Model = None,
    draft: _options.DraftModel = None,
    models: _serving.Models = None,
    models_max: _serving.ModelsMax = 4,
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
    hang_timeout: _serving.HangTimeout = None,
    prefix_cache: _serving.PrefixCache = 1024,
    pool: _serving.Pool = None,
    ctx_size: _options.ContextSize = None,
    temp: _chatting.Temperature = None,
    top_k: _chatting.TopK = None,
    top_p: _chatting.TopP = None,
    min_p: _chatting.MinP = None,
    seed: _serving.Seed = None,
    n_predict: _serving.NPredict = None,
    chat_template_file: _serving.Template = None,
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    threads: _options.Threads = None,
    daemon: _daemon.Daemon = False,
    stream_fd: _daemon.StreamFd = None,
    quiet: Quiet = False,
) -> None:
    """Serve models to OpenAI's, Anthropic's and llama.cpp's clients, and a page to chat with them;
    a draft makes them faster and never changes an answer. The first SIGTERM or Ctrl-C lets requests
    end, a second stops."""
    _serving.check_models(model, models, draft, alias)
    out = Output(quiet=quiet)
    setup = _engine.Setup(
        ctx_size, draft_window, draft_p_min, device, cache_type, 1 if daemon else parallel
    )
    asked: dict[str, float | None] = {
        "temperature": temp,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    more: dict[str, Any] = {"pool": pool, "prefix_cache": prefix_cache << 20}
    if daemon or stream_fd is not None:
        fd = _daemon.check(daemon, stream_fd, _inputs.typed(context))
        return _daemon.run(model, draft, setup, out, fd, asked, **more)
    _serving.require_packages()
    more["hang_limit"] = hang_timeout
    opened = _serving_http.Opened(setup, out, _serving.template(chat_template_file), asked, more)
    web = _serving_http.Web(
        host,
        port,
        ssl_cert_file,
        ssl_key_file,
        cors_origin or (),
        _serving.keys(api_key, api_key_file),
    )
    limits = {"queue": queue, "time_limit": timeout, "seed": seed, "n_predict": n_predict}
    if model is not None:
        _serving_http.one(opened, web, limits, model, draft, alias)
    else:
        _serving_http.several(opened, web, limits, models, models_max)
