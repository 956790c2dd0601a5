"""Default sampling options: the model file's own recommendation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4spec.cli.render import Output
from g4spec.errors import InputError

if TYPE_CHECKING:
    from g4spec.ops.sampling import Sampler

PREFIX = "general.sampling."
"""Prefix of the GGUF keys; llama.cpp reads them, too. `convert` writes them from
generation_config.json."""
FIELDS = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
"""Part of a GGUF key after PREFIX, and parameter of `chat` and `serve` -> field of `Sampler`."""
OPTIONS = FIELDS | {"top_n_sigma": "top_n_sigma"}
"""The same, with parameters for which GGUF has no key."""
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Values if neither the command line nor the file has one: no filtering."""


def given(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling options among a command's parameters, by field; None: not given."""
    return {field: params[name] for name, field in OPTIONS.items()}


def sampler(path: Path, out: Output, **options: float | None) -> Sampler:
    """Return the sampler of a target, and show a note on values that come from its file.

    Each value is that of `options` (field names of `Sampler`), else the file's, else DEFAULTS.
    """
    from g4spec.gguf import GGUF
    from g4spec.ops.sampling import Sampler

    with GGUF(path) as file:
        found = {key: file.kv[key] for key in file.kv if key.startswith(PREFIX)}
    values: dict[str, Any] = dict(DEFAULTS)
    from_file = []
    for name, field in FIELDS.items():
        if PREFIX + name in found and options.get(field) is None:
            values[field] = _number(path, PREFIX + name, found[PREFIX + name])
            from_file.append(f"{name} {values[field]:g}")
    if from_file:
        out.note(f"sampling: {', '.join(from_file)}, from {PREFIX}* of {path.name}")
    if unknown := sorted(set(found) - {PREFIX + name for name in FIELDS}):
        out.note(f"ignored: {', '.join(unknown)} of {path.name}")
    values |= {name: value for name, value in options.items() if value is not None}
    values["top_k"] = max(int(values["top_k"]), 0)
    return Sampler(**values)


def _number(path: Path, key: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise InputError(f"{path}: {key}", expected="a finite number", found=repr(value)[:80])
