"""The target with its cache: what a step of the loop runs and what drafts may look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from g4spec.models import gemma4
from g4spec.core import MAX_STEP_ROWS
from g4spec.ops.kv import LayerKV
from g4spec.ops.reference import Ops

STEPS = (1, 2, 4, 8, 16)
"""Rows of the steps that a backend may record."""


@dataclass(slots=True)
class StepOutput:
    """One step of the target: `logits` [T, V], which last until the next step; `read` the same
    tokens as a draft wants them."""

    logits: torch.Tensor
    read: Committed


class Target:
    """A Gemma 4 model, its cache, and the taps its draft asked for (`models.spec.TargetView`).

    Args:
        chunk: rows of one prefill chunk; rings have room for it.
    """

    def __init__(
        self,
        config: gemma4.Config,
        weights: Mapping[str, Any],
        ops: Ops,
        n_ctx: int,
        chunk: int,
    ) -> None:
        self.config, self.ops, self.n_ctx, self.chunk = config, ops, n_ctx, chunk
        self.model = gemma4.Model(config, weights, ops)
        slack = ops.slack(chunk)
        self.caches = [ops.cache(shape, n_ctx, slack) for shape in gemma4.caches(config)]
        self._read = ops.reader(self.model, self.caches, n_ctx, chunk)
        self.taps = ()

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose input a step hands out (`Committed.taps`)."""
        return self._taps

    @taps.setter
    def taps(self, layers: tuple[int, ...]) -> None:
        self._taps = layers
        self._step = self.ops.graph(self.run, STEPS, keep=2)

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Token rows [T] -> [T, H], times `scale`, or else sqrt(H)."""
        return self.model.embed(ids, scale)

    @property
    def table(self) -> Any:
        """Output table [V, H]."""
        return self.model.table

    def kv(self, layer: int) -> LayerKV:
        """Cache of one layer."""
        return self.caches[layer]

    def read(self, ids: Sequence[int], start: int) -> Committed:
        """Run tokens at positions start ..., appending to the cache; no logits."""
        hidden, tapped = self._read(ids, start, self.taps)
        return Committed(ids, start, hidden, self._beside(hidden, tapped))

    def _beside(self, hidden: torch.Tensor, tapped: dict[int, torch.Tensor]) -> torch.Tensor:
        """The taps of rows `hidden` [T, H] beside each other, [T, n * H]."""
        taps = [tapped[i] for i in self.taps]
        return self.ops.concat(taps) if taps else hidden.new_empty(len(hidden), 0)

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, *, capped: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """A step of ids [T] at consecutive positions [T], as it may be recorded: rows after the
        final norm [T, H], taps, logits [T, V], raw unless `capped`."""
        hidden, tapped = self.model.forward(ids, positions, self.caches, self.taps)
        cap = self.config.softcap if capped else 0.0
        logits = self.ops.logits(hidden, self.table, cap)
        return hidden, self._beside(hidden, tapped), logits

    def prefill(self, ids: Sequence[int]) -> Iterator[Committed]:
        """Read a prompt from position 0, one chunk at a time."""
        for start in range(0, len(ids), self.chunk):
            yield self.read(ids[start : start + self.chunk], start)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Softcapped logits of final-norm rows [T, H] -> [T, V]."""
        return self.model.logits(hidden)

    def step(self, ids: Sequence[int], start: int) -> StepOutput:
        """Run at most 16 tokens and return logits for every row."""
        assert len(ids) <= MAX_STEP_ROWS, len(ids)
        hidden, taps, logits = self._step(ids, start)
        return StepOutput(logits, Committed(ids, start, hidden, taps))
