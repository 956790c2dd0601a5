"""`g4spec validate`: check a file against every rule of docs/rules.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g4spec.cli import _inputs, _probe, _validate_tables, render
from g4spec.errors import CheckFailed, UsageError

File = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="GGUF file of a draft or target, or the hub id of one."),
]
Target = Annotated[
    Path | None,
    typer.Option("--target", "-m", help="GGUF file of the draft's target, or the hub id of one."),
]
Against = Annotated[
    Path | None, typer.Option(help="Its source checkpoint: compares every tensor and key.")
]
RuleIds = Annotated[
    list[str] | None,
    typer.Option(metavar="ID", help="Check only the rule with this id; may be repeated."),
]
Upstream = Annotated[
    bool, typer.Option("--upstream", help="Show how upstream llama.cpp handles this file.")
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Also fail on warnings, and on rules skipped for lack of --target."
    ),
]
ProbeIt = Annotated[
    bool,
    typer.Option(
        "--probe",
        help="Also run the pair to find what costs acceptance. Compares with the draft "
        "converted from --against, or without it with single settings changed.",
    ),
]
ListRules = Annotated[bool, typer.Option("--list-rules", help="List all rules.")]


def command(
    path: File = None,
    target: Target = None,
    against: Against = None,
    rule: RuleIds = None,
    upstream: Upstream = False,
    strict: Strict = False,
    probe: ProbeIt = False,
    list_rules: ListRules = False,
    json: render.Json = False,
    quiet: render.Quiet = False,
) -> None:
    """Check a draft or target for errors, including silent ones.

    A silent error does not stop a draft from running, but lowers its acceptance. Exits with 1 on
    errors, and if the file prevents a rule from being checked. docs/rules.md explains each rule.
    """
    from g4spec import validate
    from g4spec.validate.needs import OTHER_SOURCE

    out = render.Output(json, quiet)
    checks = {
        "--target": target,
        "--against": against,
        "--rule": rule,
        "--strict": strict,
        "--probe": probe,
        "FILE": list_rules and path,
        "--upstream": list_rules and upstream,
    }
    conflicting = ", ".join(name for name, value in checks.items() if value)
    if conflicting and (list_rules or upstream):
        given = "--list-rules" if list_rules else "--upstream"
        raise UsageError(f"{given} runs no checks", fix=f"leave out {conflicting}")
    if path is None and not list_rules:
        raise UsageError("no file given", fix="run `g4spec validate FILE.gguf`")
    if path is None:
        return _validate_tables.show_rules(out)
    if probe:
        _probe.check(target)
    path = _inputs.resolve(path, out, "gguf")
    if probe:
        _probe.check_draft(path)
    if upstream:
        return _validate_tables.show_upstream(out, path)
    target = target and _inputs.resolve(target, out, "gguf")
    against = against and _inputs.resolve(against, out)
    with out.progress("reading tensors") as progress:
        report = validate.validate(path, target, against, only=rule or (), progress=progress)
    if unchecked := [name for name in rule or () if name not in report.checked]:
        why = report.skipped.get(unchecked[0], "it is not about this kind of file")
        raise UsageError(f"{path}: rule {unchecked[0]} was not checked", found=why)
    report.show(out)
    if OTHER_SOURCE in report.skipped.values():
        against = None
    if report.tensors and not json and against:
        _validate_tables.show_errors(out, report)
    found = _probe.run(out, path, target, against) if probe else None
    summary = report.summary() + _probe.summary(found)
    failed = not report.ok or report.unable or (found and not found.ok)
    fix = report.strict_fix() if strict and not failed else None
    if not (failed or fix) or (found and found.interrupted):  # else the error shows it
        out.line(summary, "bad" if failed else "good")
    out.result(report.json() | (_probe.json(report, found) if found else {}))
    _probe.raise_if_interrupted(found)
    if failed or fix:
        raise CheckFailed(summary, fix=fix)
