"""`validate --probe`: runs the pair and shows what was measured."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from g4spec.cli._os_errors import check_working_folder
from g4spec.cli.render import Output
from g4spec.errors import InputError, UsageError

if TYPE_CHECKING:
    from g4spec.measure.draft_probe import ProbeResult
    from g4spec.validate import Report


def check(target: Path | None) -> None:
    """Raise an error if --probe cannot run, before any file is read."""
    if target is None:
        raise UsageError("--probe needs the draft's target", fix="pass it with --target")
    check_working_folder()
    from g4spec.measure import draft_probe  # noqa: F401  (needs torch)


def check_draft(path: Path) -> None:
    """Raise UsageError if FILE is not a draft, judged by its header. A broken file passes: its
    report says what is wrong with it."""
    from g4spec import models
    from g4spec.gguf import GGUF

    with suppress(InputError), GGUF(path) as file:
        arch = file.get("general.architecture")
        kind = models.find_kind(arch, file.tensors)
        if kind is None or arch in models.TARGETS:
            raise UsageError(
                f"--probe: {path} is not a draft",
                expected="FILE: a draft; --target: its target",
                found=kind.TITLE if kind else f"architecture {arch!r}",
                fix=f"write `g4spec validate DRAFT.gguf --probe --target {quote(str(path))}`"
                if kind
                else "leave out --probe",
            )


def run(out: Output, path: Path, target: Path | None, against: Path | None) -> ProbeResult:
    """Run the pair and show what was measured and found."""
    from g4spec.measure import draft_probe

    assert target is not None, "see check"
    again = (
        "the draft converted from the source" if against else "single settings and tensors changed"
    )
    out.note(f"probing: runs the pair, then with {again}; Ctrl-C ends it")
    with out.progress("probing") as progress:
        found = draft_probe.probe(target, path, against, progress=progress)
    _show_measured(out, found)
    for finding in found.findings:
        out.line("error PROBE: acceptance must be that of a correct draft", "bad")
        finding.show(out)
    if found.interrupted:
        out.note(f"interrupted: {found.interrupted}")
    return found


def _show_measured(out: Output, found: ProbeResult) -> None:
    """Show tokens per step and acceptance by position of each measured draft."""
    from g4spec.measure.draft_probe import REACHED

    measured = {"this file": found.run}
    if found.reference is not None:
        measured["converted from the source"] = found.reference
    for name, run in measured.items():
        shares = ", ".join(f"{x:.0%}" for x in run.shares())
        out.line(f"{name}: {run.per_step:.2f} tokens per step; acceptance by position: {shares}")
    reached = f"Published drafts of this kind reach {found.reached:g} tokens per step or more"
    if found.kind not in REACHED:
        reached = "No figures of this kind are published"
    rows = [
        (name, found.present.get(name.partition(" = ")[0], ""), f"{run.per_step:.2f}")
        for name, run in found.others.items()
    ]
    if rows:
        out.table(reached, ("change", "present value", "tokens per step"), rows)
    else:
        out.line(reached)


def summary(found: ProbeResult | None) -> str:
    """Return the end of the summary line: the number of errors of the probe, if it ran."""
    if found is None:
        return ""
    n = len(found.findings)
    return f"; probe: {n} error{'s' * (n != 1)}" + (", interrupted" if found.interrupted else "")


def json(report: Report, found: ProbeResult) -> dict[str, Any]:
    """Return the fields of the JSON result that the probe adds or changes."""
    return {"ok": report.ok and found.ok, "probe": found.json()}


def raise_if_interrupted(found: ProbeResult | None) -> None:
    """Raise KeyboardInterrupt if Ctrl-C ended the probe; the exit code reports it, too.

    Must be called after the result is shown.
    """
    if found is not None and found.interrupted:
        raise KeyboardInterrupt
