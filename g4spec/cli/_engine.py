"""Opens the engine of a command, and says where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from g4spec.cli import _inputs
from g4spec.cli.render import Output

if TYPE_CHECKING:
    from g4spec.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of a command that belong to the engine: see `Engine.load`."""

    n_ctx: int | None
    draft_window: int | None
    device: str
    cache_type: str | None


def files(
    model: Path, draft: str | None, setup: Setup, out: Output
) -> tuple[Path, Path | str | None]:
    """Target and draft as files that can be loaded, fetched from the hub and converted where they
    have to be. What shows without that is said before it, and a draft, the smaller one, is fetched
    before its target."""
    from g4spec.convert import hub
    from g4spec.runtime import devices

    devices.check(setup.device, setup.cache_type)
    away, path = hub.is_away(model), None
    if not away:
        model = _target(model, setup, out)
    if draft is not None and draft != _inputs.NGRAM:
        path = _inputs.local(Path(draft), out)
        _inputs.check_draft(path)
    if away:
        model = _target(model, setup, out)
    return model, _inputs.open_draft(path, model, out) if path else draft


def _target(model: Path, setup: Setup, out: Output) -> Path:
    path = _inputs.local(model, out, "gguf")
    _inputs.check_target(path, setup.n_ctx)
    return path


def load(model: Path, draft: Path | str | None, setup: Setup, out: Output) -> Engine:
    """See `Engine.load`."""
    from g4spec.runtime.engine import Engine

    engine = Engine.load(model, draft, n_ctx=setup.n_ctx, draft_window=setup.draft_window,
                         device=setup.device, cache_type=setup.cache_type)  # fmt: skip
    if engine.target.ops.device.type != "cpu":
        out.note(f"runs on {engine.target.ops.title}")
    elif setup.device == "auto":
        from g4spec.runtime import devices

        if (why := devices.unused()) is not None:
            out.note(f"runs on the CPU: {why}")
    return engine


def tell(engine: Engine, out: Output) -> None:
    """What ran without a kernel of its own."""
    names = sorted(engine.target.ops.without_kernel)
    if names:
        out.note(f"ran as torch on the GPU, slower than a kernel: {', '.join(names)}")
