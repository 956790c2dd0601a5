"""Makes batches of sequences in any slots, and spaces with shuffled pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from g4spec.core import Batch
from g4spec.ops.kv import Space
from tests.gpu.device import DEVICE


def spread(n_slots: int, n_ctx: int, seed: int = 0, device: str = DEVICE) -> Space:
    """Return a space whose `n_slots` slots have all their pages, in random order. Its table has one
    more row, a spare slot without pages."""
    width = Space(1, n_ctx, 0).table.shape[1]
    space = Space(n_slots, n_ctx, n_slots * width, device)
    g = torch.Generator("cpu").manual_seed(seed)
    pages = 1 + torch.randperm(space.n_pages, generator=g, device="cpu").view(n_slots, width)
    space.table = torch.cat([pages, pages.new_zeros(1, width)]).to(torch.int32).to(device)
    return space


def rows_of(parts: Sequence[tuple[int, int, int]], device: str | torch.device = DEVICE) -> Batch:
    """Return a batch with (slot, position of the first row, number of rows) for each sequence; all
    tokens are 0."""
    positions = [p for _, start, count in parts for p in range(start, start + count)]
    slots = [slot for slot, _, count in parts for _ in range(count)]
    both = torch.tensor([positions, slots], dtype=torch.int64, device="cpu").to(device)
    sizes = tuple(count for _, _, count in parts)
    return Batch(torch.zeros_like(both[0]), both[0].contiguous(), both[1].contiguous(), sizes)


def one(start: int, count: int, device: str | torch.device = DEVICE) -> Batch:
    """Return a batch of `count` rows from position `start` on, in slot 0."""
    return rows_of([(0, start, count)], device)
