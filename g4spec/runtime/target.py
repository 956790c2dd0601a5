"""The target model with its caches, as runners and drafts use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from g4spec.backend import Backend
from g4spec.core import PAGE, Batch, StepRows
from g4spec.models import gemma4
from g4spec.ops.reference import Ops
from g4spec.runtime.pending_rows import PendingRows


class Target:
    """A Gemma 4 model, its caches, and the features that its draft reads (`core.TargetView`).

    Args:
        space: slots and pages of the sequences.
        chunk: number of prompt rows per prefill chunk, for which ring buffers have room.

    Attributes:
        taps: layers whose inputs a step returns (`StepRows.taps`).
        pending: rows that its draft has not been given yet.
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
        ring_slack = backend.ring_slack(chunk)
        shapes = gemma4.caches(config)
        self.caches = [backend.cache(shape, space, ring_slack) for shape in shapes]
        self.taps: tuple[int, ...] = ()
        self.pending = PendingRows(self.ops, space.n_slots)
        self._per_position = backend.budget.page(shapes) / PAGE
        self._windows = backend.budget.slot(shapes, space.n_ctx, 0)
        self._window = max((s.window for s in shapes if s.window is not None), default=1)

    @property
    def n_ctx(self) -> int:
        """Context length of a sequence, in tokens."""
        n: int = self.space.n_ctx
        return n

    @property
    def n_states(self) -> int:
        """Number of slots for which a draft keeps state, including a spare slot of the backend."""
        return len(self.space.table)

    def context_bytes(self, position: int) -> float:
        """Return the bytes of KV cache that a row at `position` attends to."""
        rings = self._windows * min(1.0, position / self._window)
        return self._per_position * position + rings

    def close(self) -> None:
        """Free weights, caches and pending rows."""
        self.caches = []
        self.model.w = {}
        self.pending.close()

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Return token embeddings [T] -> [T, H], times `scale` (default: sqrt(H))."""
        return self.model.embed(ids, scale)

    @property
    def table(self) -> Any:
        """Output projection [V, H]."""
        return self.model.table

    def kv(self, layer: int) -> Any:
        """Return the KV cache of one layer."""
        return self.caches[layer]

    def forward(self, batch: Batch, pause: Callable[[], None] | None = None) -> StepRows:
        """Run a batch and append to the caches; compute no logits. `pause`: see `Backend.read`."""
        hidden, tapped = self.model.forward(batch, self.caches, self.taps, pause)
        taps = [tapped[i] for i in self.taps]
        tapped_rows = self.ops.concat_columns(taps) if taps else hidden.new_empty(len(hidden), 0)
        return StepRows(batch, hidden, tapped_rows)

    def step(self, batch: Batch, *, capped: bool = True) -> tuple[StepRows, torch.Tensor]:
        """Run a step in a form that can be recorded; return its rows and the logits [T, V], without
        softcap unless `capped`."""
        rows = self.forward(batch)
        cap = self.config.softcap if capped else 0.0
        return rows, self.ops.logits(rows.hidden, self.table, cap)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute softcapped logits of final-norm rows [T, H] -> [T, V]."""
        return self.model.logits(hidden)
