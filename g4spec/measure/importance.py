"""Computes an importance matrix: the sum of squared inputs of every matrix column over a text.

As llama-imatrix (llama.cpp `tools/imatrix`): for the matrices of the layers, in chunks of 512
tokens that begin with BOS; experts are counted separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from g4spec.gguf.imatrix import Entry, Imatrix
from g4spec.measure import text_chunks
from g4spec.ops.reference import Ops
from g4spec.runtime.engine import Engine

Progress = Callable[[int, int], None]
PREFIX = "blk."
"""Name prefix of the counted matrices: the token embedding is not used in a matmul."""


class InputSums(Ops):
    """The reference ops, which also sum the squared inputs of the model's matrices.

    Args:
        weights: the model's weights by name. `linear` identifies a matrix by its storage address,
            and an expert by its offset there.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {
            w.untyped_storage().data_ptr(): name
            for name, w in weights.items()
            if name.startswith(PREFIX) and w.ndim > 1
        }
        self._experts = {name: w.shape[0] if w.ndim > 2 else 1 for name, w in weights.items()}
        self._size = {name: w.numel() // self._experts[name] for name, w in weights.items()}
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, *, partial_sums: bool = False
    ) -> torch.Tensor:
        name = self._names.get(weight.untyped_storage().data_ptr())
        if name is not None:
            expert, rest = divmod(int(weight.storage_offset()), self._size[name])
            if not rest:  # gate and up in one matrix have the same input: counted with the gate
                self._add(name, expert, x)
        return super().linear(x, weight, partial_sums=partial_sums)

    def _add(self, name: str, expert: int, x: torch.Tensor) -> None:
        if name not in self.sums:
            n = self._experts[name]
            self.sums[name] = torch.zeros(n, x.shape[1], dtype=torch.float64)
            self.counts[name] = torch.zeros(n, dtype=torch.int64)
        self.sums[name][expert] += x.double().square().sum(0)
        self.counts[name][expert] += len(x)

    def entries(self) -> dict[str, Entry]:
        """Return the sums and counts by matrix."""
        return {
            name: Entry(np.asarray(sums, np.float32), np.asarray(self.counts[name]))
            for name, sums in self.sums.items()
        }


def collect(
    engine: Engine,
    parts: Sequence[list[int]],
    dataset: str,
    progress: Progress = lambda done, total: None,
) -> Imatrix:
    """Read the chunks of `text_chunks.split_text` and return the importance matrix.

    Args:
        engine: on the CPU.
        dataset: name of the text's file.
    """
    model: Any = engine.target.model
    plain, model.ops = model.ops, InputSums(model.w)
    try:
        for i, ids in enumerate(parts):
            text_chunks.read_chunk(engine, ids)
            progress(i + 1, len(parts))
        found = model.ops.entries()
    finally:
        model.ops = plain
    return Imatrix(found, len(parts), len(parts[0]), [dataset])
