"""`serve` over HTTP: serves one model, or a folder of models loaded on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4spec.cli import _engine, _http_options, _sampling_defaults, _signals
from g4spec.cli._notes import thinking_note
from g4spec.cli.render import Output

if TYPE_CHECKING:
    from g4spec.server.service import Service
    from g4spec.server.settings import Settings


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """A loader of models that all get the same options.

    Attributes:
        template: chat template to use instead of the models' own.
        sampling: sampling options of the command line.
        engine_options: further arguments of `EngineClient`.
    """

    setup: _engine.Setup
    out: Output
    template: str | None
    sampling: dict[str, float | None]
    engine_options: dict[str, Any]

    def service(
        self,
        settings: Settings,
        target: Path,
        draft: Path | str | None,
        report_progress: Callable[[int, int], None] = lambda read, whole: None,
    ) -> Service:
        """Load a target in a process of its own; `report_progress`: see `model_folder.Progress`."""
        from g4spec.server.engine_client import EngineClient
        from g4spec.server.service import Service

        sampler = _sampling_defaults.sampler(target, self.out, **self.sampling)
        with self.out.progress(f"loading {target.name}") as progress:

            def report(read: int, whole: int) -> None:
                progress(read, whole)
                report_progress(read, whole)

            engine = EngineClient(
                target,
                draft,
                make=_engine.load_with_threads,
                progress=report,
                **asdict(self.setup),
                **self.engine_options,
            )
        _engine.note_device(engine.title, engine.on_cpu, self.setup, self.out)
        engine.tokenizer.template = self.template or engine.tokenizer.template
        if settings.reasoning and (why := thinking_note(engine.tokenizer, "--reasoning on")):
            self.out.note(why)
            settings = replace(settings, reasoning=False)
        return Service(engine, replace(settings, sampler=sampler))


@_signals.repeated()
def serve_one(
    loader: ModelLoader,
    http: _http_options.HttpOptions,
    limits: dict[str, Any],
    model: Path,
    draft: str | None,
    alias: Sequence[str],
) -> None:
    """Serve one target, named after its file or `alias`; `limits`: fields of `Settings`."""
    from g4spec.server import addresses, run
    from g4spec.server.settings import Settings

    address = http.address(loader.out)
    with _http_options.listening(address) as listeners:
        target, file = _engine.files(model, draft, loader.setup, loader.out)
        names = alias or [target.stem]
        service = loader.service(Settings(names[0], tuple(names[1:]), **limits), target, file)
        note = f"{names[0]} is served at {addresses.url(address, listeners)}"
        with service.engine:
            run.serve(service, address, listeners, lambda: loader.out.note(note), **http.access)


@_signals.repeated()
def serve_folder(
    loader: ModelLoader,
    http: _http_options.HttpOptions,
    limits: dict[str, Any],
    folder: Path | None,
    max_loaded: int,
    *,
    autoload: bool,
) -> None:
    """Serve all targets in a folder, at most `max_loaded` of them loaded at once."""
    from g4spec.server import addresses, run
    from g4spec.server.loaded_models import LoadedModels
    from g4spec.server.model_folder import Progress, find_models
    from g4spec.server.model_router import ModelRouter
    from g4spec.server.settings import Settings

    def load(names: Sequence[str], target: Path, draft: Path | None, tell: Progress) -> Service:
        return loader.service(Settings(names[0], tuple(names[1:]), **limits), target, draft, tell)

    sleep_seconds = limits.pop("sleep_seconds")  # the router unloads idle models
    assert folder is not None  # see `_serve_options.check_models`
    address = http.address(loader.out)
    with _http_options.listening(address) as listeners:
        found = LoadedModels(
            find_models(folder, loader.out.note),
            load,
            max_loaded,
            limits["time_limit"],
            sleep_seconds,
        )
        n = len(found.all)
        url = addresses.url(address, listeners)
        served = f"{n} {'model is' if n == 1 else 'models are'} served at {url}"
        notes = [model.draft_note() for model in found.all.values()]

        def ready() -> None:
            for note in (*notes, served):
                loader.out.note(note)

        run.serve_models(
            ModelRouter(found, autoload=autoload), address, listeners, ready, **http.access
        )
