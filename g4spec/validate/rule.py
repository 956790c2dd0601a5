"""Definition and registry of rules. A rule is one function in `rules/<topic>.py`; a new
file there needs no registration:

    @rule("G4-D2T-004", ERROR, "d2t must stay inside the target's vocabulary", on=DFLASH)
    def in_range(s: Subject) -> Findings:
        '''Why: the failure that this rule detects.'''
        if <wrong>:
            yield Finding("d2t", expected=..., found=..., fix=...)

The word after "G4" is the family, a heading of `docs/rules.md`; one family may be in several files.
Ids are stable: the id of a removed rule is not reused. CONTRIBUTING.md lists the steps to add one.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, Protocol

from g4spec import models
from g4spec.validate.needs import Needs
from g4spec.validate.subject import Subject


class Severity(IntEnum):
    """Severity of a finding; reports are sorted by it."""

    ERROR = 0
    WARNING = 1
    NOTE = 2

    def __str__(self) -> str:
        return self.name.lower()


ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

TARGETS = models.TARGETS
DFLASH = ("dflash", "dflash-g4spec")
EAGLE = ("eagle3", "eagle3-g4spec")
ASSISTANT = ("gemma4-assistant",)
TAPPED = (*DFLASH, *EAGLE)
DRAFTS = (*TAPPED, *ASSISTANT)
GEMMA = (*TARGETS, *ASSISTANT)

RECONVERT = "convert again from the original checkpoint with g4spec convert"
COMPARE = "compare with the checkpoint: g4spec validate --against DIR"


class Out(Protocol):
    """The part of `cli.render.Output` that findings need."""

    def line(self, text: str = "", style: str | None = None) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """One error found by a rule or the probe.

    Attributes:
        where: the key, tensor or byte position.
        expected, found: correct and actual value. `fix`: what the user can do about it.
    """

    where: str
    expected: object
    found: object
    fix: str

    def json(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "expected": str(self.expected),
            "found": str(self.found),
            "fix": self.fix,
        }

    def show(self, out: Out) -> None:
        """Print expected and actual value, and the fix."""
        out.line(f"  {self.where}: expected {self.expected}, found {self.found}")
        out.line(f"  fix: {self.fix}")


Findings = Iterator[Finding]
Check = Callable[["Subject"], Findings]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check with its id. `title` states what must be true; `why` is the docstring of the check.

    Attributes:
        needs: inputs without which the rule is skipped. Rules that read only keys need FILE: with
            CONFIG they would not run for a file whose metadata cannot be parsed.
        on: architectures that it applies to; empty: all.
        fallback: whether it runs only if no other error was found (it repeats a parser's error).
    """

    id: str
    severity: Severity
    title: str
    why: str
    check: Check
    needs: Needs = Needs.CONFIG
    on: tuple[str, ...] = ()
    fallback: bool = False

    @property
    def family(self) -> str:
        return self.id.split("-")[1]


_registry: dict[str, Rule] = {}


def rule(
    id: str,
    severity: Severity,
    title: str,
    *,
    on: tuple[str, ...] = (),
    needs: Needs = Needs.CONFIG,
    fallback: bool = False,
) -> Callable[[Check], Check]:
    """Register the decorated function under a stable id."""
    assert re.fullmatch(r"G4-[A-Z0-9]{3,4}-\d{3}", id) and id not in _registry, id

    def register(check: Check) -> Check:
        why = inspect.getdoc(check)
        assert why, f"{id}: the docstring that says why is missing"
        _registry[id] = Rule(id, severity, title, why, check, needs, on, fallback)
        return check

    return register


@cache
def all_rules() -> dict[str, Rule]:
    """Return every rule by id, sorted; importing the modules of `rules/` registers them."""
    package = importlib.import_module("g4spec.validate.rules")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{info.name}")
    return dict(sorted(_registry.items()))
