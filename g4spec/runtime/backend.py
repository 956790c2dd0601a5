"""The reference backend: torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from g4spec import quant
from g4spec.core import MAX_STEP_ROWS, PAGE, PROMPT_BLOCK, CacheShape, Draft, Runner, StepRows
from g4spec.gguf import GGUF
from g4spec.gguf.header import TensorInfo
from g4spec.ops.kv import LayerKV, Space
from g4spec.ops.kv_size import capacity
from g4spec.ops.reference import Ops
from g4spec.ops.sampling import Sampler
from g4spec.quant.format import Format
from g4spec.runtime import memory
from g4spec.runtime.batches import batch_of
from g4spec.runtime.eager_runner import EagerRunner
from g4spec.runtime.loading import scaled_array
from g4spec.runtime.target import Target


class HostBudget:
    """Computes the memory of a run on the CPU (`g4spec.backend.Budget`), where everything is
    float32."""

    def weights(self, tensors: Iterable[TensorInfo]) -> int:
        """Return the size of all tensors, dequantized."""
        return memory.weight_bytes([t.shape for t in tensors])

    def page(self, shapes: Sequence[CacheShape]) -> int:
        """Return the size of one page of the pool, over all global layers."""
        return sum(_row_bytes(s) * PAGE for s in shapes if s.window is None)

    def slot(self, shapes: Sequence[CacheShape], n_ctx: int, ring_slack: int) -> int:
        """Return the size of the ring buffers of one slot."""
        return sum(
            _row_bytes(s) * capacity(n_ctx, s.window, ring_slack)
            for s in shapes
            if s.window is not None
        )

    def slots(self, sequences: int) -> int:
        """Return one slot per sequence."""
        return sequences

    def workspace(self, config: Any, n_ctx: int, chunk: int, sequences: int) -> int:
        """Return an upper bound of the temporary memory of a step or prefill chunk."""
        return memory.workspace_bytes(config, n_ctx, chunk, sequences)

    def available(self) -> int:
        """Return the bytes that this process may still allocate."""
        return memory.available()


def _row_bytes(shape: CacheShape) -> int:
    return 2 * memory.FLOAT * shape.n_kv * shape.head_dim


def round_to_type(form: Format, rows: torch.Tensor) -> torch.Tensor:
    """Round rows [..., D] as a KV cache of this type stores them, on the CPU."""
    if not bool(torch.isfinite(rows).all()):
        return rows  # which the logits show
    values: NDArray[np.float32] = rows.numpy()
    return torch.from_numpy(form.dequantize(form.quantize(values)))


class TorchBackend:
    """Plain torch (`g4spec.backend.Backend`). A row has the same bits in every batch.

    Args:
        cache_type: rounds keys and values as this type stores them, "f16" or "q8_0", while they
            still take the memory of F32. None: F32.
    """

    name = "torch"
    title = "CPU"
    chunk = PROMPT_BLOCK
    block = 1
    padded = False

    def __init__(self, cache_type: str | None = None) -> None:
        self.ops = Ops()
        self.budget = HostBudget()
        self.cache_type = cache_type
        self._rounded = partial(round_to_type, quant.get(cache_type)) if cache_type else None

    def load(self, file: GGUF, name: str, factors: NDArray[np.float32] | None = None) -> Any:
        """Load tensor `name` as float32, or as int64 if it is an index tensor; `factors`: see
        `g4spec.backend.Backend`."""
        return self.ops.array(scaled_array(file, name, factors))

    def space(self, n_slots: int, n_ctx: int, n_pages: int) -> Space:
        """Create the table of slots and pages."""
        return Space(n_slots, n_ctx, n_pages)

    def ring_slack(self, chunk: int) -> int:
        """Return the rows that a ring buffer needs beyond its window."""
        return max(chunk, 2 * MAX_STEP_ROWS)

    def cache(self, shape: CacheShape, space: Space, ring_slack: int) -> LayerKV:
        """Create the empty KV cache of one layer."""
        return LayerKV(shape, space, ring_slack, self._rounded)

    def read(
        self,
        target: Target,
        slot: int,
        ids: Sequence[int],
        start: int,
        pause: Callable[[], None] | None = None,
    ) -> StepRows:
        """Compute prompt rows; see `g4spec.backend.Backend`."""
        return target.forward(batch_of(self.ops, [(slot, start, ids)]), pause)

    def prefill_rows(self, count: int) -> int:
        """Return `count`: no row is padding."""
        return count

    def commit(self, draft: Draft, rows: StepRows) -> None:
        """Update a draft with the rows that `read` returned."""
        draft.commit(rows, rows.batch.ids.new_tensor([len(rows.batch) - 1]))

    def sampler(self, sampler: Sampler) -> Sampler:
        """Return the sampler itself, which works on any tensor."""
        return sampler

    def runners(self, target: Target, draft: Draft | None) -> Sequence[Runner]:
        """Return the runner that accepts any work."""
        return [EagerRunner(target, draft)]

    def close(self) -> None:
        """Do nothing: `read` keeps nothing."""
