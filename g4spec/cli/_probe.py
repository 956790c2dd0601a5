"""What `validate --probe` measures, as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from g4spec.cli.render import Output
from g4spec.errors import UsageError

if TYPE_CHECKING:
    from g4spec.measure.draft_probe import ProbeResult


def check(target: Path | None) -> None:
    """Raise what keeps --probe from running, before the files are read."""
    if target is None:
        raise UsageError("--probe runs the draft beside its target", fix="pass --target")
    from g4spec.measure import draft_probe  # noqa: F401  (needs torch)


def run(out: Output, path: Path, target: Path | None) -> ProbeResult:
    """Run the pair, and show what was measured."""
    from g4spec.measure import draft_probe

    assert target is not None, "see check"
    with out.progress("probing") as progress:
        found = draft_probe.probe(target, path, progress=progress)
    shares = ", ".join(f"{x:.0%}" for x in found.run.shares())
    out.line(f"{found.run.per_step:.2f} tokens a step; accepted by position: {shares}")
    rows = [(name, f"{run.per_step:.2f}") for name, run in found.others.items()]
    out.table(
        f"Drafts of this kind reach {found.reached:g} or more",
        ("with this changed", "tokens a step"),
        rows,
    )
    for name in found.better:
        out.line(f"better with {name}: compare that with the checkpoint", "bad")
    if not found.ok and not found.better:
        out.line(
            "fewer than drafts of this kind reach, and no single setting explains it: "
            "probably not trained for this target, or weights are wrong (--against)",
            "bad",
        )
    return found
