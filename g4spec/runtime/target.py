"""The target with its cache: what a step of the loop runs and what drafts may look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from g4spec.models import gemma4
from g4spec.models.spec import MAX_STEP_ROWS, Committed
from g4spec.runtime.kv import LayerKV
from g4spec.runtime.ops import Ops


@dataclass(slots=True)
class StepOutput:
    """One step of the target: `logits` [T, V]; `read` the same tokens as a draft wants them."""

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
        self.taps: tuple[int, ...] = ()
        slack = max(chunk, MAX_STEP_ROWS)
        self.caches = [
            LayerKV(c.n_kv, c.head_dim, n_ctx, c.window, slack, ops.device)
            for c in gemma4.caches(config)
        ]

    def embed(self, ids: torch.Tensor, *, scaled: bool) -> torch.Tensor:
        """Token rows [T] -> [T, H], times sqrt(H) if `scaled`."""
        return self.model.embed(ids, scaled=scaled)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Output table times rows [T, H] -> [T, V], without softcap."""
        return self.model.head(hidden)

    def kv(self, layer: int) -> LayerKV:
        """Cache of one layer."""
        return self.caches[layer]

    def read(self, ids: Sequence[int], start: int) -> Committed:
        """Run tokens at positions start ..., appending to the cache; no logits."""
        positions = self.ops.positions(start, len(ids))
        hidden, tapped = self.model.forward(
            self.ops.ids(list(ids)), positions, self.caches, self.taps
        )
        taps = [tapped[i] for i in self.taps]
        features = self.ops.concat(taps) if taps else hidden.new_empty(len(ids), 0)
        return Committed(ids, start, hidden, features)

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
        read = self.read(ids, start)
        return StepOutput(self.logits(read.hidden), read)
