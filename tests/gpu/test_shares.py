"""Attention of many sequences: how the chunks of their keys are distributed over blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from g4spec.core import CacheShape
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.step.attention_chunks import Chunks
from tests.gpu.device import DEVICE

pytestmark = pytest.mark.gpu

KEYS = 64
SOURCE = """
#include "attention_chunks.cuh"
template <int KEYS>
__global__ void shares(const i64* first, const i64* last, int* found, int* costs, int sequences,
                       int tokens, int heads, int row_blocks, int shift, int growing, int most) {
  __shared__ AttentionWork<KEYS> work;
  if (threadIdx.x < 32) {
    const Chunks chunks = {shift, growing};
    const BlockShare own =
        work.assign_block(chunks, first, last, sequences, tokens, heads * row_blocks);
    const int row = own.sequence * tokens;
    work.build_items(chunks, span_of(first + row, last + row, tokens), {nullptr, 0, 0}, 0, heads,
             row_blocks, own);
  }
  __syncthreads();
  if (threadIdx.x) return;
  int cost = 0;
  for (int i = 0; i < work.count; ++i) {
    const WorkItem& item = work.items[i];
    const int pair = (work.sequence * heads + item.head) * row_blocks + item.row_block;
    atomicAdd(found + (i64)pair * most + item.chunk, 1);
    cost += (item.end - item.tile) * 4 + 1;
  }
  costs[blockIdx.x] = cost;
}
"""
"""A kernel that counts how often each chunk of each pair is in a block's list, and the cost of the
list."""

CASES = {
    "one": ([40_000], 1, 132),
    "alike": ([300] * 16, 1, 132),
    "many alike": ([300 + i % 7 for i in range(64)], 1, 256),
    "one a thousand times as long": ([262_000, *[262] * 63], 1, 256),
    "two long, rows in two parts": ([100, 90_000, 3, 250_000, 17], 2, 132),
    "anything": ([1 + 977 * i * i % 60_000 for i in range(48)], 1, 192),
    "more than a warp's": ([500, *[64] * 99], 1, 400),
}
"""Contexts, row parts, blocks."""


@pytest.mark.parametrize("case", CASES)
def test_every_chunk_has_one_block_and_blocks_are_balanced(case: str, tmp_path: Path) -> None:
    contexts, row_blocks, blocks = CASES[case]
    heads, tokens, sequences = 4 // row_blocks, 2, len(contexts)
    file = tmp_path / "shares.cu"
    file.write_text(SOURCE)
    chunks = Chunks.of(CacheShape(heads, 512, None), max(contexts))
    room = chunks.most(max(contexts), max(contexts))
    last = torch.tensor([[n - 2, n - 1] for n in contexts]).clamp(min=0).to(DEVICE).flatten()
    found = torch.zeros(sequences, 4, room, dtype=torch.int32, device=DEVICE)
    costs = torch.zeros(blocks, dtype=torch.int32, device=DEVICE)
    launch.kernel(str(file), f"shares<{KEYS}>")(
        blocks,
        64,
        first=last * 0,
        last=last,
        found=found,
        costs=costs,
        sequences=sequences,
        tokens=tokens,
        heads=heads,
        row_blocks=row_blocks,
        shift=chunks.shift,
        growing=chunks.growing,
        most=room,
    )
    for sequence, context in enumerate(contexts):
        seen = chunks.index(context - 1) + 1
        assert (found[sequence, :, :seen] == 1).all(), sequence
        assert not found[sequence, :, seen:].any()
    even = int(costs.sum()) / blocks  # a sequence has 1, 2, 4, 8 .. blocks: not quite that
    assert int(costs.max()) < 1.6 * even + 4 * longest_chunk(chunks, max(contexts)) + 1, case


def longest_chunk(chunks: Chunks, positions: int) -> int:
    """Return the tiles of the longest chunk among this many positions."""
    ends = [p for p in range(1, positions) if chunks.index(p) != chunks.index(p - 1)]
    lengths = np.diff([0, *ends, positions])
    return int(-(-lengths.max() // KEYS))
