"""The map in `docs/structures.md` matches the code."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "structures.md").read_text()
SIGNATURES = re.findall(r"^    (g4spec[\w.]+)\((.*)\)$", PAGE, re.MULTILINE)


def resolve(name: str) -> Any:
    """Return the object of a dotted name."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("name,arguments", SIGNATURES, ids=[n for n, _ in SIGNATURES])
def test_signatures_match_the_code(name: str, arguments: str) -> None:
    shown = inspect.signature(resolve(name))
    plain = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in shown.parameters.values()
        if p.name not in ("self", "cls")
    ]
    signature = inspect.Signature(plain)
    assert str(signature) == f"({arguments})", f"{name}{signature}"


def test_type_checkers_know_the_names_of_the_package() -> None:
    """A `__getattr__` that they see makes an Any of every misspelt name."""
    top = ast.parse((ROOT / "g4spec" / "__init__.py").read_text()).body
    assert "__getattr__" not in [getattr(node, "name", "") for node in top]


def test_named_files_exist() -> None:
    names = set(re.findall(r"`((?:[\w]+/)+[\w]+\.(?:py|cu|md)|(?:[\w]+/)+)`", PAGE))
    places = [
        ROOT,
        ROOT / "g4spec",
        ROOT / "g4spec/runtime",
        ROOT / "g4spec/runtime/cuda",
        ROOT / "g4spec/quant",
    ]
    missing = [n for n in sorted(names) if not any((place / n).exists() for place in places)]
    assert len(names) > 30 and missing == [], "paths begin at one of `places`"


def test_named_modules_and_constants_exist() -> None:
    modules = {p.stem: p for p in (ROOT / "g4spec").rglob("*.py")}
    files = {p.name for folder in ("g4spec", "docs", "tests") for p in (ROOT / folder).rglob("*.*")}
    named = re.findall(r"`(\w+\.(?:py|cuh?|toml))`", PAGE)
    constants = re.findall(r"`(\w+)\.([A-Z][A-Z_]+)`", PAGE)
    assert named and constants and set(named) <= files
    missing = [
        f"{module}.{name}"
        for module, name in constants
        if module not in modules
        or not re.search(rf"^{name}\b", modules[module].read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_names_in_contributing_exist() -> None:
    """Files by the end of their paths, everything else by its last name."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    files = [
        p
        for folder in ("g4spec", "tests", "benchmarks", "docs", "packaging")
        for p in (ROOT / folder).rglob("*.*")
    ]
    named = set(re.findall(r"`([\w/]+\.(?:py|cuh?|toml|md))\b", page))
    ends = ["/" + str(p.relative_to(ROOT)) for p in files]
    missing = [name for name in sorted(named) if not any(e.endswith(f"/{name}") for e in ends)]
    assert len(named) > 40 and missing == []
    code = [p.read_text() for p in files if p.suffix in (".py", ".cu", ".cuh", ".toml")]
    known = {word for text in code for word in re.findall(r"\w+", text)}
    words = set(re.findall(r"`(?:[\w/]+\.)*(\w+)(?:\([^`]*\))?`", page))
    assert len(words) > 90 and sorted(words - known) == []


def test_every_folder_of_the_package_is_named() -> None:
    folders = [p for p in (ROOT / "g4spec").rglob("*") if p.is_dir() and any(p.glob("*.py"))]
    missing = {str(p.relative_to(ROOT)) for p in folders if f"{p.name}/" not in PAGE}
    assert missing == {"g4spec/measure/prompts"}
