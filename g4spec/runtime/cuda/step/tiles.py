"""Ops that support at most 16 rows, applied to more rows. A row has the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from g4spec.runtime.cuda.build.constants import GROUP_ROWS
from g4spec.runtime.cuda.step.packed_rows import PackedRows


def in_tiles(op: Callable[..., torch.Tensor], *args: torch.Tensor | PackedRows) -> torch.Tensor:
    """Compute `op` of `args` that have a row for each token, 16 rows at a time -> [T, N]."""
    count = len(args[0])
    if count <= GROUP_ROWS:
        return op(*args)
    return torch.cat([op(*(_tile(a, at) for a in args)) for at in range(0, count, GROUP_ROWS)])


def _tile(x: torch.Tensor | PackedRows, at: int) -> torch.Tensor | PackedRows:
    """Return at most 16 rows from `at` on."""
    return (
        x[at : at + GROUP_ROWS]
        if isinstance(x, torch.Tensor)
        else x.part(at // GROUP_ROWS, at // GROUP_ROWS + 1)
    )
