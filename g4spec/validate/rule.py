"""What a rule is. A rule is one function in `rules/<family>.py` under the `rule` decorator:

    @rule("G4-D2T-004", ERROR, "d2t stays inside the target's vocabulary", on=DFLASH)
    def in_range(s: Subject) -> Findings:
        '''The failure this rule comes from.'''
        if <wrong>:
            yield Finding("d2t", expected=..., found=..., fix=...)

Ids are stable: a rule that goes away leaves its number unused.
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

from g4spec.validate.needs import Needs
from g4spec.validate.subject import Subject


class Severity(IntEnum):
    """How bad a finding is; reports are sorted by it."""

    ERROR = 0
    WARNING = 1
    NOTE = 2

    def __str__(self) -> str:
        return self.name.lower()


ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

TARGETS = ("gemma4",)
DFLASH = ("dflash", "dflash-g4spec")
EAGLE = ("eagle3", "eagle3-g4spec")
ASSISTANT = ("gemma4-assistant",)
TAPPED = (*DFLASH, *EAGLE)
DRAFTS = (*TAPPED, *ASSISTANT)
GEMMA = (*TARGETS, *ASSISTANT)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        where: the key, tensor or byte it is about.
        expected, found: both sides. `fix`: what the user can do about it.
    """

    where: str
    expected: object
    found: object
    fix: str


Findings = Iterator[Finding]
Check = Callable[["Subject"], Findings]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check with its name. `why` is the docstring of the check: the failure it comes from.

    Attributes:
        on: architectures it applies to; empty applies to every file.
        fallback: speaks only when no other error was found (it repeats what a reader said).
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
        assert why, f"{id} does not say which failure it comes from"
        _registry[id] = Rule(id, severity, title, why, check, needs, on, fallback)
        return check

    return register


@cache
def all_rules() -> dict[str, Rule]:
    """Every rule by id, sorted; importing the family files registers them."""
    package = importlib.import_module("g4spec.validate.rules")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{info.name}")
    return dict(sorted(_registry.items()))
