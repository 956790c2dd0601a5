"""What targets and drafts are. A file in this folder that can claim a checkpoint is a kind."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Container, Iterable
from types import ModuleType

from g4spec.errors import InputError, UsageError

TARGETS = ("gemma4",)
"""Kinds that are targets; every other kind with an ARCH is a draft."""


@functools.cache
def kinds() -> dict[str, ModuleType]:
    """Name -> module, for every kind that has files. The name is the GGUF architecture, or NAME
    where several kinds share one."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "claims"):
            found[getattr(module, "NAME", module.ARCH)] = module
    return found


def targets() -> dict[str, ModuleType]:
    """Name -> module of each kind of target."""
    return {name: m for name, m in kinds().items() if name in TARGETS}


def drafts() -> dict[str, ModuleType]:
    """Name -> module of each kind of draft that lives in a file."""
    return {name: m for name, m in kinds().items() if name not in TARGETS}


def architectures() -> list[str]:
    """Every `general.architecture` that a file may have."""
    return sorted({arch for m in kinds().values() for arch in _archs(m)})


def find_kind(arch: object, tensors: Container[str]) -> ModuleType | None:
    """The kind of a GGUF file, or None if there is no code for it.

    Kinds that share an architecture are told apart by their UNIQUE_TENSORS.
    """
    sharing = [m for m in kinds().values() if arch in _archs(m)]
    marked = [
        m for m in sharing if any(name in tensors for name in getattr(m, "UNIQUE_TENSORS", ()))
    ]
    plain = [m for m in sharing if not getattr(m, "UNIQUE_TENSORS", ())]
    return next(iter(marked + plain), None)


def wrong_role(path: object, kind: ModuleType, fix: str | None = None) -> InputError:
    """The error for a target where a draft is wanted, or a draft where a target is. `fix`: what to
    do, where it is not a matter of -m and -md."""
    if kind.ARCH in TARGETS:
        fix = fix or "this is a target: pass it with -m, and a draft made for it with -md"
        return InputError(f"{path}: not a draft", found=kind.TITLE, fix=fix)
    fix = fix or "this is a draft: pass it with -md, and its target with -m"
    return InputError(f"{path}: not a target", found=kind.TITLE, fix=fix)


def require_confidence(path: object, kind: ModuleType, tensors: Iterable[str]) -> None:
    """UsageError for a draft that does not say how sure it is of a token: a kind that never does
    (no CONFIDENCE), or one without that head, as the names of its tensors show."""
    heads = getattr(kind, "CONFIDENCE", ())
    if not any(name.endswith(heads) for name in tensors if heads):
        raise UsageError(
            f"--draft-p-min: {path} has no confidence head",
            found=kind.TITLE,
            expected="a DSpark draft with one",
            fix="leave it out; --draft-max bounds how much is drafted",
        )


def _archs(module: ModuleType) -> tuple[str, ...]:
    return tuple(getattr(module, "ARCHS", (module.ARCH,)))
