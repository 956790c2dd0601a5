"""Serves a target, with or without a draft, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4spec.cli import _engine, _options, _serving
from g4spec.cli.render import Output, Quiet

if TYPE_CHECKING:
    from g4spec.server.service import Service, Settings


def command(
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
    prefix_cache: _serving.PrefixCache = 1024,
    pool: _serving.Pool = None,
    ctx_size: _options.ContextSize = None,
    temp: _options.Temperature = 1.0,
    top_k: _options.TopK = 0,
    top_p: _options.TopP = 1.0,
    min_p: _options.MinP = 0.0,
    seed: _serving.Seed = None,
    n_predict: _serving.NPredict = None,
    chat_template_file: _serving.Template = None,
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    quiet: Quiet = False,
) -> None:
    """Serve the model to OpenAI's, Anthropic's and llama.cpp's clients; a draft makes it faster
    and never changes an answer. The first SIGTERM or Ctrl-C lets requests end, a second stops."""
    _serving.check_models(model, models, draft, alias)
    _serving.require_packages()
    from g4spec.ops.sampling import Sampler
    from g4spec.server import models as many
    from g4spec.server import run
    from g4spec.server.service import Settings
    out, keys = Output(quiet=quiet), _serving.keys(api_key, api_key_file)
    place = run.Place(host, port, ssl_cert_file, ssl_key_file)
    _serving.warn(out, exposed=run.exposed(place) and not keys, host=host)
    setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type, parallel)
    settings = Settings("", (), queue, time_limit=timeout, seed=seed, n_predict=n_predict,
                        sampler=Sampler(temp, top_k, top_p, min_p))  # fmt: skip
    opened = _Opened(setup, out, settings, _serving.template(chat_template_file),
                     {"pool": pool, "prefix_cache": prefix_cache << 20})  # fmt: skip
    web: dict[str, Any] = {"keys": keys, "origins": cors_origin or ()}
    with run.listen(place) as at:
        where = f"served at {run.address(place, at)}"
        if model is None:
            found = many.Models(many.find(models), opened.service, models_max, timeout)
            note = f"{len(found.all)} models are {where}"
            return run.serve_models(found, place, at, lambda: out.note(note), **web)
        path, draft_file = _engine.files(model, draft, setup, out)
        service = opened.service(alias or [path.stem], path, draft_file)
        with service.engine:
            note = f"{service.settings.model} is {where}"
            run.serve(service, place, at, lambda: out.note(note), **web)


@dataclass(frozen=True, slots=True)
class _Opened:
    """Opens models alike.

    Attributes:
        template: chat template instead of the models' own. more: see `Engine.load`.
    """

    setup: _engine.Setup
    out: Output
    settings: Settings
    template: str | None
    more: dict[str, Any]

    def service(self, names: Sequence[str], target: Path, draft: Path | str | None) -> Service:
        """Load a target and serve it under some names."""
        from g4spec.server.service import Service

        engine = _engine.load(target, draft, self.setup, self.out, **self.more)
        engine.tokenizer.template = self.template or engine.tokenizer.template
        return Service(engine, replace(self.settings, model=names[0], aliases=tuple(names[1:])))
