"""Bytes of tensors in GPU memory, without torch. `held` rewrites blocks, `packing` orders them."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np

from g4spec import quant
from g4spec.gguf.header import TensorInfo
from g4spec.quant import formats

FLOAT = 4
"""Bytes of a value that is dequantized while it is loaded (float32)."""
MOST_ROWS = 1 << 19
"""Maximum number of rows of a matrix that kernels read quantized."""
PACKING = 768 << 20
"""Maximum memory for packing besides the weights: a copy of a layer's matrices, or of all its
experts of one kind, and `packing.CHUNK`. The target's token table may be larger; it is packed
before the buffers for long chunks are allocated (`prefill.reader`)."""


def _dtype(bits: int, scales: int) -> np.dtype[np.void]:
    if bits == 4:
        return np.dtype([("q", "u1", (8, 16)), ("scale", "u1", scales // 2), ("d", "<f2")])
    codes = ("low", "u1", (2, 32)), ("high", "u1", 32)
    return np.dtype([*codes, ("scale", "i1", scales), ("d", "<f2")])


BLOCKS: dict[str, np.dtype[np.void]] = {
    "q3_k": _dtype(3, 16),
    "iq3_s": _dtype(4, 8),
    "iq3_xxs": _dtype(4, 8),
    "iq2_s": _dtype(3, 16),
    "iq2_xs": _dtype(3, 16),
    "iq2_xxs": _dtype(3, 8),
    "iq1_m": _dtype(3, 16),
    "iq1_s": _dtype(3, 8),
    "tq1_0": quant.block_dtype("tq2_0"),
    "nvfp4": np.dtype([("scale", "u1", 4), ("d", "<f4"), ("q", "u1", (4, 8))]),
}
"""Blocks of the types that are rewritten."""


@cache
def with_kernels() -> frozenset[str]:
    """Return the tensor types with CUDA kernels: unquantized ones, and those with a `.cuh` file."""
    folder = Path(formats.__file__).parent
    plain = (f.name for f in quant.readable().values() if f.block == 1)
    return frozenset((*(path.stem for path in folder.glob("*.cuh")), *plain))


def unpackable(name: str, columns: int, rows: int, portable: bool) -> str:
    """Describe the matrices of a quantized type that no kernel takes, or return "" if one does.
    They are dequantized while they are loaded. Portable kernels take any number of columns."""
    if name not in with_kernels():
        return f"{name} matrices"
    if rows > MOST_ROWS:
        return f"{name} matrices of {rows} rows"
    return "" if portable or columns % 64 == 0 else f"{name} matrices of {columns} columns"


def block_bytes(name: str) -> int:
    """Return the bytes in GPU memory of the values of one block of a type."""
    if name not in with_kernels():
        return FLOAT * quant.get(name).block
    return BLOCKS[name].itemsize if name in BLOCKS else quant.get(name).block_bytes


def row_bytes(name: str, columns: int) -> int:
    """Return the bytes in memory of a row of `columns` values."""
    form = quant.get(name)
    return form.row_bytes(columns) // form.block_bytes * block_bytes(name)


def tensor_bytes(t: TensorInfo, portable: bool = False) -> int:
    """Return the bytes of a tensor in GPU memory: as in the file, except for rewritten blocks,
    integers (64 bits), and vectors and matrices that no kernel takes (float32)."""
    form, number = t.format, _bytes_per_value(t, portable)
    if number:
        return max(t.nbytes, number * math.prod(t.shape))
    return t.nbytes // form.block_bytes * block_bytes(form.name) if form.quantized else t.nbytes


def _bytes_per_value(t: TensorInfo, portable: bool) -> int:
    """Return the bytes of each value that `CudaBackend.load` unpacks; 0 if it keeps the blocks."""
    if t.format.integer:
        return 8
    if len(t.shape) < 2:
        return FLOAT
    if not t.format.quantized:
        return 0
    *_, rows, columns = t.shape
    return FLOAT if unpackable(t.format.name, columns, rows, portable) else 0
