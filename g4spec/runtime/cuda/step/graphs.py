"""Parts of cycles recorded as CUDA graphs: one launch for all their kernels, without Python
between."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from g4spec.runtime.cuda.build import launch

MODE = "thread_local"
"""Other threads of the process may allocate memory and wait for a GPU during a recording."""

_one_at_a_time = threading.Lock()
"""Held while a thread records; several engines share a GPU's stream for it."""


class Pool:
    """Memory that CUDA graphs share. It has a graph of its own, because torch cannot record into a
    pool again once all its graphs are gone, as after a first recording that has failed."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()

        def fill() -> tuple[torch.Tensor, ...]:
            return (torch.zeros(1, dtype=torch.uint8, device=device),)

        fill()
        self._first = Capture(fill, self)


class Capture:
    """The kernel launches of `run` as one CUDA graph. Recording does not run them.

    Args:
        run: what has nothing to prepare: no weights to pack, no constants to write. Kernels are
            compiled and loaded as they come.
        pool: memory that the graph shares with others, or None: its own.
        overlap: let kernels begin before the one before them has ended (`launch.Kernel`).

    Attributes:
        outputs: what `run` returned; each replay writes it anew.
    """

    def __init__(
        self, run: Callable[[], tuple[torch.Tensor, ...]], pool: Pool | None, overlap: bool = True
    ) -> None:
        handle = pool.handle if pool else None
        self.graph = torch.cuda.CUDAGraph()
        order = nullcontext() if overlap else launch.in_order()
        stream = _capture_stream(torch.cuda.current_device())
        recording = torch.cuda.graph(self.graph, handle, stream, MODE)
        with _one_at_a_time, _nothing_collected(), order, recording:
            self.outputs = run()

    def replay(self) -> None:
        self.graph.replay()


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream for recordings on a GPU. The default of `torch.cuda.graph` belongs to the
    GPU that the process recorded on first, and makes it the current one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class OpByOp:
    """Runs `run` at each replay, in place of a graph for which there is no memory."""

    outputs: tuple[torch.Tensor, ...]

    def __init__(self, run: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self._run = run

    def replay(self) -> None:
        self.outputs = self._run()


Recording = Capture | OpByOp


def record(
    run: Callable[[], tuple[torch.Tensor, ...]], pool: Pool | None, overlap: bool = True
) -> Recording:
    """Return `run` as a graph (see `Capture`), or op by op if there is no memory for one: graphs
    keep what they have used."""
    try:
        return Capture(run, pool, overlap)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()  # torch frees what it keeps, but not during a capture
    try:
        return Capture(run, pool, overlap)
    except torch.OutOfMemoryError:
        return OpByOp(run)


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
