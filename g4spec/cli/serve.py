"""`g4spec serve`: serve targets, with or without a draft, over HTTP or a line protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from g4spec.cli import (
    _chat_options,
    _daemon,
    _engine,
    _http_options,
    _inputs,
    _option_checks,
    _options,
    _sampling_defaults,
    _serve_http,
    _serve_limits,
    _serve_options,
    _template_options,
)
from g4spec.cli.render import Output, Quiet


def command(
    context: typer.Context,
    model: _options.Model[Path | None] = None,
    draft: _options.DraftModel = None,
    models: _serve_options.Models = None,
    models_max: _serve_options.ModelsMax = 4,
    models_autoload: _serve_options.Autoload = True,
    host: _http_options.Host = "127.0.0.1",
    port: _http_options.Port = 8080,
    parallel: _serve_options.Parallel = 4,
    queue: _serve_options.Queue = 64,
    api_key: _http_options.ApiKey = None,
    api_key_file: _http_options.KeyFile = None,
    alias: _serve_options.Alias = None,
    tags: _serve_options.Tags = None,
    cors_origin: _http_options.Origin = None,
    slots: _http_options.Slots = True,
    metrics: _http_options.Metrics = True,
    ui: _http_options.Page = True,
    ssl_cert_file: _http_options.Certificate = None,
    ssl_key_file: _http_options.Key = None,
    timeout: _serve_options.Timeout = 600,
    hang_timeout: _serve_options.HangTimeout = None,
    sleep_idle_seconds: _serve_options.SleepSeconds = None,
    prefix_cache: _serve_limits.PrefixCache = 1024,
    pool: _serve_options.Pool = None,
    ctx_size: _options.ContextSize = None,
    temp: _chat_options.Temperature = None,
    top_k: _options.TopK[int | None] = None,
    top_p: _options.TopP[float | None] = None,
    min_p: _options.MinP[float | None] = None,
    top_n_sigma: _options.TopNSigma[float | None] = None,
    seed: _serve_options.Seed = None,
    n_predict: _serve_options.NPredict = None,
    draft_max: _serve_limits.DraftMax = "auto",
    reasoning: _template_options.Reasoning = "off",
    prefill_assistant: _template_options.PrefillAssistant = False,
    chat_template_file: _template_options.Template = None,
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    threads: _options.Threads = None,
    daemon: _daemon.Daemon = False,
    stream_fd: _daemon.StreamFd = None,
    quiet: Quiet = False,
) -> None:
    """Serve models over HTTP (OpenAI, Anthropic, llama.cpp APIs).

    Includes a web page to chat. A draft makes answers faster and never changes them. The first
    SIGTERM or Ctrl-C lets running requests finish; a second one stops at once.
    """
    flags = _option_checks.given_flags(context)
    _serve_options.check_models(model, models, draft, alias, tags, flags)
    length = _options.draft_max(draft_max)
    if models is None:
        _option_checks.require_draft(draft, draft_max=draft_max not in ("auto", "0"))
    out = Output(quiet=quiet)
    setup = _engine.Setup(
        ctx_size, draft_window, draft_p_min, device, cache_type, 1 if daemon else parallel
    )
    sampling = _sampling_defaults.given(context.params)
    engine_options: dict[str, Any] = {
        "pool": pool,
        "prefix_cache": _serve_limits.check_prefix_cache(prefix_cache),
    }
    if daemon or stream_fd is not None:
        fd = _daemon.check(daemon, stream_fd, flags)
        return _daemon.run(model, draft, setup, out, fd, sampling, **engine_options)
    _inputs.check_exists(model, draft)
    _serve_options.require_packages()
    engine_options["hang_limit"] = hang_timeout
    loader = _serve_http.ModelLoader(
        setup, out, _template_options.template(chat_template_file), sampling, engine_options
    )
    http = _http_options.HttpOptions(
        _http_options.hosts(host),
        port,
        ssl_cert_file,
        ssl_key_file,
        _http_options.origins(cors_origin),
        _http_options.keys(api_key, api_key_file),
        _http_options.disabled_paths(slots=slots, metrics=metrics, page=ui),
    )
    limits: dict[str, Any] = {
        "queue": queue,
        "time_limit": timeout,
        "seed": seed,
        "n_predict": n_predict,
        "draft_max": length,
        "sleep_seconds": sleep_idle_seconds,
        "reasoning": {"off": False, "on": True, "auto": None}[reasoning],
        "prefill_assistant": prefill_assistant,
        "tags": _serve_options.split_commas(tags),
    }
    if model is not None:
        _serve_http.serve_one(
            loader, http, limits, model, draft, _serve_options.split_commas(alias)
        )
    else:
        _serve_http.serve_folder(loader, http, limits, models, models_max, autoload=models_autoload)
