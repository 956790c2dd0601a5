"""The GPU memory of a run, computed before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from g4spec.core import MAX_STEP_ROWS, CacheShape
from g4spec.gguf.header import TensorInfo
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.cache.cache_types import Kind
from g4spec.runtime.cuda.cache.cuda_kv_size import page_bytes, slot_bytes, spare_slots
from g4spec.runtime.cuda.prefill import plan
from g4spec.runtime.cuda.step import experts
from g4spec.runtime.cuda.weights import held_size
from g4spec.runtime.cycle_costs import bucket

FLOAT = 4

FIXED = 512 << 20
"""Memory for kernels, cuBLAS workspaces and graphs, and what the allocator cannot use."""

SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Environment variables that configure torch's allocator."""


def chunk(total: int) -> int:
    """Return the rows of a prompt chunk on a GPU with so many bytes: 4,096 from 72 GiB on, 1,024
    with 24 GiB. It does not depend on free memory, because a text must not depend on what else is
    loaded, for instance a draft."""
    return 1 << max(9, min(12, (4096 * total // (72 << 30)).bit_length() - 1))


def join_free(index: int) -> None:
    """Let torch's allocator merge free memory of GPU `index`. Otherwise it stays in blocks of the
    sizes that were first allocated: 1.1 GiB for a 31B. Do nothing if the user has configured
    torch's allocator, or if the GPU does not support it."""
    from cuda.core import Device

    can = Device(index).properties
    if SETTINGS & os.environ.keys() or not can.virtual_memory_management_supported:
        return
    if can.handle_type_posix_file_descriptor_supported:
        binding: Any = torch._C
        binding._accelerator_setAllocatorSettings("expandable_segments:True")


class Card:
    """Memory of a GPU (`g4spec.backend.Budget`). `portable`: as in `CudaOps`."""

    def __init__(self, device: torch.device, cache_type: Kind, portable: bool = False) -> None:
        self.device, self.cache_type, self.portable = device, cache_type, portable

    def weights(self, tensors: Iterable[TensorInfo]) -> int:
        """Return the bytes of these tensors (`held_size.tensor_bytes`), without the rows that
        packing adds to fill groups."""
        return sum(held_size.tensor_bytes(t, self.portable) for t in tensors)

    def page(self, shapes: Sequence[CacheShape]) -> int:
        """Return the bytes of one page of the pool, in all layers without a window."""
        return sum(page_bytes(s, self.cache_type) for s in shapes)

    def slot(self, shapes: Sequence[CacheShape], n_ctx: int, ring_slack: int) -> int:
        """Return the bytes of the rings of one slot, in all layers with a window."""
        return sum(slot_bytes(s, n_ctx, ring_slack, self.cache_type) for s in shapes)

    def slots(self, sequences: int) -> int:
        """Return the number of slots: one for each sequence, and a spare one if recorded batches
        may be padded."""
        return sequences + spare_slots(sequences)

    def workspace(self, config: Any, n_ctx: int, chunk: int, sequences: int) -> int:
        """Return the bytes of logits and partial attention results of the largest steps, of the
        buffers for experts and for a chunk, and of fixed needs."""
        batch = bucket(sequences)  # recorded steps are padded
        logits = 4 * FLOAT * MAX_STEP_ROWS * batch * config.n_vocab
        sums = plan.partial_results(config, n_ctx, batch)
        # Residual, taps, and a draft's features.
        wide = 12 * FLOAT * plan.most_rows(chunk, n_ctx) * config.n_embd
        arch = "" if self.portable else launch.arch(self.device.index)
        long = sum(plan.workspace(config, chunk, n_ctx, arch))
        packing = held_size.PACKING
        return int(logits + sums + _expert_buffers(config) + wide + long + packing + FIXED)

    def available(self) -> int:
        """Return free memory, and what torch has reserved without using it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free + held)


def _expert_buffers(config: Any) -> int:
    """Return the bytes of the buffers for steps of all layers with experts, shared by layers of the
    same shape."""
    shapes = {
        experts.ExpertShape(s.n_expert, s.n_expert_used, config.n_embd, s.n_ff, s.n_ff_expert)
        for s in config.layers
        if s.n_expert
    }
    return sum(experts.buffer_bytes(shape) for shape in shapes)
