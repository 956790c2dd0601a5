"""Cache types: how a row of keys or values is stored on a GPU.

Everything that differs between types is here, in `cuda_kv.quantize` and `dequantize` (torch), and
in `cuda/include/cache_types.cuh` (kernels). Imports no torch, so `doctor` computes the same sizes
as the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["f16", "q8_0"]
"""Name of a cache type: a value of `--cache-type`, and the quant type that the CPU rounds to."""


@dataclass(frozen=True, slots=True)
class CacheType:
    """A cache type.

    Attributes:
        number: template argument `Q8` of the decode kernels.
        struct: struct of the prefill kernels, in cache_types.cuh.
        value_bytes: bytes of a value.
        block: values that share a half-precision scale; 0: there are no scales.
    """

    number: int
    struct: str
    value_bytes: int
    block: int = 0

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of `columns` values."""
        return columns * self.value_bytes + (columns // self.block * 2 if self.block else 0)

    @property
    def bits(self) -> float:
        """Bits per value, scales included."""
        return 8 * self.value_bytes + (16 / self.block if self.block else 0)


TYPES: dict[Kind, CacheType] = {
    "f16": CacheType(0, "F16Cache", 2),
    "q8_0": CacheType(1, "Q8Cache", 1, 32),
}
"""All cache types, the default first."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Names of the cache types on a GPU. On a CPU the cache is always F32."""
