"""Serves a target, with or without a draft, over HTTP."""

from __future__ import annotations

from g4spec.cli import _engine, _inputs, _options, _serving
from g4spec.cli.render import Output, Quiet


def command(
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
    temp: _options.Temperature = 1.0,
    top_k: _options.TopK = 0,
    top_p: _options.TopP = 1.0,
    min_p: _options.MinP = 0.0,
    seed: _serving.Seed = None,
    chat_template_file: _serving.Template = None,
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    quiet: Quiet = False,
) -> None:
    """Serve the model to OpenAI's and llama.cpp's clients; a draft makes it faster and never
    changes an answer. The first SIGTERM or Ctrl-C lets requests end, a second one stops."""
    _serving.require_packages()
    from g4spec.ops.sampling import Sampler
    from g4spec.server import run
    from g4spec.server.service import Service, Settings

    out, keys = Output(quiet=quiet), _serving.keys(api_key, api_key_file)
    sampler = Sampler(temp, top_k, top_p, min_p)
    template = _inputs.read_text(chat_template_file) if chat_template_file else None
    place = run.Place(host, port, ssl_cert_file, ssl_key_file)
    if run.exposed(place) and not keys:
        out.note(f"anybody who reaches {host} may use this server: give it an --api-key")
    setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type, parallel)
    with run.listen(place) as at:
        path, draft_file = _engine.files(model, draft, setup, out)
        names = alias or [path.stem]
        where = f"{names[0]} is served at {run.address(place, at)}"
        with _engine.load(path, draft_file, setup, out, pool=pool,
                          prefix_cache=prefix_cache << 20) as engine:  # fmt: skip
            settings = Settings(names[0], tuple(names[1:]), queue, time_limit=timeout,
                                sampler=sampler, seed=seed)  # fmt: skip
            engine.tokenizer.template = template or engine.tokenizer.template
            run.serve(Service(engine, settings), place, at, lambda: out.note(where), keys=keys,
                      origins=cors_origin or ())  # fmt: skip
