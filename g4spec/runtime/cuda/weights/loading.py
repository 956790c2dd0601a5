"""Upload of mapped files to the GPU through pinned memory, at the rate of the link or the disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PIECE = 32 << 20
"""Bytes of a staging buffer; each thread has two of them in pinned memory."""

THREADS = 4


class Uploader:
    """Copies arrays of bytes to the GPU: threads fill pinned buffers, which are copied
    asynchronously while the next ones are filled."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = ThreadPoolExecutor(THREADS)
        self._pieces = [
            torch.empty(PIECE, dtype=torch.uint8).pin_memory() for _ in range(2 * THREADS)
        ]
        self._sent: list[Any] = [torch.cuda.Event() for _ in self._pieces]  # type: ignore[no-untyped-call]
        for event in self._sent:
            event.record()
        self._turn = 0

    def __call__(self, data: NDArray[np.uint8]) -> torch.Tensor:
        """Copy an array to the device; return uint8 [n]."""
        out = torch.empty(data.size, dtype=torch.uint8, device=self.device)
        waiting: list[tuple[Any, int, int]] = []
        for at in range(0, data.size, PIECE):
            if len(waiting) == THREADS:
                self._send(out, *waiting.pop(0))
            self._turn = (self._turn + 1) % len(self._pieces)
            part = data[at : at + PIECE]
            waiting.append((self._pool.submit(self._fill, self._turn, part), self._turn, at))
        for job in waiting:
            self._send(out, *job)
        return out

    def _fill(self, piece: int, data: NDArray[np.uint8]) -> int:
        self._sent[piece].synchronize()
        np.copyto(self._pieces[piece].numpy()[: data.size], data)
        return data.size

    def _send(self, out: torch.Tensor, filled: Any, piece: int, at: int) -> None:
        size = filled.result()
        out[at : at + size].copy_(self._pieces[piece][:size], non_blocking=True)
        self._sent[piece].record()
