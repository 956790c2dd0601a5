"""Report of a validation."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g4spec.validate.needs import NO_SOURCE, NO_TARGET, NOT_GIVEN, OTHER_SOURCE
from g4spec.validate.rule import Finding, Out, Rule, Severity

GIVE = {NO_TARGET: "--target", NO_SOURCE: "--against"}
"""Reason why a rule was skipped -> option that provides the input."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rule and one of its findings."""

    rule: Rule
    finding: Finding

    def json(self) -> dict[str, Any]:
        f, r = self.finding, self.rule
        return {
            "id": r.id,
            "severity": str(r.severity),
            "title": r.title,
            **f.json(),
            "why": " ".join(r.why.split()),
        }


@dataclass(slots=True)
class Report:
    """Findings about one file.

    Attributes:
        failures: sorted by severity, worst first, then by rule id.
        checked: ids of the rules that ran.
        skipped: rule id -> why it did not run.
        tensors: with a source, one entry per tensor: name, type, maximum and relative error.
    """

    path: Path
    arch: str | None = None
    failures: list[Failure] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    tensors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def unable(self) -> dict[str, str]:
        """Rules that could not run because of a defect of the file, or because the source is of
        another model, with the reason."""
        return {i: why for i, why in self.skipped.items() if why not in NOT_GIVEN}

    def count(self, severity: Severity) -> int:
        return sum(f.rule.severity is severity for f in self.failures)

    @property
    def findings(self) -> list[Finding]:
        return [f.finding for f in self.failures]

    @property
    def ok(self) -> bool:
        """True if there are no errors. Warnings, notes and skipped rules are possible."""
        return not self.count(Severity.ERROR)

    def add(self, rule: Rule, finding: Finding) -> None:
        insort(self.failures, Failure(rule, finding), key=lambda f: (f.rule.severity, f.rule.id))

    def json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "architecture": self.arch,
            "ok": self.ok,
            "complete": not self.unable,
            "counts": {str(s): self.count(s) for s in Severity},
            "findings": [f.json() for f in self.failures],
            "checked": self.checked,
            "skipped": self.skipped,
            "tensors": self.tensors,
        }

    def summary(self) -> str:
        """Return one line with the number of rules and findings."""
        counts = [f"{self.count(s)} {s}{'s' * (self.count(s) != 1)}" for s in Severity]
        left = f", {_rules(len(self.skipped))} not checked" if self.skipped else ""
        other = list(self.unable.values()).count(OTHER_SOURCE)
        reasons = {
            "of a defect of the file": len(self.unable) - other,
            "the source is of another model": other,
        }
        why = ", ".join(f"{n} because {reason}" for reason, n in reasons.items() if n)
        left += f" ({why})" if why else ""
        return f"{self.path}: {_rules(len(self.checked))}, {', '.join(counts)}{left}"

    def strict_fix(self) -> str | None:
        """Return what to do about warnings and rules without a target; None if there are none."""
        if NO_TARGET in self.skipped.values():
            return f"pass {GIVE[NO_TARGET]} for the rules that need it"
        return "correct the warnings" if self.count(Severity.WARNING) else None

    def show(self, out: Out) -> None:
        """Print the findings, worst first, and how many rules were not checked."""
        style = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "dim"}
        for failure in self.failures:
            r, f = failure.rule, failure.finding
            out.line(f"{r.severity} {r.id}: {r.title}", style[r.severity])
            f.show(out)
        for reason, n in Counter(self.skipped.values()).items():
            how = f"; pass {GIVE[reason]}" if reason in GIVE else ""
            out.line(f"NOT CHECKED: {_rules(n)}, as {reason}{how}", "warn")


def _rules(n: int) -> str:
    return "1 rule" if n == 1 else f"{n} rules"
