"""Attention over a `CudaKV` in plain torch, for shapes without a kernel.

It reads the whole cache, whatever is in it, so that a CUDA graph may hold it, and so that the order
of the sums depends on the cache's size alone. A row sees in slot s the newest position of at most
its `last` that stands there.
"""

from __future__ import annotations

import math

import torch

from g4spec.ops.simple import TILE, pad_rows
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV


def attend(
    q: torch.Tensor, kv: CudaKV, first: torch.Tensor, last: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `Ops.attend`; q [T, n_head, D] of any float type -> float32 [T, n_head * D]."""
    # Slots that were never written are zero.
    keys, values = (x.nan_to_num_(0.0) for x in kv.numbers(slice(None)))
    out = []
    for start in range(0, len(q), TILE):
        at = slice(start, start + TILE)
        out.append(_tile(q[at], keys, values, first[at], last[at], scale))
    return torch.cat(out)


def _tile(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    n, n_head, dim = q.shape
    n_kv, slots, _ = keys.shape
    group = n_head // n_kv
    q = pad_rows(q).float().view(TILE, n_kv, group, dim).permute(1, 0, 2, 3)
    scores = torch.bmm(q.reshape(n_kv, TILE * group, dim), keys.transpose(1, 2)) * scale
    first, last = pad_rows(first)[:, None], pad_rows(last)[:, None]
    slot = torch.arange(slots, device=q.device)
    seen = last - (last - slot) % slots >= first.clamp(min=0)  # [TILE, slots]
    scores = scores.view(n_kv, TILE, group, slots).masked_fill(~seen[None, :, None], -math.inf)
    weights = scores.softmax(-1).view(n_kv, TILE * group, slots)
    y = torch.bmm(weights, values).view(n_kv, TILE, group, dim).permute(1, 0, 2, 3)
    return y.reshape(TILE, n_head * dim)[:n]
