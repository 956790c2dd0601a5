"""Loads the facts and checks them against their schema."""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from g4spec.advisor import figures, software_facts, versions
from g4spec.advisor import schema as rows
from g4spec.advisor.schema import Conditions, Fact, Range, SourceFact
from g4spec.errors import G4Error

tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

FOLDER = Path(__file__).with_name("data")

KINDS: dict[str, type[Fact]] = {
    "source": rows.SourceFact,
    "note": rows.NoteFact,
    "card": rows.CardFact,
    "other": rows.OtherGpuFact,
    "capability": rows.CapabilityFact,
    "support": rows.SupportFact,
    "size": rows.SizeFact,
    "weights": rows.WeightsFact,
    "draft": rows.DraftFact,
    "backend": software_facts.BackendFact,
    "release": software_facts.ReleaseFact,
    "problem": rows.ProblemFact,
    "error": rows.ErrorFact,
    "fixed": figures.FixedCostFact,
    "cache": figures.CacheTableFact,
    "fit": figures.ContextFitFact,
    "reading": figures.MemoryReadingFact,
    "speed": figures.SpeedFact,
    "efficiency": figures.EfficiencyFact,
    "length": figures.DraftLengthFact,
    "wheel": software_facts.WheelFact,
    "toolkit": software_facts.ToolkitFact,
    "engine": rows.EngineFact,
    "flag": rows.FlagFact,
}
"""Name of a TOML table -> class of its rows."""

_ID = re.compile(r"[a-z0-9][a-z0-9.\-]*")
_DATE = re.compile(r"20\d\d-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?")

R = TypeVar("R", bound=Fact)


class BadFact(G4Error):
    """Raised for a row that violates the schema: a mistake in g4spec's own data."""


class Facts:
    """The loaded facts, indexed by id and by class."""

    def __init__(self, found: Mapping[str, list[Fact]]) -> None:
        self._kinds = found
        self.by_id = {row.id: row for group in found.values() for row in group}

    def all(self, kind: type[R]) -> list[R]:
        """Return the rows of one class, in file order."""
        return [row for row in self._kinds.get(kind.__name__, []) if isinstance(row, kind)]

    def get(self, kind: type[R], id: str) -> R:
        """Return the row `id`, which must exist and be of class `kind`."""
        row = self.by_id[id]
        assert isinstance(row, kind), id
        return row

    def find(self, kind: type[R], id: str) -> R | None:
        """Return the row `id` of class `kind`, or None."""
        row = self.by_id.get(id)
        return row if isinstance(row, kind) else None

    def __iter__(self) -> Iterator[Fact]:
        return iter(self.by_id.values())

    def cite(self, row: Fact) -> list[str]:
        """Return the links of a row's sources."""
        out = []
        for key in row.source:
            known = self.by_id.get(key)
            out.append(known.link if isinstance(known, SourceFact) else key)
        return out


def _check_range(text: str, where: str) -> None:
    try:
        versions.check(text)
    except ValueError as problem:
        raise BadFact(f"{where}: {problem}") from None


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def _value(hint: Any, value: Any, where: str) -> Any:
    """Convert `value` to the type `hint`; raise BadFact if it has another type."""
    if _is_optional(hint):
        hint = next(a for a in get_args(hint) if a is not type(None))
    if hint is Conditions:
        return make(Conditions, value, where)
    if hint == Range:
        hint = str
        if isinstance(value, str):
            _check_range(value, where)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise BadFact(where, expected=f"one of {', '.join(get_args(hint))}", found=value)
        return value
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if not isinstance(value, list):
            raise BadFact(where, expected="a list", found=value)
        return tuple(_value(item, v, where) for v in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise BadFact(where, expected=hint.__name__, found=value)
    return value


_HINTS: dict[Any, tuple[dict[str, Any], frozenset[str]]] = {}


def _schema(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the field types of a class, and its required fields."""
    if kind not in _HINTS:
        needed = frozenset(
            f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
        )
        _HINTS[kind] = get_type_hints(kind, include_extras=True), needed
    return _HINTS[kind]


def make(kind: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    """Build a `kind` from a TOML table; raise BadFact for unknown, missing or mistyped keys."""
    hints, needed = _schema(kind)
    if unknown := sorted(set(raw) - set(hints)):
        raise BadFact(f"{where}: unknown keys", expected=sorted(hints), found=unknown)
    if missing := sorted(needed - set(raw)):
        raise BadFact(f"{where}: missing keys", expected=missing)
    values = {key: _value(hints[key], value, f"{where}.{key}") for key, value in raw.items()}
    return kind(**values)


def _check(row: Fact, where: str) -> None:
    if not _ID.fullmatch(row.id):
        raise BadFact(f"{where}: id", expected="lower-case words and dashes", found=row.id)
    if not _DATE.fullmatch(row.date):
        raise BadFact(f"{where}: date", expected="2026-11-21 or 2026-11", found=row.date)
    if not row.source:
        raise BadFact(f"{where}: a row needs a source")


def parse(raw: Mapping[str, Any], name: str, strict: bool = True) -> list[Fact]:
    """Return the rows of one parsed TOML file. `strict` also checks ids, dates and sources."""
    out: list[Fact] = []
    for table, entries in raw.items():
        if table not in KINDS:
            raise BadFact(f"{name}: unknown table", expected=sorted(KINDS), found=table)
        for i, entry in enumerate(entries):
            where = f"{name}: {table} {entry.get('id', i)}"
            row = make(KINDS[table], entry, where)
            if strict:
                _check(row, where)
            out.append(row)
    return out


def load(folder: Path = FOLDER) -> Facts:
    """Load all TOML files of `folder`; raise BadFact for duplicate ids and undeclared sources."""
    found: dict[str, list[Fact]] = {}
    seen: dict[str, str] = {}
    for path in sorted(folder.glob("*.toml")):
        for row in parse(tomllib.loads(path.read_text(encoding="utf-8")), path.name):
            if row.id in seen:
                raise BadFact(f"{path.name}: id {row.id!r} is also used in {seen[row.id]}")
            seen[row.id] = path.name
            found.setdefault(type(row).__name__, []).append(row)
    facts = Facts(found)
    for row in facts:
        for key in row.source:
            if "://" not in key and not isinstance(facts.by_id.get(key), SourceFact):
                raise BadFact(f"{seen[row.id]}: {row.id}: unknown source", found=key)
    return facts


@cache
def facts() -> Facts:
    """Return the facts that ship with g4spec."""
    return load()
