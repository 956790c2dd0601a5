"""Parts of cycles recorded as CUDA graphs: one launch for all their kernels, without Python
between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from g4spec.runtime.cuda.build import launch


class Capture:
    """The kernel launches of `run` as one CUDA graph. Recording does not run them.

    Args:
        run: function that has run at least once before.
        pool: memory that the graph shares with others.
        overlap: let kernels begin before the one before them has ended (`launch.Kernel`).

    Attributes:
        outputs: what `run` returned; each replay writes it anew.
    """

    def __init__(
        self, run: Callable[[], tuple[torch.Tensor, ...]], pool: Any, overlap: bool = True
    ) -> None:
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        order = nullcontext() if overlap else launch.in_order()
        with _nothing_collected(), order, torch.cuda.graph(self.graph, pool=pool):
            self.outputs = run()

    def replay(self) -> None:
        self.graph.replay()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable garbage collection: freeing another graph during a recording would abort it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
