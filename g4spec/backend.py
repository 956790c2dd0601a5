"""Protocols of a device: the memory that an engine needs on it, its caches, prefill and runners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from g4spec.core import CacheShape, Draft, Runner, StepRows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from g4spec.gguf import GGUF
    from g4spec.gguf.header import TensorInfo


class Budget(Protocol):
    """Computes the memory of the parts of an engine on a device, in bytes."""

    def weights(self, tensors: Iterable[TensorInfo]) -> int:
        """Return the size of loaded tensors."""

    def page(self, shapes: Sequence[CacheShape]) -> int:
        """Return the size of one page of the pool, over all layers."""

    def slot(self, shapes: Sequence[CacheShape], n_ctx: int, ring_slack: int) -> int:
        """Return the size of the ring buffers of one slot."""

    def slots(self, sequences: int) -> int:
        """Return the number of slots for so many sequences, including a spare one if needed."""

    def workspace(self, config: Any, n_ctx: int, chunk: int, sequences: int) -> int:
        """Return the temporary memory of a prefill chunk or of a step of so many sequences."""

    def available(self) -> int:
        """Return the free memory of the device."""


class Backend(Protocol):
    """A device: loads weights, allocates caches and records graphs. Its `ops` compute.

    Attributes:
        ops: the operations that models are written in (`g4spec.ops.reference.Ops`).
        chunk: number of prompt rows per prefill chunk, a multiple of PROMPT_BLOCK.
        block: `read` takes multiples of so many tokens, except at the end of a prompt.
        padded: whether every sequence of a step costs as much as the one with the most rows.
        budget: computes memory on this device.
        cache_type: how keys and values are stored, None: as F32.
    """

    ops: Any
    name: str
    title: str
    chunk: int
    block: int
    padded: bool

    @property
    def budget(self) -> Budget: ...

    @property
    def cache_type(self) -> str | None: ...

    def load(self, file: GGUF, name: str, factors: NDArray[np.float32] | None = None) -> Any:
        """Load tensor `name` in the form that the ops use.

        Args:
            factors: [M], by what the values of each of its M matrices are multiplied.
        """

    def space(self, n_slots: int, n_ctx: int, n_pages: int) -> Any:
        """Create the table of slots and pages (`g4spec.ops.kv.Space`)."""

    def ring_slack(self, chunk: int) -> int:
        """Return the rows that a ring buffer needs beyond its window for chunks of this size."""

    def cache(self, shape: CacheShape, space: Any, ring_slack: int) -> Any:
        """Create the empty KV cache of one layer (`g4spec.ops.kv.LayerKV`)."""

    def read(
        self,
        target: Any,
        slot: int,
        ids: Sequence[int],
        start: int,
        pause: Callable[[], None] | None = None,
    ) -> StepRows:
        """Prefill: compute prompt tokens from position `start` on, a multiple of PROMPT_BLOCK, and
        append to the caches of the slot. Computes no logits. The bits of a row depend only on the
        tokens up to the end of its block or, if that comes first, of the prompt.

        Args:
            pause: called once after half of the layers, if the rows take long; it may run steps of
                other slots.
        """

    def prefill_rows(self, count: int) -> int:
        """Return how many rows of whole blocks take about as long as `read` of `count` tokens."""

    def commit(self, draft: Draft, rows: StepRows) -> None:
        """Update a draft with the rows that `read` returned, bit-exact in the same way."""

    def sampler(self, sampler: Any) -> Any:
        """Create what samples tokens from raw logits on this device
        (`g4spec.ops.logits.RowSampler`)."""

    def runners(self, target: Any, draft: Draft | None) -> Sequence[Runner]:
        """Return runners in order of preference; the last one accepts any work."""

    def close(self) -> None:
        """Drop references to weights, and the memory of `read`."""
