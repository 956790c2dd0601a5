"""Bytes of quantized matrices in GPU memory; `held` defines their layout."""

from __future__ import annotations

import numpy as np

from g4spec import quant
from g4spec.gguf.reader import TensorInfo


def _dtype(bits: int, scales: int) -> np.dtype[np.void]:
    codes = [("q", "u1", (8, 16))] if bits == 4 else [("low", "u1", (2, 32)), ("high", "u1", 32)]
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
}
"""Blocks of the types that are rewritten."""


def block_bytes(name: str) -> int:
    """Return the bytes in memory of a block of a quantized type."""
    return BLOCKS[name].itemsize if name in BLOCKS else quant.get(name).block_bytes


def row_bytes(name: str, columns: int) -> int:
    """Return the bytes in memory of a row of `columns` values."""
    form = quant.get(name)
    return form.row_bytes(columns) // form.block_bytes * block_bytes(name)


def tensor_bytes(t: TensorInfo) -> int:
    """Return the bytes in memory of a tensor that stays quantized."""
    form = t.format
    return t.nbytes // form.block_bytes * block_bytes(form.name) if form.quantized else t.nbytes
