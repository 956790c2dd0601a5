"""The largest logit of a row from a part of the table's bytes.

A draft needs only the position of the largest logit, but its LM head would read the whole table of
the target. In Q6_K the two upper bits of each code, with the scales, are 39 % of the bytes and
nearly determine which tokens can win. A matmul with only these selects the best 64 columns of a
row, and only their logits are computed in full; the largest of these wins. (With weights from a
normal distribution, the upper bits alone have an error of a third of the logits' standard
deviation.)

Only drafts may use this: a largest logit outside the 64 changes a proposal, never the text.

Rows [T, K] of that matmul are int8. A buffer has K / 256 units of 2080 * tiles bytes: row m, column
k of a unit, with k32 = k / 32, j = k % 32 / 16, t = k % 16 / 4, e = k % 4 and lane = m % 8 * 4 + t,
is byte e % 2 * 4 + e / 2 * 2 + 1 - j of the 8 bytes at (k32 / 2 * 32 + lane) * 16 + k32 % 2 * 8
(one tile) or at (k32 * 32 + lane) * 16 + m / 8 * 8 (two tiles). Then follows float32 [8 * tiles],
the scale of each row.
"""

from __future__ import annotations

import torch

from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.constants import (
    BYTE_ROWS,
    GROUP_ROWS,
    LOGIT_SPAN,
    LOGIT_THREADS,
    SCREEN_KEYS,
)
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.step import linear
from g4spec.runtime.cuda.step.choose import Choice, Chosen
from g4spec.runtime.cuda.step.linear import SplitKWorkspace
from g4spec.runtime.cuda.step.packed_rows import PackedRows, tiles
from g4spec.runtime.cuda.weights.dequant import Weight

CANDIDATES = 64
"""Columns of a row whose logits are computed in full."""

OF_SPAN = 16
"""Maximum number of them in one span of columns."""

LARGEST, IN_FULL = f"largest<{CANDIDATES}>", "in_full<quad::Q6K, 256>"
"""Kernels of screen.cu."""

MIN_COLUMNS, MAX_COLUMNS = 32_768, SCREEN_KEYS * LOGIT_THREADS // OF_SPAN * LOGIT_SPAN
"""Minimum number of columns for which it pays, and maximum for which the kernel has room."""


def takes(weight: Weight, columns: int) -> bool:
    """Return whether a table [V, H] of logits [T, columns] has its upper bits apart, and enough
    rows to gain from it."""
    return weight.type == "q6_k" and MIN_COLUMNS <= weight.rows == columns <= MAX_COLUMNS


def byte_rows(x: torch.Tensor) -> PackedRows:
    """Quantize x float32 [T, K] to int8; T <= 16."""
    count, width = x.shape
    units, n = width // 256, tiles(count)
    assert width % 256 == 0 and x.is_contiguous(), x.shape
    data = torch.empty(units, BYTE_ROWS * n, dtype=torch.uint8, device=x.device)
    launch.kernel("screen.cu", "byte_rows")(
        (units, n),
        LOGIT_THREADS,
        x=x,
        rows=count,
        out=data,
    )
    return PackedRows(data, count, width)


def best(
    x: torch.Tensor,
    weight: Weight,
    choice: Choice,
    workspace: SplitKWorkspace,
    cap: float,
    into: Chosen,
    sequences: int = 1,
    pitch: int = 0,
) -> Chosen:
    """Choose the largest of the logits of each row of x float32 [T, H], capped if `cap`.

    Args:
        weight: the table [V, H]; V as `choice.columns`.
        choice: a greedy one.
        into: output, which is returned.
        sequences, pitch: as in `Choice.__call__`.
    """
    assert choice.modes == ("greedy",) and weight.rows == choice.columns, (choice.modes, weight)
    full = torch.empty(len(x), CANDIDATES, dtype=torch.int64, device=x.device)
    for first in range(0, len(x), GROUP_ROWS):
        rows = slice(first, first + GROUP_ROWS)
        _tile(x[rows], weight, choice, workspace, cap, full[rows])
    return choice.end(full, into, sequences, pitch)


def _tile(
    x: torch.Tensor,
    weight: Weight,
    choice: Choice,
    workspace: SplitKWorkspace,
    cap: float,
    full: torch.Tensor,
) -> None:
    """Write keys `full` [T, CANDIDATES] of at most 16 rows x: their candidates, with full
    logits."""
    count, size = len(x), weight.data.shape[2]
    candidates = choice.top(linear.linear_upper(byte_rows(x), weight, workspace), OF_SPAN)
    keys = torch.empty_like(full)
    launch.kernel("screen.cu", LARGEST)(
        count,
        LOGIT_THREADS,
        keys=candidates,
        found=candidates.shape[1],
        out=keys,
    )
    launch.kernel("screen.cu", IN_FULL)(
        (CANDIDATES, count),
        LOGIT_THREADS,
        keys=keys,
        table=weight.data,
        x=x,
        width=weight.columns,
        unit_bytes=size,
        cap=cap,
        out=full,
    )


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    return [
        Unit("screen.cu", ("byte_rows", LARGEST, IN_FULL), nvrtc.TENSOR_ARCHS, max_registers=112)
    ]
