"""Attention over a `CudaKV` in plain torch, for shapes without a kernel.

It reads everything that the cache stores of a slot, so that a CUDA graph can record it, and so that
the order of sums depends only on the cache's size. A place of the cache has the newest position, up
to a row's `last`, that maps to it.
"""

from __future__ import annotations

import math

import torch

from g4spec.core import Batch
from g4spec.ops.simple import TILE
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.portable.products import pad_rows


def attend(
    q: torch.Tensor,
    kv: CudaKV,
    batch: Batch,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute `Ops.attend`; q [T, n_head, D] of any float type -> float32 [T, n_head * D]."""
    out = []
    for start, size in zip(batch.starts, batch.sizes, strict=True):
        keys, values = (x.transpose(0, 1) for x in kv.whole(batch.slots[start]))
        for begin in range(start, start + size, TILE):
            at = slice(begin, min(begin + TILE, start + size))
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
    """Compute rows [n, n_head, D] of one sequence over keys and values [n_kv, places, D]."""
    n, n_head, dim = q.shape
    n_kv, places, _ = keys.shape
    group = n_head // n_kv
    q = pad_rows(q).float().view(TILE, n_kv, group, dim).permute(1, 0, 2, 3)
    scores = torch.bmm(q.reshape(n_kv, TILE * group, dim), keys.transpose(1, 2)) * scale
    first, last = pad_rows(first)[:, None], pad_rows(last)[:, None]
    place = torch.arange(places, device=q.device)
    seen = last - (last - place) % places >= first.clamp(min=0)  # [TILE, places]
    scores = scores.view(n_kv, TILE, group, places).masked_fill(~seen[None, :, None], -math.inf)
    # Weight 0 times NaN is NaN: in places that were never written, and those of later rows.
    values = values.where(values.isfinite() | seen.all(0)[:, None], 0.0)
    weights = scores.softmax(-1).view(n_kv, TILE * group, places)
    y = torch.bmm(weights, values).view(n_kv, TILE, group, dim).permute(1, 0, 2, 3)
    return y.reshape(TILE, n_head * dim)[:n]
