"""The CUDA backend: loading, allocation, and what runs. `cuda.ops` computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from g4spec.core import PROMPT_BLOCK, CacheShape
from g4spec.ops.kv import Space
from g4spec.runtime.cuda import gpu_memory
from g4spec.runtime.cuda.cache.cache_types import Kind
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.cache.cuda_kv_size import SLACK, spare_slots
from g4spec.runtime.cuda.ops import CudaOps, drop_weights
from g4spec.runtime.cuda.prefill.reader import Reader
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.graph_runner import GraphRunner
from g4spec.runtime.cuda.step.recorded import RecordedStep
from g4spec.runtime.cuda.step.sampler import CudaSampler
from g4spec.runtime.cuda.weights import held_size
from g4spec.runtime.cuda.weights.loading import Uploader
from g4spec.runtime.cuda.weights.matrix import Matrix
from g4spec.runtime.eager_runner import EagerRunner
from g4spec.runtime.loading import scaled_array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from g4spec.core import Draft, Runner, StepRows
    from g4spec.gguf import GGUF
    from g4spec.ops.sampling import Sampler
    from g4spec.runtime.target import Target


class CudaBackend:
    """An NVIDIA GPU (`g4spec.backend.Backend`).

    Args:
        device: number of the GPU, or its name.
        cache_type: how keys and values are stored.
        portable: use only the kernels for GPUs before sm_80.
    """

    name = "cuda"
    block = PROMPT_BLOCK
    padded = True

    def __init__(
        self, device: int | str = 0, cache_type: Kind = "f16", portable: bool = False
    ) -> None:
        number = isinstance(device, int)
        self.device = torch.device("cuda", int(device)) if number else torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.cache_type = cache_type
        gpu_memory.join_free(self.device.index or 0)
        self.ops = CudaOps(str(self.device), portable)
        self.title = self.ops.title
        total = torch.cuda.get_device_properties(self.device).total_memory
        self.chunk = gpu_memory.chunk(total)
        self._upload: Uploader | None = None
        self._reader: Reader | None = None

    @property
    def budget(self) -> gpu_memory.Card:
        """Sizes in bytes, and free memory of the GPU."""
        return gpu_memory.Card(self.device, self.cache_type, self.ops.portable)

    def load(self, file: GGUF, name: str, factors: NDArray[np.float32] | None = None) -> Any:
        """Load a tensor: vectors, F32 and index tensors as torch tensors, other matrices as
        `Matrix`; `factors`, which NVFP4 matrices may have: see `g4spec.backend.Backend`."""
        info, ops = file.tensors[name], self.ops
        form = info.format
        if len(info.shape) < 2 or form.integer or form.name in ("f32", "f64"):
            return ops.array(file.array(name))
        plain = {"f16": torch.float16, "bf16": torch.bfloat16}.get(form.name)
        columns, n_rows = info.shape[-1], info.shape[-2]
        why = held_size.unpackable(form.name, columns, n_rows, ops.portable)
        if plain is None and why:
            ops.without_kernel.add(why)
            return ops.array(scaled_array(file, name, factors))
        self._upload = self._upload or Uploader(self.device)
        width = columns * 2 if plain else form.row_bytes(columns)
        raw = self._upload(file.raw(name)).view(-1, width)
        return Matrix(
            "" if plain else form.name,
            raw.view(plain) if plain else raw,
            n_rows,
            columns,
            len(raw) // n_rows,
            file_order=ops.portable,
            factors=None if factors is None else ops.array(factors),
        )

    def space(self, n_slots: int, n_ctx: int, n_pages: int) -> Space:
        """Return slots and pages. After the table's rows of the slots is that of a spare slot, for
        sequences that pad recorded batches: all its positions are in the spare page."""
        space = Space(n_slots, n_ctx, n_pages, self.device)
        spare = space.table.new_zeros(spare_slots(n_slots), space.table.shape[1])
        space.table = torch.cat([space.table, spare])
        return space

    def ring_slack(self, chunk: int) -> int:
        """Return `SLACK`, whatever the chunk is."""
        return SLACK

    def cache(self, shape: CacheShape, space: Space, ring_slack: int) -> CudaKV:
        """Return an empty cache of one layer."""
        return CudaKV(shape, space, ring_slack, self.cache_type)

    def read(
        self,
        target: Target,
        slot: int,
        ids: Sequence[int],
        start: int,
        pause: Callable[[], None] | None = None,
    ) -> StepRows:
        """Run prompt tokens; see `g4spec.backend.Backend`."""
        if self._reader is None or self._reader.target is not target:
            self._reader = Reader(self, target)
        return self._reader.read(slot, ids, start, pause)

    def prefill_rows(self, count: int) -> int:
        """See `Reader.prefill_rows`."""
        assert self._reader is not None
        return self._reader.prefill_rows(count)

    def commit(self, draft: Draft, rows: StepRows) -> None:
        """Give a draft the rows that `read` returned."""
        assert self._reader is not None
        self._reader.commit(draft, rows)

    def sampler(self, sampler: Sampler) -> CudaSampler:
        """Return a sampler of tokens from raw logits [V] on the GPU."""
        return CudaSampler(sampler, self.device)

    def runners(self, target: Target, draft: Draft | None) -> Sequence[Runner]:
        """Return the runner of recorded cycles, and one for work whose tokens the host chooses,
        which records what it can."""
        pool = graphs.Pool(self.device)
        self._reader = Reader(self, target, pool)  # raises an error before the first request
        graph = GraphRunner(target, draft, pool=pool)
        return [graph, EagerRunner(target, draft, RecordedStep(target, pool), graph.propose)]

    def close(self) -> None:
        """See `g4spec.backend.Backend`."""
        self._reader = None
        drop_weights(self.ops)
