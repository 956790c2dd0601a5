"""Quantization error of each tensor whose type changed between two GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

from g4spec.convert.rewrite import stored_tensor
from g4spec.convert.tensors import worker_pool
from g4spec.gguf import GGUF
from g4spec.validate.compare import Difference, difference


@dataclass(frozen=True, slots=True)
class Loss:
    """Quantization error of one tensor. `count`: number of values; `bits`: bits per value, scales
    included."""

    difference: Difference
    count: int
    bits: float

    def json(self) -> dict[str, Any]:
        found = self.difference
        return {
            "name": found.name,
            "type": found.type,
            "source": found.source,
            "relative_rms": found.relative_rms,
            "max_abs": found.max_abs,
            "bits_per_weight": self.bits,
            "weights": self.count,
        }


@dataclass(frozen=True, slots=True)
class Total:
    """Quantization error of all tensors whose type changed. `relative_rms`: RMS over the tensors,
    weighted by their number of values; `bits`: mean bits per value."""

    relative_rms: float
    max_abs: float
    bits: float

    def json(self) -> dict[str, Any]:
        return {
            "relative_rms": self.relative_rms,
            "max_abs": self.max_abs,
            "bits_per_weight": self.bits,
        }


def losses(
    source: Path, out: Path, progress: Callable[[int, int], None] | None = None
) -> list[Loss]:
    """Compare each tensor of GGUF `out` that has values and whose type changed with GGUF
    `source`."""
    with GGUF(source) as old, GGUF(out) as new, worker_pool() as pool:
        changed = [
            name
            for name, tensor in new.tensors.items()
            if old.tensors[name].format is not tensor.format and prod(tensor.shape) > 0
        ]

        def measure(name: str) -> Difference:
            form = new.tensors[name].format
            return difference(name, form, new.raw(name), stored_tensor(old, name))

        found = []
        for name, result in zip(changed, pool.map(measure, changed), strict=True):
            count = prod(new.tensors[name].shape)
            found.append(Loss(result, count, 8 * new.tensors[name].nbytes / count))
            if progress is not None:
                progress(len(found), len(changed))
        return found


def total(found: list[Loss]) -> Total | None:
    """Return the error of all tensors, or None if `found` is empty."""
    count = sum(loss.count for loss in found)
    if not count:
        return None
    square = sum(loss.count * loss.difference.relative_rms**2 for loss in found)
    return Total(
        sqrt(square / count),
        max(loss.difference.max_abs for loss in found),
        sum(loss.count * loss.bits for loss in found) / count,
    )
