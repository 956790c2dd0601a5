"""Parameter lists of kernels, read from their source, and the check of a launch against them.

A launch passes its arguments by name. An unknown or missing name, or a tensor of another type than
the pointer's, raises an error before the launch. The driver would not notice: it only knows sizes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from g4spec.runtime.cuda.build import nvrtc

ELEMENTS: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("float", "float2", "float4"), (torch.float32,)),
    **dict.fromkeys(("half", "__half"), (torch.float16,)),
    "__nv_bfloat16": (torch.bfloat16,),
    **dict.fromkeys(("i8", "signed char", "int8_t"), (torch.int8,)),
    **dict.fromkeys(("u8", "unsigned char", "uint8_t"), (torch.uint8,)),
    "u16": (torch.float16, torch.bfloat16),
    **dict.fromkeys(("i32", "int"), (torch.int32,)),
    **dict.fromkeys(("u32", "unsigned", "unsigned int"), (torch.int32, torch.uint32)),
    **dict.fromkeys(("i64", "long long", "int64_t"), (torch.int64,)),
    "u64": (torch.int64, torch.uint64),
}
"""Element type in C -> types of tensors that a pointer to it accepts. `u16` is the bits of a 16-bit
float. A pointer to any other type (`void`, `char`, a struct, a template's type) accepts all."""

SCALARS: dict[str, tuple[type[np.generic], tuple[type, ...]]] = {
    **dict.fromkeys(("i32", "int"), (np.int32, (int, bool, np.int32))),
    **dict.fromkeys(("u32", "unsigned", "unsigned int"), (np.uint32, (int, np.uint32))),
    **dict.fromkeys(("i64", "long long", "int64_t"), (np.int64, (int, np.int64))),
    "u64": (np.uint64, (int, np.uint64)),
    "float": (np.float32, (float, int, np.float32)),
}
"""Type of a number in C -> numpy type of its size, and Python types that are accepted."""


@dataclass(frozen=True)
class Strided:
    """An argument that need not be contiguous: other arguments of the kernel are its strides."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel.

    Attributes:
        type: C type of the number, or of the pointer's target, without `const`.
    """

    name: str
    type: str
    pointer: bool

    @property
    def bytes(self) -> int:
        """Size in the parameter buffer."""
        return 8 if self.pointer else np.dtype(SCALARS[self.type][0]).itemsize


class Signature:
    """The parameters of one kernel, in order.

    Args:
        kernel: file and kernel, for messages.
    """

    def __init__(self, kernel: str, parameters: tuple[Parameter, ...]) -> None:
        self.kernel, self.parameters = kernel, parameters
        # Name; is a pointer; accepted dtypes (None: any) or Python types; numpy type.
        self._checks: list[tuple[str, bool, Any, Any]] = [
            (p.name, True, frozenset(ELEMENTS[p.type]) if p.type in ELEMENTS else None, None)
            if p.pointer
            else (p.name, False, frozenset(SCALARS[p.type][1]), SCALARS[p.type][0])
            for p in parameters
        ]

    def bind(self, arguments: Mapping[str, Any], device: torch.device) -> list[Any]:
        """Return the arguments in the kernel's order: addresses as int, numbers as numpy scalars.

        Args:
            arguments: by name: contiguous (or `Strided`) tensors on `device` or in pinned memory,
                None for a null pointer, and numbers.

        Raises:
            TypeError: a name is unknown or missing, or an argument has the wrong type.
        """
        values: list[Any] = []
        for name, pointer, accepted, number in self._checks:
            try:
                value = arguments[name]
            except KeyError:
                raise self._names(arguments) from None
            if not pointer:
                if type(value) not in accepted:
                    raise self._wrong(name, _spelled(accepted), type(value).__name__)
                values.append(number(value))
                continue
            if value is None:
                values.append(0)
                continue
            if isinstance(value, torch.Tensor):
                if not value.is_contiguous():
                    raise self._wrong(name, "a contiguous tensor", f"strides {value.stride()}")
            elif isinstance(value, Strided):
                value = value.tensor
            else:
                raise self._wrong(name, "a tensor or None", type(value).__name__)
            if accepted is not None and value.dtype not in accepted:
                raise self._wrong(name, f"a tensor of {_spelled(accepted)}", value.dtype)
            if value.device != device and not value.is_pinned():
                raise self._wrong(name, f"a tensor on {device}", value.device)
            values.append(value.data_ptr())
        if len(arguments) != len(values):
            raise self._names(arguments)
        return values

    def _wrong(self, name: str, expected: str, found: object) -> TypeError:
        return TypeError(f"{self.kernel}, argument {name}: expected {expected}, found {found}")

    def _names(self, arguments: Mapping[str, Any]) -> TypeError:
        expected = [p.name for p in self.parameters]
        missing = [name for name in expected if name not in arguments]
        unknown = [name for name in arguments if name not in expected]
        return TypeError(
            f"{self.kernel}: expected arguments {', '.join(expected)}; "
            f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
        )


def _spelled(types: frozenset[Any]) -> str:
    return " or ".join(sorted(t.__name__ if isinstance(t, type) else str(t) for t in types))


def kernel_of(instance: str) -> str:
    """Return the kernel of a name expression: "norm" of "norm<2>"."""
    return re.split(r"[<(]", instance)[0].strip()


@functools.cache
def signatures(file: str) -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of every kernel that a file defines or includes, by kernel."""
    return parse("\n".join(nvrtc.closure(file).values()))


def signature(file: str, instance: str) -> Signature:
    """Return the signature of an instance, for instance of "norm<2>" in "norm.cu"."""
    return Signature(f"{file}: {instance}", signatures(file)[kernel_of(instance)])


_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+((?:.*\\\n)*.*)$", re.MULTILINE)
_KERNEL = re.compile(
    r"__global__\s+(?:(?:void|__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\))\s+)*(\w+)\s*\(([^()]*)\)"
)
_PARAMETER = re.compile(r"(?:const\s+)?([\w:]+(?:\s+(?:long|int|char|short))*)\s*(\*?)\s*(\w+)")


def parse(source: str) -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of the `__global__` functions in a source, by function.

    A macro without arguments is expanded where it is a whole parameter.

    Raises:
        ValueError: a parameter is neither a pointer nor a number of a type in `SCALARS`.
    """
    source = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
    macros = {m[1]: m[2].replace("\\\n", " ") for m in _MACRO.finditer(source)}
    kernels = {}
    for match in _KERNEL.finditer(source):
        text = ",".join(macros.get(part.strip(), part) for part in match[2].split(","))
        parts = [part.strip() for part in text.split(",") if part.strip()]
        kernels[match[1]] = tuple(_parameter(match[1], part) for part in parts)
    return kernels


def _parameter(kernel: str, text: str) -> Parameter:
    match = _PARAMETER.fullmatch(text)
    if match is None or not (match[2] or match[1] in SCALARS):
        raise ValueError(f"{kernel}: cannot read the parameter '{text}'")
    return Parameter(match[3], " ".join(match[1].split()), bool(match[2]))
