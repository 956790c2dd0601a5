"""Parts of cycles recorded as CUDA graphs: launched at once, without Python between their
kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Capture:
    """What `run` launches, as one CUDA graph. Nothing is done until it is played.

    Args:
        run: has run for real before. pool: memory that the graph shares with others.

    Attributes:
        outputs: what `run` returned; each replay writes it anew.
    """

    def __init__(self, run: Callable[[], tuple[torch.Tensor, ...]], pool: Any) -> None:
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with _nothing_collected(), torch.cuda.graph(self.graph, pool=pool):
            self.outputs = run()

    def replay(self) -> None:
        self.graph.replay()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """The end of another graph, found as garbage meanwhile, would end the recording too."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
