"""The target with its caches: what runners run and what drafts may look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from g4spec.core import PAGE, Backend, Batch, StepRows
from g4spec.models import gemma4
from g4spec.ops.reference import Ops


class Target:
    """A Gemma 4 model, its caches, and the taps its draft asked for (`core.TargetView`).

    Args:
        space: slots and pages of the sequences.
        chunk: rows of a prompt that are read at a time; rings have room for it.

    Attributes:
        taps: layers whose input a step hands out (`StepRows.taps`).
    """

    def __init__(
        self,
        config: gemma4.Config,
        weights: Mapping[str, Any],
        backend: Backend,
        space: Any,
        chunk: int,
    ) -> None:
        self.config, self.backend, self.space, self.chunk = config, backend, space, chunk
        self.ops: Ops = backend.ops
        self.model = gemma4.Model(config, weights, self.ops)
        slack = backend.slack(chunk)
        shapes = gemma4.caches(config)
        self.caches = [backend.cache(shape, space, slack) for shape in shapes]
        self.taps: tuple[int, ...] = ()
        self._per_position = backend.budget.page(shapes) / PAGE
        self._windows = backend.budget.slot(shapes, space.n_ctx, 0)
        self._window = max((s.window for s in shapes if s.window is not None), default=1)

    @property
    def n_ctx(self) -> int:
        """Positions that a sequence may have."""
        n: int = self.space.n_ctx
        return n

    @property
    def n_states(self) -> int:
        """Slots that a draft keeps a state for: those of sequences, and a backend's spare one."""
        return len(self.space.table)

    def context_bytes(self, position: int) -> float:
        """Count the keys and values that a row at `position` sees."""
        rings = self._windows * min(1.0, position / self._window)
        return self._per_position * position + rings

    def close(self) -> None:
        """Free weights and caches."""
        self.caches = []
        self.model.w = {}

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Token rows [T] -> [T, H], times `scale`, or else sqrt(H)."""
        return self.model.embed(ids, scale)

    @property
    def table(self) -> Any:
        """Output table [V, H]."""
        return self.model.table

    def kv(self, layer: int) -> Any:
        """Cache of one layer."""
        return self.caches[layer]

    def rows(self, batch: Batch) -> StepRows:
        """Run a batch, appending to the caches; no logits."""
        hidden, tapped = self.model.forward(batch, self.caches, self.taps)
        taps = [tapped[i] for i in self.taps]
        beside = self.ops.concat(taps) if taps else hidden.new_empty(len(hidden), 0)
        return StepRows(batch, hidden, beside)

    def run(self, batch: Batch, *, capped: bool = True) -> tuple[StepRows, torch.Tensor]:
        """Run a step, as it may be recorded -> its rows, and logits [T, V], raw unless `capped`."""
        rows = self.rows(batch)
        cap = self.config.softcap if capped else 0.0
        return rows, self.ops.logits(rows.hidden, self.table, cap)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Softcapped logits of final-norm rows [T, H] -> [T, V]."""
        return self.model.logits(hidden)


def batch_of(ops: Ops, parts: Iterable[tuple[int, int, Sequence[int]]]) -> Batch:
    """Make a batch of (slot, position of the first row, tokens), a sequence each."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sizes = []
    for slot, start, tokens in parts:
        ids += tokens
        positions += range(start, start + len(tokens))
        slots += [slot] * len(tokens)
        sizes.append(len(tokens))
    return Batch(ops.ids(ids), ops.ids(positions), ops.ids(slots), tuple(sizes))
