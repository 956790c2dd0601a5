"""How prefill proceeds, and the GPU memory that it needs, computed before anything is allocated."""

from __future__ import annotations

import torch

from g4spec.core import MAX_STEP_ROWS, PAGE, PROMPT_BLOCK, CacheShape
from g4spec.models.gemma4_config import Config
from g4spec.models.spec import LayerSpec
from g4spec.ops.kv_size import PADDING_POSITIONS, pages_of
from g4spec.runtime.cuda.build.constants import CACHE_ROTARY_PAIRS
from g4spec.runtime.cuda.cache.cuda_kv_size import SLACK, shares
from g4spec.runtime.cuda.prefill import prefill_attention
from g4spec.runtime.cuda.prefill.buffers import Shapes, nbytes
from g4spec.runtime.cuda.prefill.prefill_attention import padded
from g4spec.runtime.cuda.prefill.prefill_experts import Experts
from g4spec.runtime.cuda.step.attention_chunks import partial_bytes
from g4spec.runtime.cuda.weights.held_size import PACKING

Kind = tuple[int, ...]


def kind_of(window: int | None, n_head: int, n_kv: int, head_dim: int, rotary_pairs: int) -> Kind:
    """Return the key by which equal layers share buffers for queries, keys and values."""
    return window or 0, n_head, n_kv, head_dim, rotary_pairs


def ways(
    config: Config, arch: str
) -> dict[Kind, tuple[LayerSpec, type[prefill_attention.Attention]]]:
    """Return a layer of each kind that has keys, with its attention class on `arch` ("": any)."""
    out = {}
    for s in config.layers:
        if s.kv_from is None:
            shared = s.v_from_k and shares(s.head_dim, s.rotary_pairs)
            rotary_pairs = CACHE_ROTARY_PAIRS if shared else 0
            way = prefill_attention.kind(s.head_dim, rotary_pairs, arch)
            out[kind_of(s.window, s.n_head, s.n_kv, s.head_dim, rotary_pairs)] = s, way
    return out


def most_rows(chunk: int, n_ctx: int) -> int:
    """Return the number of rows of the longest chunk of a context, including padding."""
    return padded(min(chunk, n_ctx), PROMPT_BLOCK)


def shared(config: Config, rows: int) -> Shapes:
    """Return the buffers that all layers share."""
    h, layers, half = config.n_embd, config.layers, torch.float16
    wide = max(max(s.n_ff * 2, (s.n_head + 2 * s.n_kv) * s.head_dim) for s in layers)
    inner = max(max(s.n_ff, s.n_head * s.head_dim, s.n_ple) for s in layers)
    largest = (
        max(
            wide,
            len(layers) * config.n_ple,
            *(max(s.n_expert * s.n_ff_expert * 2, s.n_ple) for s in layers),
        )
        * h
    )
    return {
        "_normed": ((rows, h), half),
        "_sums": ((rows, h), torch.float32),
        "_wide": ((rows * wide,), half),
        "_inner": ((rows * inner,), half),
        "_scratch": ((largest,), half),
    }


def partial_results(config: Config, n_ctx: int, sequences: int) -> int:
    """Return the bytes of partial results of attention in the largest step of so many sequences."""
    positions = pages_of(n_ctx + PADDING_POSITIONS) * PAGE
    shapes = [
        (CacheShape(s.n_kv, s.head_dim, None), s.n_head) for s in config.layers if s.window is None
    ]
    return max((partial_bytes(shape, n, positions, sequences) for shape, n in shapes), default=0)


def rows_at_once(config: Config, n_ctx: int) -> int:
    """Return how many rows of a prompt are computed at once as in a step: as many as a ring has
    room for beyond its window, but no more than have room for partial results of attention in the
    memory that packing has used before: twice, op by op and in the memory of graphs."""
    groups = SLACK // MAX_STEP_ROWS
    while groups > 1 and partial_results(config, n_ctx, groups) > PACKING // 2:
        groups //= 2
    return groups * MAX_STEP_ROWS


def max_short_block(arch: str) -> int:
    """Return the maximum number of rows of a prompt's last block that are computed as in a step on
    an architecture ("": with portable kernels). More of them would take longer than a whole block
    (LOG.md, 2026-11-27)."""
    return 0 if not arch else 3 * SLACK if arch == "sm_90a" else SLACK


def workspace(config: Config, chunk: int, n_ctx: int, arch: str) -> tuple[int, int]:
    """Return the bytes that `LongOps` allocates beside weights and caches, and the temporary bytes
    of a pass beside residual and taps (without the workspace of cuBLAS)."""
    first, rows = config.layers[0], most_rows(chunk, n_ctx)
    kept = nbytes(shared(config, rows)) + sum(
        nbytes(way.buffers(spec, rows, n_ctx)) for spec, way in ways(config, arch).values()
    )
    pairs = {s.window is None: s.rotary_pairs for s in config.layers}
    passing = rows * 4 * (first.n_ple + sum(2 * count for count in pairs.values()))
    passing += nbytes({"wide": shared(config, rows)["_wide"]})  # see Products.in_runs
    if first.n_expert:
        kept += nbytes(Experts.buffers(first, config.n_embd, rows, arch))
        passing += Experts.passing(first, config.n_embd, rows, arch)
    return kept, passing
