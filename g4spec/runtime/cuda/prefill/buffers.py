"""Buffers by name: their shapes, total size and allocation."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each buffer."""


def allocate(shapes: Shapes, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate the buffers, uninitialized."""
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }


def nbytes(shapes: Shapes) -> int:
    """Return the size of the buffers in bytes."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
