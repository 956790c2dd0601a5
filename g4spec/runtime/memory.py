"""The memory plan of a run, computed before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4spec.backend import Backend
from g4spec.core import MAX_STEP_ROWS, CacheShape
from g4spec.errors import EnvironmentProblem
from g4spec.gguf.header import TensorInfo
from g4spec.models.spec import LayerSpec
from g4spec.ops.kv_size import PADDING_POSITIONS, pages_of

FLOAT = 4
"""Bytes of every weight and cache entry of the reference backend (float32)."""


@dataclass(frozen=True, slots=True)
class Size:
    """Capacity of an engine.

    Attributes:
        n_ctx: context length of a request, in tokens.
        slots: maximum number of running requests.
        pages: number of pages in the pool.
    """

    n_ctx: int
    slots: int = 1
    pages: int = 0

    @classmethod
    def of(cls, n_ctx: int, slots: int = 1, pool: int | None = None) -> Size:
        """Return the size for requests of `n_ctx` tokens and a pool of at least `pool` tokens."""
        return cls(n_ctx, slots, pages_of(max(pool or 0, n_ctx) + PADDING_POSITIONS))

    def smaller(self, n_ctx: int) -> Size:
        """Return the same size for a shorter context."""
        return Size.of(n_ctx, self.slots)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. Caches are pages and ring buffers."""

    n_ctx: int
    weights: int
    cache: int
    draft_weights: int
    draft_cache: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.draft_weights + self.draft_cache + self.workspace


def plan(
    backend: Backend,
    size: Size,
    chunk: int,
    config: Any,
    tensors: Iterable[TensorInfo],
    caches: Sequence[CacheShape],
    draft_tensors: Iterable[TensorInfo] = (),
    draft_caches: Sequence[CacheShape] = (),
    pending: int = 0,
) -> MemoryPlan:
    """Compute the memory that an engine takes on a device.

    Args:
        config: configuration of the target.
        tensors, draft_tensors: tensors of the files.
        caches, draft_caches: shapes of the layers that have a KV cache.
        pending: bytes of rows that the draft has not been given (`pending_rows.max_bytes`).
    """
    budget = backend.budget

    def kept(shapes: Sequence[CacheShape], ring_slack: int) -> int:
        rings = budget.slots(size.slots) * budget.slot(shapes, size.n_ctx, ring_slack)
        return (size.pages + 1) * budget.page(shapes) + rings

    return MemoryPlan(
        n_ctx=size.n_ctx,
        weights=budget.weights(tensors),
        cache=kept(caches, backend.ring_slack(chunk)),
        draft_weights=budget.weights(draft_tensors),
        draft_cache=kept(draft_caches, backend.ring_slack(chunk)),
        workspace=budget.workspace(config, size.n_ctx, chunk, size.slots) + pending,
    )


def weight_bytes(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the size of all tensors, dequantized, plus two copies of the largest, which exist
    while it is loaded."""
    sizes = [math.prod(shape) for shape in shapes]
    return FLOAT * (sum(sizes) + 2 * max(sizes, default=0))


def workspace_bytes(config: Any, n_ctx: int, chunk: int, sequences: int) -> int:
    """Return an upper bound of the temporary memory of a prefill chunk or of a step of so many
    sequences: logits, activations, one attention layer."""
    rows = MAX_STEP_ROWS * sequences
    logits = 3 * rows * config.n_vocab
    activations = max(rows, chunk) * (8 * config.n_embd + 3 * config.row_width)
    attention = max(_attention(s, min(n_ctx, (s.window or n_ctx) + chunk)) for s in config.layers)
    return int(FLOAT * (logits + activations + attention))


def _attention(layer: LayerSpec, positions: int) -> int:
    """Count the numbers in copies of keys and values, attention weights of each row, and partial
    sums."""
    heads = MAX_STEP_ROWS * layer.n_head * (layer.head_dim / 64 + 4)
    return int(positions * (6 * layer.n_kv * layer.head_dim + heads))


def available() -> int:
    """Return the bytes that this process may still allocate: MemAvailable, or the limit of the
    control group if that is lower.

    Returns a very large number if neither can be read, so that nothing is refused because of a
    guess.
    """
    found = [2**62]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            found.append(int(limit) - used + _cached())
    except OSError:
        pass
    return min(found)


def _cached() -> int:
    """Return the bytes of file cache that the control group counts as used but frees when
    needed."""
    stat = Path("/sys/fs/cgroup/memory.stat").read_text().split()
    sizes = dict(zip(stat[::2], stat[1::2], strict=True))
    return int(sizes.get("active_file", 0)) + int(sizes.get("inactive_file", 0))


def require_fits(plan: MemoryPlan, at: dict[int, MemoryPlan], free: int) -> None:
    """Raise EnvironmentProblem if a run does not fit, naming the largest context that does.

    Args:
        at: plans for the same context and smaller ones, with the smallest pool.
        free: available bytes.
    """
    if plan.total <= free:
        return
    fitting = [n for n, p in at.items() if p.total <= free]
    if plan.n_ctx in fitting:
        fix = "use a smaller `pool`"
    elif fitting:
        fix = f"use `n_ctx` {max(fitting)}, the largest context that fits"
    elif plan.weights + plan.draft_weights > free:
        fix = "no context fits: the weights alone need more; use a smaller type or model"
    else:
        fix = "no context fits: free memory, or use a smaller type or model"
    raise EnvironmentProblem(
        f"not enough memory for a context of {plan.n_ctx} tokens",
        expected=f"{_size(plan.total)} free (weights {_size(plan.weights)}, cache "
        f"{_size(plan.cache)}, draft {_size(plan.draft_weights + plan.draft_cache)}, "
        f"workspace {_size(plan.workspace)})",
        found=_size(free),
        fix=fix,
    )


def _size(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"
