"""`validate --probe`: runs the pair and shows what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from g4spec.cli.render import Output
from g4spec.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from g4spec.measure.draft_probe import ProbeResult


def check(target: Path | None) -> None:
    """Raise an error if --probe cannot run, before any file is read."""
    if target is None:
        raise UsageError("--probe needs the draft's target", fix="pass it with --target")
    from g4spec.measure import draft_probe  # noqa: F401  (needs torch)


def run(out: Output, path: Path, target: Path | None) -> ProbeResult:
    """Run the pair and show what was measured."""
    from g4spec.measure import draft_probe

    assert target is not None, "see check"
    out.note("probing: runs the pair, and again with each changed setting; Ctrl-C ends it")
    with out.progress("probing") as progress:
        found = draft_probe.probe(target, path, progress=progress)
    shares = ", ".join(f"{x:.0%}" for x in found.run.shares())
    out.line(f"{found.run.per_step:.2f} tokens per step; acceptance by position: {shares}")
    reached = f"Good drafts of this kind reach {found.reached:g} tokens per step or more"
    rows = [(name, f"{run.per_step:.2f}") for name, run in found.others.items()]
    if rows:
        out.table(reached, ("changed setting", "tokens per step"), rows)
    else:
        out.line(reached)
    if found.interrupted:
        out.note(f"interrupted: {found.interrupted}")
    for name in found.better:
        out.line(f"better with {name}: compare this setting with the checkpoint", "bad")
    if not found.ok and not found.better and not found.interrupted:
        out.line(
            "too few tokens per step for this kind of draft, and no single setting explains it: "
            "the draft was probably trained for another target, or has wrong weights (--against)",
            "bad",
        )
    return found


def raise_if_interrupted(found: ProbeResult | None) -> None:
    """Raise KeyboardInterrupt if Ctrl-C ended the probe; the exit code reports it, too.

    Must be called after the result is shown.
    """
    if found is not None and found.interrupted:
        raise KeyboardInterrupt


def raise_if_failed(found: ProbeResult | None, path: Path) -> None:
    """Raise CheckFailed if the draft's acceptance is too low, or better with a changed setting."""
    if found is None or found.ok:
        return
    if found.better:
        raise CheckFailed(f"{path}: acceptance is higher with {', '.join(found.better)}")
    raise CheckFailed(
        f"{path}: acceptance is too low",
        expected=f"{found.reached:g} tokens per step or more",
        found=f"{found.run.per_step:.2f}",
    )
