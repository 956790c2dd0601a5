"""Validation of target and draft files, above all for errors that do not show in the output.

Each rule (`rule.py`) is one function in `rules/`; `docs/rules.md` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from g4spec import models
from g4spec.errors import InputError, UsageError, did_you_mean
from g4spec.validate.needs import Needs
from g4spec.validate.report import Report
from g4spec.validate.rule import ERROR, Rule, all_rules
from g4spec.validate.subject import Subject

__all__ = ["Report", "all_rules", "validate"]


def validate(
    path: str | Path,
    target: str | Path | None = None,
    against: str | Path | None = None,
    *,
    only: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check a GGUF file of a target or draft.

    Args:
        target: the target GGUF of a draft.
        against: the checkpoint that the file was converted from, to compare every tensor.
        only: ids of the rules to run; default: all.
        progress: called with bytes read and total bytes while tensor data is read.

    Return a report, even for a file that cannot be parsed. Raise InputError if the file is missing
    or unreadable, or if `target` is not a valid target, UsageError if the file needs no `target`.
    """
    chosen = _chosen(only)
    other = _open_target(Path(target)) if target is not None else None
    subject = Subject(
        Path(path),
        target=other,
        source=Path(against) if against is not None else None,
        progress=progress,
    )
    report = Report(subject.path, subject.arch)
    try:
        if other is not None and subject.arch in models.TARGETS:
            raise UsageError(
                f"{path} is a target; `target` is for drafts",
                fix="omit `target`, or give the draft first",
            )
        _examine(subject, chosen, report)
    finally:
        subject.close()
        if other is not None:
            other.close()
    return report


def _chosen(only: Collection[str]) -> list[Rule]:
    known = all_rules()
    for name in only:
        if name not in known:
            raise UsageError(
                "unknown rule",
                expected="an id of `g4spec validate --list-rules`",
                found=name,
                fix=did_you_mean(name, known),
            )
    return [r for r in known.values() if not only or r.id in only]


def _open_target(path: Path) -> Subject:
    target = Subject(path)
    target.open()
    target.configure()
    if target.config is None:
        why = target.refusal or target.config_refusal or target.unsupported
        raise InputError(
            f"{path} cannot serve as target",
            found=str(why or target.arch).removeprefix(f"{path}: "),
            fix=f"see `g4spec validate {path}`",
        )
    if not hasattr(target.config, "kv_source"):
        raise InputError(
            f"{path} is not a target",
            expected="a Gemma 4 target",
            found=f"architecture {target.arch}",
            fix="give the draft first and its target with `target`",
        )
    return target


def _examine(s: Subject, chosen: list[Rule], report: Report) -> None:
    """Run the rules. Open and parse the file only if the rules that guard each step pass: tensor
    data is not read after a broken header, nor a configuration with keys of the wrong type.
    """
    rules = [r for r in chosen if not r.fallback and (not r.on or s.arch in r.on)]
    if not any(list(r.check(s)) for r in _gate(s.arch, Needs.HEADER, "GGUF")):
        s.open()
    gate = _gate(s.arch, Needs.FILE, "KEY", "CEN")
    if s.file is not None and not any(list(r.check(s)) for r in gate):
        s.configure()
    for r in rules:
        _run_rule(s, r, report)
    for r in chosen:
        if r.fallback and report.ok:
            _run_rule(s, r, report)
    if s.source is not None and s.config is not None:
        report.tensors = [c.json() for c in s.comparison.tensors]


def _gate(arch: str | None, needs: Needs, *families: str) -> list[Rule]:
    """Return the rules that must pass before the next step for a file of this architecture."""
    return [
        r
        for r in all_rules().values()
        if r.family in families
        and r.needs is needs
        and r.severity is ERROR
        and not r.fallback
        and (not r.on or arch in r.on)
    ]


def _run_rule(s: Subject, r: Rule, report: Report) -> None:
    reason = s.missing(r.needs)
    if reason is not None:
        report.skipped[r.id] = reason
        return
    report.checked.append(r.id)
    for finding in r.check(s):
        report.add(r, finding)
