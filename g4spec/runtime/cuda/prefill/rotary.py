"""Cosines and sines for the rotary embeddings of a chunk."""

from __future__ import annotations

import torch

from g4spec.errors import InputError
from g4spec.runtime.cuda.prefill.prefill_attention import Chunk

STILL = 1e-20
"""Angle per position, in radians, up to which a pair counts as not rotated."""


def rotating_freqs(freqs: torch.Tensor) -> torch.Tensor:
    """Return the frequencies of the leading pairs that rotate. Raise InputError if a pair without
    rotation lies between them."""
    count = int((freqs > STILL).sum())
    if not bool((freqs[:count] > STILL).all()):
        raise InputError(
            "rope_freqs.weight",
            expected="pairs that rotate before pairs that do not",
            fix="use `device` cpu",
        )
    return freqs[:count].contiguous()


class RotaryTables:
    """Computes the cosines and sines of a chunk once for all layers that share frequencies."""

    def __init__(self) -> None:
        self._rotating: dict[torch.Tensor, torch.Tensor] = {}
        self._tables: tuple[Chunk, dict[torch.Tensor, torch.Tensor]] | None = None

    def __call__(self, freqs: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Return cosines and sines [T, pairs, 2] of the pairs that rotate."""
        if self._tables is None or self._tables[0] is not chunk:
            self._tables = chunk, {}
        tables = self._tables[1]
        if freqs not in tables:
            if freqs not in self._rotating:
                self._rotating[freqs] = rotating_freqs(freqs)
            angle = chunk.positions.to(torch.float32)[:, None] * self._rotating[freqs]
            tables[freqs] = torch.stack((angle.cos(), angle.sin()), dim=-1)
        return tables[freqs]
