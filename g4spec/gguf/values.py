"""GGUF metadata values with exact types: upstream's loader rejects a U32 where it expects I32.

Source: ggml `docs/gguf.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from numpy.typing import NDArray


class ValueType(IntEnum):
    """Types of metadata values, numbered as in the file."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


@dataclass(frozen=True, slots=True)
class Value:
    """One metadata value.

    Attributes:
        type: type of the value.
        data: Python scalar, or a sequence if `type` is ARRAY.
        item: type of the entries of an array, else None.
    """

    type: ValueType
    data: Any
    item: ValueType | None = None


KV = dict[str, Value]
"""Metadata key -> value, in file order."""


def u32(x: int) -> Value:
    return Value(ValueType.U32, int(x))


def f32(x: float) -> Value:
    return Value(ValueType.F32, float(x))


def boolean(x: bool) -> Value:
    return Value(ValueType.BOOL, bool(x))


def string(x: str) -> Value:
    return Value(ValueType.STRING, x)


def array(item: ValueType, data: Sequence[Any] | NDArray[Any]) -> Value:
    """Return an array value; `data` may be a numpy array for number types."""
    return Value(ValueType.ARRAY, data, item)
