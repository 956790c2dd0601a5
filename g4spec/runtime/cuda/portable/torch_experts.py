"""Experts of a step in torch, for shapes without a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from g4spec.runtime.cuda.build.constants import GROUP_ROWS, INTERLEAVE_ROWS
from g4spec.runtime.cuda.portable.products import pad_rows
from g4spec.runtime.cuda.weights.dequant import plain
from g4spec.runtime.cuda.weights.matrix import Matrix


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate: Any,
    up: Any,
    down: Any,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute `Ops.experts`: every expert for every row, in tiles of 16."""
    interleaved = isinstance(gate, Matrix) and gate.interleaved
    stacks = [_stack(w) for w in (gate, None if interleaved else up, down) if w is not None]
    if interleaved:
        both = stacks[0].view(len(stacks[0]), -1, 2, INTERLEAVE_ROWS, stacks[0].shape[2])
        stacks[:1] = [both[:, :, i].flatten(1, 2) for i in (0, 1)]
    elif up is None:
        stacks[:1] = stacks[0].chunk(2, dim=1)
    out = []
    for start in range(0, len(x), GROUP_ROWS):
        tile = x[start : start + GROUP_ROWS]
        n = len(tile)
        tile = pad_rows(tile)
        inner = [torch.matmul(tile.to(w.dtype), w.transpose(1, 2)).float() for w in stacks[:2]]
        h = (activation(inner[0]) * inner[1] * 2.0**-6).to(stacks[2].dtype)
        y = torch.matmul(h, stacks[2].transpose(1, 2)).float() * 2.0**6  # [E, 16, H]
        chosen = y.transpose(0, 1)[:n].gather(
            1, ids[start : start + n, :, None].expand(-1, -1, y.shape[2])
        )
        out.append((chosen * weights[start : start + n, :, None]).sum(1))
    return torch.cat(out)


def _stack(weight: Any) -> torch.Tensor:
    """Return the matrices of all experts as floats [E, rows, columns]."""
    if isinstance(weight, torch.Tensor):
        return weight
    w = weight.weight
    return plain(w).view(w.matrices, w.rows, w.columns)
