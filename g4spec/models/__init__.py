"""What targets and drafts are. A file in this folder that defines ARCH is a kind."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

TARGETS = ("gemma4",)
"""Kinds that are targets; every other kind with an ARCH is a draft."""


def kinds() -> dict[str, ModuleType]:
    """GGUF architecture -> module, for every kind that has files."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if getattr(module, "ARCH", None):
            found[module.ARCH] = module
    return found


def targets() -> dict[str, ModuleType]:
    """Architecture -> module of each kind of target."""
    return {arch: m for arch, m in kinds().items() if arch in TARGETS}


def drafts() -> dict[str, ModuleType]:
    """Architecture -> module of each kind of draft that lives in a file."""
    return {arch: m for arch, m in kinds().items() if arch not in TARGETS}
