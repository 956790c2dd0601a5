"""Buffers by name, so that what they take is known before they are made."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each buffer."""


def allocate(shapes: Shapes, device: torch.device) -> dict[str, torch.Tensor]:
    """The buffers, with whatever is in memory."""
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }


def nbytes(shapes: Shapes) -> int:
    """Bytes they take."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
