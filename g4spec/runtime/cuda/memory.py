"""What a run takes of a GPU's memory, computed before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from g4spec.gguf.reader import TensorInfo
from g4spec.models.spec import MAX_STEP_ROWS, CacheShape
from g4spec.runtime.cuda.kv import Kind, capacity, row_bytes

HALF, FLOAT = 2, 4

PACKING = 768 << 20
"""Most that rearranging weights takes beside them (`packing.CHUNK`), and its rounding."""

FIXED = 512 << 20
"""Kernels, cuBLAS workspaces, graphs, and what the allocator cannot use."""


class Card:
    """A GPU (`g4spec.runtime.devices.Budget`)."""

    def __init__(self, device: torch.device, cache_type: Kind) -> None:
        self.device, self.cache_type = device, cache_type

    def weights(self, tensors: Iterable[TensorInfo]) -> int:
        """As in the file, but for rows that packing adds to whole groups; integers as 64 bits."""
        found = list(tensors)
        return sum(max(t.nbytes, 8 * _count(t) if t.format.integer else 0) for t in found)

    def cache(self, shapes: Sequence[CacheShape], n_ctx: int, slack: int) -> int:
        return sum(
            capacity(n_ctx + MAX_STEP_ROWS, s.window, slack)
            * row_bytes(s.n_kv, s.head_dim, self.cache_type)
            for s in shapes
        )

    def workspace(self, config: Any, n_ctx: int, chunk: int) -> int:
        """Logits of the largest steps, a chunk's rows, one dequantized matrix, and what is
        fixed."""
        logits = 4 * FLOAT * MAX_STEP_ROWS * config.n_vocab
        rows = chunk * (8 * FLOAT * config.n_embd + 6 * HALF * config.row_width)
        matrix = HALF * config.n_embd * max(2 * config.row_width, config.n_vocab)
        heads = config.layers[0].n_head
        attention = 8 * heads * min(chunk, 512) * 2048 + 4 * n_ctx * 2 * 512 * HALF
        return int(logits + rows + matrix + attention + PACKING + FIXED)

    def available(self) -> int:
        """Free memory, and what torch holds without using it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free + held)


def _count(tensor: TensorInfo) -> int:
    out = 1
    for n in tensor.shape:
        out *= n
    return out
