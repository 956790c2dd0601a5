"""Opens the engine of a command, and says where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from g4spec.cli.render import Output

if TYPE_CHECKING:
    from g4spec.runtime.engine import Engine


def load(
    model: Path,
    draft: Path | str | None,
    out: Output,
    *,
    n_ctx: int | None,
    draft_window: int | None,
    device: str,
    cache_type: str | None,
) -> Engine:
    """See `Engine.load`."""
    from g4spec.runtime.engine import Engine

    engine = Engine.load(model, draft, n_ctx=n_ctx, draft_window=draft_window, device=device,
                         cache_type=cache_type)  # fmt: skip
    if engine.target.ops.device.type != "cpu":
        out.note(f"runs on {engine.target.ops.title}")
    elif device == "auto":
        from g4spec.runtime import devices

        if (why := devices.unused()) is not None:
            out.note(f"runs on the CPU: {why}")
    return engine


def tell(engine: Engine, out: Output) -> None:
    """What ran without a kernel of its own."""
    names = sorted(engine.target.ops.without_kernel)
    if names:
        out.note(f"ran as torch on the GPU, slower than a kernel: {', '.join(names)}")
