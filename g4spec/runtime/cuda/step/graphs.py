"""Parts of cycles recorded as CUDA graphs: one launch for all their kernels, without Python
between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from g4spec.runtime.cuda.build import launch


class Pool:
    """Memory that CUDA graphs share. It has a graph of its own, because torch cannot record into a
    pool again once all its graphs are gone, as after a first recording that has failed."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()

        def fill() -> tuple[torch.Tensor, ...]:
            return (torch.zeros(1, device=device),)

        fill()
        self._first = Capture(fill, self)


class Capture:
    """The kernel launches of `run` as one CUDA graph. Recording does not run them.

    Args:
        run: function that has run at least once before.
        pool: memory that the graph shares with others, or None: its own.
        overlap: let kernels begin before the one before them has ended (`launch.Kernel`).

    Attributes:
        outputs: what `run` returned; each replay writes it anew.
    """

    def __init__(
        self, run: Callable[[], tuple[torch.Tensor, ...]], pool: Pool | None, overlap: bool = True
    ) -> None:
        torch.cuda.synchronize()
        handle = pool.handle if pool else None
        self.graph = torch.cuda.CUDAGraph()
        order = nullcontext() if overlap else launch.in_order()
        with _nothing_collected(), order, torch.cuda.graph(self.graph, pool=handle):
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
