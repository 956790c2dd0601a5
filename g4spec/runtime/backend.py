"""The reference backend: torch on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from g4spec import quant
from g4spec.core import MAX_STEP_ROWS, PAGE, PROMPT_BLOCK, CacheShape, Draft, Runner, StepRows
from g4spec.gguf import GGUF
from g4spec.gguf.reader import TensorInfo
from g4spec.ops.kv import LayerKV, Space
from g4spec.ops.kv_size import capacity
from g4spec.ops.reference import Ops
from g4spec.ops.sampling import Sampler
from g4spec.quant.format import Format
from g4spec.runtime import memory
from g4spec.runtime.eager_runner import EagerRunner
from g4spec.runtime.target import Target, batch_of


class HostBudget:
    """Bytes of a run on the CPU (`g4spec.core.Budget`): everything is float32."""

    def weights(self, tensors: Iterable[TensorInfo]) -> int:
        """All tensors, dequantized."""
        return memory.weight_bytes([t.shape for t in tensors])

    def page(self, shapes: Sequence[CacheShape]) -> int:
        """One page of the pool, in all layers without a window."""
        return sum(_row_bytes(s) * PAGE for s in shapes if s.window is None)

    def slot(self, shapes: Sequence[CacheShape], n_ctx: int, slack: int) -> int:
        """The rings of one slot."""
        return sum(
            _row_bytes(s) * capacity(n_ctx, s.window, slack) for s in shapes if s.window is not None
        )

    def slots(self, sequences: int) -> int:
        """One for each sequence."""
        return sequences

    def workspace(self, config: Any, n_ctx: int, chunk: int, sequences: int) -> int:
        """An upper bound of what a step or a chunk holds at once."""
        return memory.workspace_bytes(config, n_ctx, chunk, sequences)

    def available(self) -> int:
        """Bytes this process may still take."""
        return memory.available()


def _row_bytes(shape: CacheShape) -> int:
    return 2 * memory.FLOAT * shape.n_kv * shape.head_dim


def as_stored(form: Format, rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] as a cache of this type gives them back, on the CPU."""
    if not bool(torch.isfinite(rows).all()):
        return rows  # which the logits show
    values: NDArray[np.float32] = rows.numpy()
    return torch.from_numpy(form.dequantize(form.quantize(values)))


class TorchBackend:
    """Plain torch (`g4spec.core.Backend`). Any row has the same bits in every batch.

    Args:
        cache_type: a type whose rounding keys and values get, "f16" or "q8_0"; they take the room
            of F32 all the same. None: F32.
    """

    name = "torch"
    title = "CPU"
    chunk = PROMPT_BLOCK
    padded = False

    def __init__(self, cache_type: str | None = None) -> None:
        self.ops = Ops()
        self.budget = HostBudget()
        self._rounded = partial(as_stored, quant.get(cache_type)) if cache_type else None

    def enter(self) -> None:
        """Any thread may compute."""

    def load(self, file: GGUF, name: str) -> Any:
        """Tensor `name` dequantized to float32, or int64 for index tensors."""
        return self.ops.array(file.array(name))

    def space(self, n_slots: int, n_ctx: int, n_pages: int) -> Space:
        """Slots and pages."""
        return Space(n_slots, n_ctx, n_pages)

    def slack(self, chunk: int) -> int:
        """Rows that a ring needs beyond its window."""
        return max(chunk, 2 * MAX_STEP_ROWS)

    def cache(self, shape: CacheShape, space: Space, slack: int) -> LayerKV:
        """An empty cache of one layer."""
        return LayerKV(shape, space, slack, self._rounded)

    def read(self, target: Target, slot: int, ids: Sequence[int], start: int) -> StepRows:
        """Run prompt rows; see `g4spec.core.Backend`."""
        return target.rows(batch_of(self.ops, [(slot, start, ids)]))

    def commit(self, draft: Draft, rows: StepRows) -> None:
        """Give a draft the rows that `read` returned."""
        draft.commit(rows, rows.batch.ids.new_tensor([len(rows.batch) - 1]))

    def sampler(self, sampler: Sampler) -> Sampler:
        """The sampler itself: it works on any tensor."""
        return sampler

    def runners(self, target: Target, draft: Draft | None) -> Sequence[Runner]:
        """The one that takes any work."""
        return [EagerRunner(target, draft)]
