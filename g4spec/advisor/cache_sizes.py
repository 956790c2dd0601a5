"""Bytes of the KV cache: per token of the global layers, per position of the sliding layers, and
how many positions vLLM, llama.cpp and g4spec store.

Sources: llama.cpp `llama-kv-cache-iswa.cpp`, vLLM `SlidingWindowSpec` and `max_in_flight_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from g4spec.core import CacheShape
from g4spec.runtime.cuda.build.constants import CACHE_ROTARY_PAIRS
from g4spec.runtime.cuda.cache.cache_types import TYPES
from g4spec.runtime.cuda.cache.cuda_kv_size import SLACK, capacity, row_columns

BITS: dict[str, float] = {
    "f32": 32.0,
    **{name: type.bits for name, type in TYPES.items()},
    "bf16": 16.0,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "fp8": 8.0,
    "int8": 8.1,
    "nvfp4": 4.5,
}
"""Bits per cached value, block scales included."""
BLOCK = 16
"""Tokens per vLLM cache block."""
UBATCH = 512
"""llama.cpp's default micro-batch."""


def token_bytes(caches: Sequence[CacheShape], kv: str, kv_v: str | None = None) -> float:
    """Return the cache bytes per token of the global layers. `kv_v`: cache type of the values."""
    bits = BITS[kv] + BITS[kv_v or kv]
    return sum(c.n_kv * c.head_dim for c in caches if c.window is None) * bits / 8


def g4spec_token_bytes(caches: Sequence[CacheShape], kv: str) -> float:
    """Return the cache bytes per token of the global layers in g4spec's GPU runtime. Global layers
    whose number of KV heads differs from that of sliding layers have values equal to their keys
    (`attention_k_eq_v`); of their keys only the rotated dimensions are stored."""
    others = {c.n_kv for c in caches if c.window is not None}
    pairs = [
        replace(c, rotary_pairs=0 if c.n_kv in others else CACHE_ROTARY_PAIRS)
        for c in caches
        if c.window is None
    ]
    return sum(map(row_columns, pairs)) * BITS[kv] / 8


def slot_bytes(caches: Sequence[CacheShape], kv: str, kv_v: str | None = None) -> float:
    """Return the cache bytes per position of all sliding layers."""
    bits = BITS[kv] + BITS[kv_v or kv]
    return sum(c.n_kv * c.head_dim for c in caches if c.window is not None) * bits / 8


def window_of(caches: Sequence[CacheShape]) -> int:
    return max((c.window for c in caches if c.window is not None), default=0)


def llamacpp_slots(caches: Sequence[CacheShape], context: int, sequences: int = 1) -> int:
    """Return the positions that llama.cpp stores per sliding layer, padded to 256."""
    wanted = min(context, window_of(caches) * sequences + UBATCH)
    return -(-wanted // 256) * 256


def g4spec_slots(caches: Sequence[CacheShape], context: int) -> int:
    """Return the positions that g4spec's GPU runtime stores per sliding layer (ring size)."""
    return capacity(context, window_of(caches), SLACK)


def vllm_slots(window: int, batched: int, context: int) -> int:
    """Return the positions that vLLM stores per sliding layer for one sequence of at most `context`
    tokens, with two batches in flight (asynchronous scheduling)."""
    blocks = math.ceil((window - 1 + 2 * batched) / BLOCK) + 1
    return min(blocks, math.ceil(context / BLOCK)) * BLOCK


def shapes_per_card(caches: Sequence[CacheShape], tp: int) -> tuple[CacheShape, ...]:
    """Return the cache shapes on one card of a tensor-parallel group."""
    return tuple(CacheShape(math.ceil(c.n_kv / tp), c.head_dim, c.window) for c in caches)


def vllm_cache(
    caches: Sequence[CacheShape], context: int, kv: str, tp: int, batched: int
) -> tuple[int, int]:
    """Return vLLM's cache bytes per card for one sequence: (global layers, sliding layers)."""
    mine = shapes_per_card(caches, tp)
    slots = vllm_slots(window_of(caches), batched, context)
    return int(token_bytes(mine, kv) * context), int(slot_bytes(mine, kv) * slots)
