"""Forward passes of the target as CUDA graphs whose results the host uses at once: the end of a
prompt, and steps whose tokens are chosen on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from g4spec.core import MAX_STEP_ROWS, Batch, StepRows
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.graph_runner import SPARE_POSITION, STEPS
from g4spec.runtime.cycle_costs import bucket

if TYPE_CHECKING:
    from g4spec.runtime.batches import Part
    from g4spec.runtime.target import Target

RUNS_BEFORE_RECORDING = 2
"""Number of times that a shape is computed op by op before it is recorded: the first runs pack
weights and compile kernels, and recording takes as long as a run."""

PADDING = 0
"""Token of padding rows."""


class Recorded:
    """A function of batches, as a CUDA graph per shape. Input and results of all graphs are in the
    same memory, because logits of many rows are large.

    Args:
        run: what computes a batch, tensors with a row for each of its rows.
        max_rows: maximum number of rows.
        pool: memory that graphs share, or None: each has its own.
    """

    def __init__(
        self,
        run: Callable[[Batch], tuple[torch.Tensor, ...]],
        max_rows: int,
        device: torch.device,
        pool: graphs.Pool | None,
    ) -> None:
        self._run, self._pool = run, pool
        self._rows = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        self._uses = Counter[tuple[int, ...]]()
        self._graphs: dict[tuple[int, ...], graphs.Recording] = {}
        self._results: list[torch.Tensor] = []

    def __call__(self, parts: Seq[Part]) -> tuple[Batch, tuple[torch.Tensor, ...]]:
        """Compute a batch of (slot, position of the first row, tokens). The result is valid until
        the next call."""
        rows = [
            (token, start + i, slot)
            for slot, start, tokens in parts
            for i, token in enumerate(tokens)
        ]
        sizes = tuple(len(tokens) for _, _, tokens in parts)
        self._rows[:, : len(rows)].copy_(torch.tensor(rows).T)
        ids, positions, slots = self._rows[:, : len(rows)]
        batch = Batch(ids, positions, slots, sizes)
        if self._uses[sizes] < RUNS_BEFORE_RECORDING:
            results = self._run(batch)
            if not self._results:
                max_rows = self._rows.shape[1]
                self._results = [x.new_empty(max_rows, *x.shape[1:]) for x in results]
            self._uses[sizes] += 1  # unless it failed
            return batch, results
        if sizes not in self._graphs:
            # Attention of more rows reads keys that the kernel before it has written.
            overlap = max(sizes) <= MAX_STEP_ROWS
            self._graphs[sizes] = graphs.record(lambda: self._keep(batch), self._pool, overlap)
        self._graphs[sizes].replay()
        return batch, tuple(x[: len(rows)] for x in self._results)

    def _keep(self, batch: Batch) -> tuple[()]:
        """Compute a batch and copy its results."""
        for kept, result in zip(self._results, self._run(batch), strict=True):
            kept[: len(batch)].copy_(result)
        return ()


class RecordedStep:
    """Steps of the target for `EagerRunner`: batches are padded to shapes of `GraphRunner`, so that
    few are recorded."""

    def __init__(self, target: Target, pool: graphs.Pool | None) -> None:
        self._spare = target.space.n_slots, SPARE_POSITION

        def run(batch: Batch) -> tuple[torch.Tensor, ...]:
            rows, logits = target.step(batch)
            return rows.hidden, rows.taps, logits

        max_rows = MAX_STEP_ROWS * bucket(target.space.n_slots)
        self._recorded = Recorded(run, max_rows, target.ops.device, pool)

    def __call__(self, parts: Seq[Part]) -> tuple[StepRows, torch.Tensor]:
        """Return the rows and logits of a step, valid until the next call; each part has as many
        rows as the longest."""
        most = max(len(tokens) for _, _, tokens in parts)
        size = next(n for n in STEPS if n >= most)
        spare: list[Part] = [(*self._spare, [])] * (bucket(len(parts)) - len(parts))
        padded = [
            (slot, start, [*tokens, *[PADDING] * (size - len(tokens))])
            for slot, start, tokens in (*parts, *spare)
        ]
        batch, (hidden, taps, logits) = self._recorded(padded)
        return StepRows(batch, hidden, taps), logits
