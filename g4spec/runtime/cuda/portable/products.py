"""Matmuls in torch, where no kernel supports the weights.

A row's bits do not depend on the other rows: torch always multiplies 16 rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from g4spec.ops.simple import TILE
from g4spec.runtime.cuda.build.constants import GROUP_ROWS
from g4spec.runtime.cuda.step import packed_layout
from g4spec.runtime.cuda.step.packed_rows import PackedRows
from g4spec.runtime.cuda.weights.dequant import Weight, plain

LARGEST = 512.0
"""Rows in half precision are divided by a power of two that brings their values below this."""


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Repeat the last row of x [n, ...] until there are TILE rows: padding of finite values."""
    missing = TILE - len(x)
    return x if missing == 0 else torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])


def numbers(x: torch.Tensor | PackedRows) -> torch.Tensor:
    """Return rows as float32 [T, K]."""
    if isinstance(x, torch.Tensor):
        return x
    y = packed_layout.unpack(x)[0][: len(x)].float()
    return y if x.scale is None else y * x.scale[: len(x), None]


def dense(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x float32 [T, K], T <= 16, with a float32 matrix [N, K] -> [T, N]."""
    return F.linear(pad_rows(x), weight)[: len(x)]


def product(x: torch.Tensor | PackedRows, weight: Weight, split: bool = True) -> torch.Tensor:
    """Multiply x [T, K], T <= 16, with a weight [N, K] in torch -> float32 [T, N].

    Args:
        split: multiply bfloat16 weights as they are, with x in two parts. GPUs before sm_80 have no
            such matmul; there they are converted to half precision.
    """
    if weight.data.dtype is torch.float32:
        return dense(numbers(x), weight.data)
    if weight.data.dtype is torch.bfloat16 and split:
        return _split(numbers(x), weight.data)
    half, scale = _halves(x)
    matrix = plain(weight).to(torch.float16)
    y = torch.mm(half, matrix.t(), out_dtype=torch.float32)
    return (y if scale is None else y * scale)[: len(x)]


def _halves(x: torch.Tensor | PackedRows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows as float16 [16, K], and the factor of each row of the result."""
    if isinstance(x, PackedRows):
        half = packed_layout.unpack(x)[0]
        if len(half) < GROUP_ROWS:
            half = torch.cat([half, half.new_zeros(GROUP_ROWS - len(half), half.shape[1])])
        return half, None if x.scale is None else x.scale[:, None]
    x = pad_rows(x)
    scale = row_scale(x)
    return (x / scale).to(torch.float16), scale


def row_scale(x: torch.Tensor) -> torch.Tensor:
    """Return the powers of two [T, 1] by which rows [T, K] are divided to be at most LARGEST."""
    exponent = torch.frexp(x.abs().amax(dim=1, keepdim=True) / LARGEST).exponent.clamp(min=0)
    return torch.ldexp(torch.ones_like(x[:, :1]), exponent)


def _split(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply with each float32 value of x as the sum of two bfloat16, both in one matmul."""
    n, x = len(x), pad_rows(x)
    high = x.to(torch.bfloat16)
    low = (x - high.float()).to(torch.bfloat16)
    y = torch.mm(torch.cat([high, low]), matrix.t(), out_dtype=torch.float32)
    return (y[: len(x)] + y[len(x) :])[:n]
