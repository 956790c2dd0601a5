"""Registry of target and draft kinds. Every module in this folder with `claims` is a kind."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Container, Iterable, Mapping
from types import ModuleType
from typing import Any

from g4spec.errors import InputError, Unsupported, UsageError

TARGETS = ("gemma4",)
"""Kinds that are targets; every other kind with an ARCH is a draft."""
ADAPTER = "adapter.type"
"""Key that only LoRA adapters have; their architecture is that of their model."""
TYPE, ARCHITECTURE = "general.type", "general.architecture"
_ENCODERS = (
    "encoders of vision and audio (mmproj)",
    "name the GGUF file of the model itself, which runs without them",
)
OTHER_FILES = {
    ADAPTER: (
        "a LoRA adapter",
        "merge it into the checkpoint of its model, and convert the result",
    ),
    "imatrix": ("an importance matrix", "name the model instead"),
    "mmproj": _ENCODERS,
    "clip": _ENCODERS,
    "controlvector": ("a control vector", "name the model itself; none can be added to it"),
}
"""Type or architecture of GGUF files that are no models -> what they are, and what to do."""


@functools.cache
def kinds() -> dict[str, ModuleType]:
    """Return name -> module of every kind that has model files. The name is the GGUF architecture,
    or NAME if several kinds share one."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "claims"):
            found[getattr(module, "NAME", module.ARCH)] = module
    return found


def targets() -> dict[str, ModuleType]:
    """Return name -> module of every target kind."""
    return {name: m for name, m in kinds().items() if name in TARGETS}


def drafts() -> dict[str, ModuleType]:
    """Return name -> module of every draft kind that has model files."""
    return {name: m for name, m in kinds().items() if name not in TARGETS}


def architectures() -> list[str]:
    """Return every supported `general.architecture`."""
    return sorted({arch for m in kinds().values() for arch in _archs(m)})


def find_kind(arch: object, tensors: Container[str]) -> ModuleType | None:
    """Return the kind of a GGUF file, or None if it is not supported.

    Kinds that share an architecture are distinguished by their UNIQUE_TENSORS.
    """
    sharing = [m for m in kinds().values() if arch in _archs(m)]
    marked = [
        m for m in sharing if any(name in tensors for name in getattr(m, "UNIQUE_TENSORS", ()))
    ]
    plain = [m for m in sharing if not getattr(m, "UNIQUE_TENSORS", ())]
    return next(iter(marked + plain), None)


def other_file(keys: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what a GGUF file with these metadata is if it is no model, and what to do; or None."""
    kinds = (ADAPTER if ADAPTER in keys else "", *map(keys.get, (TYPE, ARCHITECTURE)))
    return next((OTHER_FILES[str(kind)] for kind in kinds if str(kind) in OTHER_FILES), None)


def refuse_other_files(path: object, keys: Mapping[str, Any]) -> None:
    """Raise Unsupported if a GGUF file with these metadata is no model."""
    if (other := other_file(keys)) is not None:
        raise Unsupported(f"{path}: {other[0]}, not a model", fix=other[1])


def wrong_role(path: object, kind: ModuleType, fix: str | None = None) -> InputError:
    """Return the error for a target given as draft, or a draft given as target. `fix` replaces the
    default hint."""
    if kind.ARCH in TARGETS:
        fix = fix or "this is a target: pass it with `target`, and a draft made for it with `draft`"
        return InputError(f"{path}: not a draft", found=kind.TITLE, fix=fix)
    fix = fix or "this is a draft: pass it with `draft`, and its target with `target`"
    return InputError(f"{path}: not a target", found=kind.TITLE, fix=fix)


def require_confidence(path: object, kind: ModuleType, tensors: Iterable[str]) -> None:
    """Raise UsageError unless the draft has a confidence head, judged by the names of its tensors
    and the CONFIDENCE suffixes of its kind."""
    heads = getattr(kind, "CONFIDENCE", ())
    if not any(name.endswith(heads) for name in tensors if heads):
        raise UsageError(
            f"`draft_p_min`: {path} has no confidence head",
            found=kind.TITLE,
            expected="a DSpark draft with one",
            fix="leave out `draft_p_min`; `draft_max` limits the draft length",
        )


def _archs(module: ModuleType) -> tuple[str, ...]:
    return tuple(getattr(module, "ARCHS", (module.ARCH,)))
