"""Loads the engine of a command and shows the device that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4spec.cli import _inputs, _signals, _threads
from g4spec.cli.render import Output

if TYPE_CHECKING:
    from g4spec.convert.hub_id import HubId
    from g4spec.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Setup:
    """The options of a command line that configure the engine; see `Engine.load`."""

    n_ctx: int | None
    draft_window: int | None
    draft_p_min: float | None
    device: str
    cache_type: str | None
    parallel: int = 1


def files(
    model: Path, draft: str | None, setup: Setup, out: Output
) -> tuple[Path, Path | str | None]:
    """Return target and draft as `Engine.load` takes them.

    Downloads them from the hub and converts the draft if necessary. Cheap checks run first. A draft
    is smaller than a target, so it is downloaded first.
    """
    _inputs.check_exists(model, draft)
    from g4spec.convert import hub_id
    from g4spec.runtime import devices

    draft_path = None if draft in (None, _inputs.NGRAM) else Path(str(draft))
    devices.check(setup.device, setup.cache_type)
    remote, path = hub_id.is_remote(model), None
    if not remote:
        model = _target(model, setup, out)
    if draft_path is not None:
        path = _inputs.resolve(draft_path, out, "draft")
        _inputs.check_draft(path, confident=bool(setup.draft_p_min))
    if remote:
        model = _target(model, setup, out, path)
    return model, _inputs.open_draft(path, model, out) if path else draft


def target_file(model: Path, setup: Setup, out: Output) -> Path:
    """Return the target of a command that runs no drafts; see `files`."""
    _inputs.check_exists(model)
    from g4spec.runtime import devices

    devices.check(setup.device, setup.cache_type)
    return _target(model, setup, out, alone=True)


def _target(
    model: Path, setup: Setup, out: Output, draft: Path | None = None, alone: bool = False
) -> Path:
    def best_type(id: HubId, sizes: Mapping[str, int]) -> str | None:
        from g4spec.advisor import hub_choice
        from g4spec.advisor.facts import facts
        from g4spec.advisor.machine_probe import probe
        from g4spec.runtime import devices

        machine = probe(facts())
        gpu = devices.check(setup.device, setup.cache_type)
        machine = replace(machine, gpus=() if gpu is None else machine.gpus[gpu[0] :][:1])
        file = hub_choice.best_file(
            facts(), machine, id.repo, sizes, setup.n_ctx, setup.cache_type, draft
        )
        if file is not None:
            out.note(
                f"{id}: {file} is the best of {len(sizes)} files for {machine.title}; "
                f"another one: {id}:TYPE"
            )
        return file

    path = _inputs.resolve(model, out, "gguf", best_type)
    return _inputs.open_target(path, setup.n_ctx, out, alone)


def load(
    model: Path, draft: Path | str | None, setup: Setup, out: Output, **options: Any
) -> Engine:
    """Load an engine with a progress bar; `options`: further arguments of `Engine.load`."""
    with _signals.repeated(), out.progress(f"loading {model.name}") as progress:
        engine = load_with_threads(
            target=model, draft=draft, **asdict(setup), **options, progress=progress
        )
    note_device(engine.backend.title, engine.on_cpu, setup, out)
    for note in engine.notes:
        out.note(note)
    return engine


def load_with_threads(**options: Any) -> Engine:
    """Load an engine and choose its number of CPU threads; see `Engine.load`."""
    from g4spec.runtime.engine import Engine

    engine = Engine.load(**options)
    _threads.limit_threads(engine)
    return engine


def note_device(title: str, on_cpu: bool, setup: Setup, out: Output) -> None:
    """Show on which GPU an engine runs. If --device auto chose the CPU although there is a GPU,
    show why."""
    if not on_cpu:
        out.note(f"runs on {title}")
    elif setup.device == "auto":
        from g4spec.runtime import devices

        if (why := devices.unused_gpu_reason()) is not None:
            out.note(f"runs on the CPU: {why}")


def note_ops_without_kernel(engine: Engine, out: Output) -> None:
    """Show the ops that ran on the GPU without a kernel of their own."""
    for note in engine.target.ops.kernel_notes():
        out.note(note)
