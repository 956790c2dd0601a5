"""The ops that drafts use for prompts: rows of one prompt block.

Every op computes PROMPT_BLOCK rows, with missing rows as zeros, so that the bits of a row do not
depend on other rows. Rows between ops are float32 numbers; matrices are dequantized for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from g4spec.core import PROMPT_BLOCK, Batch
from g4spec.ops.reference import Ops
from g4spec.ops.spans import Span
from g4spec.ops.weights import Attention
from g4spec.runtime.cuda.build.constants import GROUP_ROWS
from g4spec.runtime.cuda.cache.heads import Heads
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.portable.products import numbers, row_scale
from g4spec.runtime.cuda.step import packed_rows
from g4spec.runtime.cuda.weights.dequant import plain
from g4spec.runtime.cuda.weights.matrix import Matrix, join


@dataclass(frozen=True, slots=True)
class ProjectedQkv:
    """Projections y [T, heads * D] of queries, keys and values, before their norms and RoPE."""

    heads: Heads
    y: torch.Tensor


class DraftOps(CudaOps):
    """`Ops` for at most PROMPT_BLOCK rows of one sequence. `ops`: the ops of steps, with the same
    weights."""

    def __init__(self, ops: CudaOps) -> None:
        vars(self).update(vars(ops))

    def linear(self, x: torch.Tensor, weight: Any, *, partial_sums: bool = False) -> torch.Tensor:
        matrix, n = plain(weight.weight) if isinstance(weight, Matrix) else weight, len(x)
        x = _block(x)
        if matrix.dtype is torch.float32:
            return torch.mm(x, matrix.t())[:n]
        if matrix.dtype is torch.bfloat16:
            matrix = matrix.to(torch.float16)
        scale = row_scale(x)
        y = torch.mm((x / scale).to(torch.float16), matrix.t(), out_dtype=torch.float32)
        return y.mul_(scale)[:n]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if not packed_rows.fits(x.shape[-1]) or x.dim() != 2:
            return Ops.rms_norm(self, x, weight, eps)
        return packed_rows.rms_norm(_block(x), weight, eps)[: len(x)]

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        return self.rms_norm(x, weight, eps)

    def norm_residual_norm(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None = None,
        *,
        unpacked: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        return Ops.norm_residual_norm(self, h, x, weight, eps, next_norm, scale)

    def qkv(self, h: Any, a: Attention, batch: Batch, kv: Any, *, queries: bool = True) -> Any:
        """See `Ops.qkv`. With queries, keys and values are appended by `attend`, tile by tile, so
        that a ring buffer needs no more room than for steps."""
        weights = [w for w in (a.q, a.k, a.v) if w is not None]
        if all(isinstance(w, Matrix) for w in weights):
            join(weights)  # as steps read them
        weights = weights if queries else weights[1:]
        y = torch.cat([self.linear(h, w) for w in weights], dim=1)
        if queries:
            return ProjectedQkv(Heads.of(a), y)
        rows = slice(0 if kv.paged else max(0, len(batch) - kv.capacity), len(batch))
        return Heads.of(a, queries=False)(y[rows], batch.part(rows), kv)

    def keys_values(
        self, h: Any, layers: Sequence[Attention], batch: Batch, kvs: Sequence[Any]
    ) -> None:
        self._context(layers, kvs)
        Ops.keys_values(self, h, layers, batch, kvs)

    def attend(self, q: Any, kv: Any, span: Span, scale: float) -> torch.Tensor:
        """See `Ops.attend`; computes 16 rows at a time, as in a step."""
        assert isinstance(q, ProjectedQkv)
        out = []
        for at in range(0, len(span.batch), GROUP_ROWS):
            rows = slice(at, at + GROUP_ROWS)
            part = span.part(rows)
            turned = q.heads(q.y[rows], part.batch, kv)
            out.append(numbers(super().attend(turned, kv, part, scale)))
        return torch.cat(out)

    def gated(
        self,
        x: torch.Tensor,
        gate: Any,
        up: Any,
        down: Any,
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        partial_sums: bool = False,
    ) -> torch.Tensor:
        return Ops.gated(self, x, gate, up, down, activation, partial_sums=partial_sums)


def _block(x: torch.Tensor) -> torch.Tensor:
    """Pad rows x [T, N] with zeros to a whole block."""
    assert len(x) <= PROMPT_BLOCK, len(x)
    missing = PROMPT_BLOCK - len(x)
    return torch.cat([x, x.new_zeros(missing, x.shape[1])]) if missing else x
