"""Steps recorded as CUDA graphs: launched at once, without Python between their kernels.

A step is recorded when its number of rows comes up first, with the inputs of that call: what it
does to caches while it warms up is what it does when it is played. Rows behind the last one are
padding. They stand at positions behind the last one, and what they leave in caches is overwritten
before anything looks there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from g4spec.ops.reference import Ops, Run


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


@dataclass(slots=True)
class _Recording:
    """One size: what is copied in, what comes out.

    Attributes:
        staging: int64 [2, size], pinned: token ids and positions. `copied`: when it may be
            written again.
        numbers: the same on the device. `rows`: further inputs [size, ...].
    """

    staging: torch.Tensor
    copied: torch.cuda.Event
    numbers: torch.Tensor
    rows: list[torch.Tensor]
    graph: Capture | None = None

    def enter(self, ids: Sequence[int], start: int, rows: Sequence[torch.Tensor]) -> None:
        self.copied.synchronize()
        n, size = len(ids), self.staging.shape[1]
        host = self.staging.numpy()
        host[0, :n], host[0, n:] = ids, 0
        host[1] = range(start, start + size)
        self.numbers.copy_(self.staging, non_blocking=True)
        self.copied.record()
        for mine, given in zip(self.rows, rows, strict=True):
            mine[:n].copy_(given)


class Recorded:
    """See `Ops.graph`.

    Args:
        pool: memory that all recordings share; they are played one after the other.
    """

    def __init__(self, ops: Ops, run: Run, sizes: Sequence[int], keep: int, pool: Any) -> None:
        self._ops, self._run, self._keep, self._pool = ops, run, keep, pool
        self._sizes = sorted(sizes)
        self._made: dict[int, _Recording] = {}

    def recording(self, rows: int) -> Capture:
        """What a call of so many rows plays; one must have been made."""
        graph = self._made[next(s for s in self._sizes if s >= rows)].graph
        assert graph is not None
        return graph

    def __call__(
        self, ids: Sequence[int], start: int, *rows: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        n = len(ids)
        size = next((s for s in self._sizes if s >= n), None)
        if size is None:
            return self._run(self._ops.ids(list(ids)), self._ops.positions(start, n), *rows)
        made = self._made.get(size)
        if made is None:
            made = self._recording(size, rows)
            made.enter(ids, start, rows)
            made.graph = self._record(made)
            self._made[size] = made
        else:
            made.enter(ids, start, rows)
        graph = self.recording(size)
        graph.replay()
        outputs = [out[:n] for out in graph.outputs]
        return (*(out.clone() for out in outputs[: self._keep]), *outputs[self._keep :])

    def _recording(self, size: int, rows: Sequence[torch.Tensor]) -> _Recording:
        device = self._ops.device
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Recording(
            torch.zeros(2, size, dtype=torch.int64).pin_memory(),
            event,
            torch.zeros(2, size, dtype=torch.int64, device=device),
            [x.new_zeros(size, *x.shape[1:]) for x in rows],
        )

    def _record(self, made: _Recording) -> Capture:
        """Twice for real, then into the graph. The first run packs weights and compiles kernels;
        a weight that it read before it packed it is read in another way from the second on."""
        ids, positions = made.numbers.unbind()
        for _ in range(2):
            self._run(ids, positions, *made.rows)
        return Capture(lambda: self._run(ids, positions, *made.rows), self._pool)
