"""Serves a target, with or without a draft, over HTTP."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli import _engine, _inputs, _options
from g4spec.cli.render import Output, Quiet
from g4spec.errors import EnvironmentProblem

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
                 "Default: one context."),
]  # fmt: skip


def command(
    model: _options.Model,
    draft: _options.DraftModel = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    parallel: Parallel = 4,
    queue: Queue = 64,
    api_key: ApiKey = None,
    api_key_file: KeyFile = None,
    alias: Alias = None,
    cors_origin: Origin = None,
    ssl_cert_file: Certificate = None,
    ssl_key_file: Key = None,
    timeout: Timeout = 600,
    prefix_cache: PrefixCache = 1024,
    pool: Pool = None,
    ctx_size: _options.ContextSize = None,
    temp: _options.Temperature = 1.0,
    top_k: _options.TopK = 0,
    top_p: _options.TopP = 1.0,
    min_p: _options.MinP = 0.0,
    draft_window: _options.DraftWindow = None,
    draft_p_min: _options.DraftPMin = None,
    device: _options.Device = "auto",
    cache_type: _options.CacheType = None,
    quiet: Quiet = False,
) -> None:
    """Serve the model to OpenAI's and llama.cpp's clients; a draft makes it faster and never
    changes an answer. The first SIGTERM or Ctrl-C lets requests end, a second one stops."""
    for name in ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            raise EnvironmentProblem(f"serving needs the package {name}",
                                     fix="pip install 'g4spec[serve]'") from None  # fmt: skip
    from g4spec.ops.sampling import Sampler
    from g4spec.server import run
    from g4spec.server.app import app
    from g4spec.server.service import Service, Settings

    out, keys = Output(quiet=quiet), list(api_key or [])
    if api_key_file is not None:
        keys += [key for key in _inputs.read_text(api_key_file).split("\n") if key.strip()]
    sampler = Sampler(temp, top_k, top_p, min_p)
    place = run.Place(host, port, *(str(p) if p else None for p in (ssl_cert_file, ssl_key_file)))
    with run.listen(place) as at:
        setup = _engine.Setup(ctx_size, draft_window, draft_p_min, device, cache_type)
        path, draft_file = _engine.files(model, draft, setup, out)
        names = alias or [path.stem]
        with _engine.load(path, draft_file, setup, out, parallel=parallel, pool=pool,
                          prefix_cache=prefix_cache << 20) as engine:  # fmt: skip
            settings = Settings(names[0], tuple(names[1:]), queue, time_limit=timeout,
                                sampler=sampler)  # fmt: skip
            service = Service(engine, settings)
            if run.exposed(place) and not keys:
                out.note(f"anybody who reaches {host} may use this server: give it an --api-key")
            run.logs()
            service.warm_up()
            where = f"{names[0]} is served at {run.address(place, at)}"
            application = app(service, keys=keys, origins=cors_origin or ())
            run.server(application, service, place, lambda: out.note(where)).run(sockets=[at])
