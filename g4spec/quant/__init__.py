"""Quant types. Each file in `formats/` defines one as FORMAT."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import numpy as np

from g4spec.errors import Unsupported, UsageError
from g4spec.quant import formats
from g4spec.quant.format import Format, ScaleFactors, Unrepresentable, is_valid_shape
from g4spec.quant.sizes import FIRST_CLASHING_TYPE, FORMATS, REMOVED

__all__ = [
    "FIRST_CLASHING_TYPE",
    "Format",
    "ScaleFactors",
    "Unrepresentable",
    "block_dtype",
    "by_type",
    "find_type",
    "get",
    "is_valid_shape",
    "readable",
    "writable_names",
]


@cache
def readable() -> dict[str, Format]:
    """Return name -> type for all types that can be dequantized."""
    found = [
        importlib.import_module(f"{formats.__name__}.{info.name}").FORMAT
        for info in pkgutil.iter_modules(formats.__path__)
    ]
    return {f.name: f for f in sorted(found, key=lambda f: f.type)}


@cache
def _all() -> dict[str, Format]:
    return {**{f.name: f for f in FORMATS}, **readable()}


@cache
def _by_type() -> dict[int, Format]:
    return {f.type: f for f in _all().values()}


def writable_names() -> list[str]:
    """Return the names of types that can be written, for example with `--type`."""
    return [name for name, form in readable().items() if form.encode is not None]


def get(name: str) -> Format:
    """Return a type by name, in any case. Raises UsageError for an unknown name."""
    found = _all().get(name.lower())
    if found is None:
        raise UsageError(
            "unknown tensor type", expected=f"one of {', '.join(writable_names())}", found=name
        )
    return found


def block_dtype(name: str) -> np.dtype[np.void]:
    """Return the fields of a block of a quantized type: `DTYPE` of its file."""
    dtype: np.dtype[np.void] = importlib.import_module(f"{formats.__name__}.{name}").DTYPE
    return dtype


def find_type(number: int) -> Format | None:
    """Return upstream's type with this number, or None."""
    return _by_type().get(number)


def by_type(number: int, name: str = "a tensor") -> Format:
    """Return the type with this number. Raises Unsupported with the tensor's name if unknown."""
    form = _by_type().get(number)
    if form is None:
        fix = None
        if old := REMOVED.get(number):
            fix = f"use a Q4_0 or IQ4_NL file: this is {old}, which llama.cpp no longer has"
        elif upstream := _upstream_name(number):
            fix = f"update g4spec: this is type {upstream} of llama.cpp"
        elif number >= FIRST_CLASHING_TYPE:
            fix = (
                "type numbers from 41 on differ between forks of llama.cpp; "
                "convert with upstream's tools instead"
            )
        raise Unsupported(f"{name}: unknown ggml type number {number}", fix=fix)
    return form


def _upstream_name(number: int) -> str | None:
    """Return the name of a type that only the gguf package knows. It is the authority on type
    numbers, and may be newer than this package."""
    from gguf import GGMLQuantizationType  # 40 ms

    numbers = {int(t): t.name for t in GGMLQuantizationType}
    return numbers.get(number)
