"""Typed access to a configuration. Callers state which keys are required; a wrong type raises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, overload

from g4spec.errors import InputError, Unsupported

MAX_LAYERS = 512
"""llama.cpp's LLAMA_MAX_LAYERS."""
MAX_SIZE = 1 << 24
"""Maximum of a width, a count or a context length: a hundred times that of any model, and vectors
of this size still fit into memory."""

T = TypeVar("T")
_MISSING = object()


class Fields:
    """A mapping (config.json or GGUF metadata) with typed getters.

    Args:
        raw: the mapping. `where`: its name in errors, e.g. "config.json".
        prefix: put before each key, e.g. "gemma4." for GGUF metadata.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.raw, self.where, self.prefix = raw, where, prefix

    def has(self, key: str) -> bool:
        return self.raw.get(self.prefix + key) is not None

    @overload
    def get(self, kind: type[T], key: str) -> T: ...
    @overload
    def get(self, kind: type[T], key: str, default: None) -> T | None: ...
    @overload
    def get(self, kind: type[T], key: str, default: T) -> T: ...
    def get(self, kind: type[Any], key: str, default: Any = _MISSING) -> Any:
        """Return the value of `key` as `kind` (int, float, bool, str, dict); ints become floats.

        Raise InputError if it is missing without a default, has another type, or is a float that
        is not finite.
        """
        value = self.raw.get(self.prefix + key)
        if value is None:
            if default is _MISSING:
                raise InputError(f"{self.where}: key {self.prefix + key!r} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                pass  # reported below
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InputError(
                f"{self.where}: key {self.prefix + key!r}",
                expected=kind.__name__,
                found=f"{value!r:.80}",
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(
                f"{self.where}: key {self.prefix + key!r}", expected="a finite number", found=value
            )
        return value

    def list(self, kind: type[T], key: str, default: list[T] | None = None) -> list[T]:
        """Return the value of `key` as a list of `kind`."""
        value = self.raw.get(self.prefix + key)
        if value is None and default is not None:
            return default
        if not isinstance(value, list | tuple) or not all(
            isinstance(v, kind) and (kind is bool or not isinstance(v, bool)) for v in value
        ):
            raise InputError(
                f"{self.where}: key {self.prefix + key!r}",
                expected=f"a list of {kind.__name__}",
                found=f"{value!r:.80}",
            )
        return [v for v in value if isinstance(v, kind)]

    def positive(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Return an int in 1 .. `most`; raise InputError otherwise."""
        value = self.get(int, key) if default is None else self.get(int, key, default)
        if not 0 < value <= most:
            raise InputError(
                f"{self.where}: {self.prefix + key}",
                expected="> 0" if value <= 0 else f"at most {most}",
                found=value,
            )
        return value

    def layers(self, key: str) -> int:
        """Return a number of layers, 1 .. MAX_LAYERS."""
        return self.positive(key, most=MAX_LAYERS)

    def vocabulary(self) -> int:
        """Return `vocab_size`, or the number of tokens of a GGUF file without it."""
        tokens = Fields(self.raw, self.where).list(str, "tokenizer.ggml.tokens", [])
        return self.get(int, "vocab_size", len(tokens))

    def require_plain_positions(self) -> None:
        """Raise InputError if a GGUF file scales the positions of RoPE. llama.cpp does so for a
        factor other than 0 and 1, unless the type of scaling is "none"."""
        if self.raw.get(f"{self.prefix}rope.scaling.type") != "none":
            for key in ("rope.scaling.factor", "rope.scale_linear"):
                self.require(key, (None, 0, 1), None)

    def sub(self, key: str) -> Fields:
        """Return the nested mapping under `key`, empty if absent."""
        return Fields(self.get(dict, key, {}), f"{self.where}: {key}")

    def reject_unknown(self, *keys: str, fix: str | None = None) -> None:
        """Raise Unsupported for keys that are not in `keys`, which would be ignored silently. Keys
        that are null are allowed."""
        unknown = sorted(str(k) for k, v in self.raw.items() if v is not None and k not in keys)
        if unknown:
            raise Unsupported(
                f"{self.where}: key {unknown[0]!r} is not supported",
                expected=", ".join(keys),
                found=f"{self.raw[unknown[0]]!r:.80}",
                fix=fix,
            )

    def require(self, key: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Raise InputError unless the value is one of `allowed`."""
        value = self.raw.get(self.prefix + key, default)
        if value not in allowed:
            raise InputError(
                f"{self.where}: {self.prefix + key}", expected=f"one of {allowed}", found=value
            )
