"""Computes the inputs of attention from the QKV projection, in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from g4spec.core import Batch
from g4spec.ops.weights import Attention
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import (
    CACHE_ROTARY_PAIRS,
    HEADS_PER_BLOCK,
    NORM_V,
    V_FROM_K,
)
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.cache.cache_types import TYPES
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV

HEAD_DIMS = (64, 128, 256, 512)

CACHE_NUMBERS = tuple(type.number for type in TYPES.values())

PLANES = ("keys", "values", "key_scales", "value_scales")
"""Parameters of heads.cu that take `CudaKV.planes`."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Norms and RoPE of the heads of a layer.

    Attributes:
        n_q, n_kv: query heads and KV heads in the projection; either may be 0.
        q_norm, k_norm: weights [head_dim] of their norms, or None: not normed.
        v_norm: values are normed, without weight.
        v_from_k: values are keys before norm and rotation; the projection has no values.
        freqs: radians per position, float32 [head_dim / 2].
        pairs: values that are rotated together are neighbours (2 i, 2 i + 1); otherwise (i, i +
            head_dim / 2).
    """

    n_q: int
    n_kv: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    v_norm: bool
    v_from_k: bool
    freqs: torch.Tensor
    eps: float
    pairs: bool = False

    @classmethod
    def of(cls, a: Attention, queries: bool = True) -> Heads:
        """Return the heads of an attention sublayer, with or without queries."""
        return cls(
            n_q=a.q.shape[0] // a.head_dim if queries else 0,
            n_kv=0 if a.k is None else a.k.shape[0] // a.head_dim,
            q_norm=a.q_norm,
            k_norm=a.k_norm,
            v_norm=a.v_norm,
            v_from_k=a.k is not None and a.v is None,
            freqs=a.freqs,
            eps=a.eps,
            pairs=a.interleaved,
        )

    @property
    def head_dim(self) -> int:
        return 2 * len(self.freqs)

    def __call__(self, y: torch.Tensor, batch: Batch, kv: CudaKV | None) -> torch.Tensor:
        """Norm and rotate; append keys and values to `kv`.

        Args:
            y: float32 [T, (n_q + 2 n_kv) * head_dim] (n_kv if `v_from_k`): queries, keys, values;
                or split-K partial sums [S, T, ...], added in order. Any T.
            batch: the rows. The predecessor of the preceding kernel, or an earlier one, wrote
                positions and slots (see packed_rows.py).
            kv: cache that rows are appended to, or, without keys, that queries will read.

        Returns:
            Queries, half [T, n_q, head_dim], multiplied by `kv.weight`.
        """
        dim, heads = self.head_dim, self.n_q + 2 * self.n_kv
        slices, (count, width) = y.shape[0] if y.dim() == 3 else 1, y.shape[-2:]
        projected = heads - self.n_kv if self.v_from_k else heads
        assert width == projected * dim and dim in HEAD_DIMS, (y.shape, projected, dim)
        launch.assert_lengths(dim, self.q_norm, self.k_norm)
        assert len(batch) == count and batch.positions.dtype is torch.int64, (len(batch), count)
        q = torch.empty(count, self.n_q, dim, dtype=torch.float16, device=y.device)
        planes: dict[str, Any] = dict.fromkeys(PLANES)
        table, width, capacity, type, rotary_pairs, k_norm = (
            None,
            0,
            1,
            TYPES["f16"],
            0,
            self.k_norm,
        )
        if kv is not None and kv.rotary_pairs:
            rotary_pairs, k_norm = kv.rotary_pairs, self._weight(kv)
        if self.n_kv:
            assert kv is not None and (kv.n_kv, kv.head_dim) == (self.n_kv, dim), kv
            assert kv.paged or max(batch.sizes) <= kv.capacity, (batch.sizes, kv.capacity)
            table, width, capacity = kv.table, kv.space.table.shape[1], kv.capacity
            type, planes = kv.type, dict(zip(PLANES, kv.planes, strict=True))
        name = instance(dim, slices, pairs=self.pairs, q8=type.number, rotary_pairs=rotary_pairs)
        launch.kernel("heads.cu", name)(
            (-(-heads // HEADS_PER_BLOCK), count),
            32 * HEADS_PER_BLOCK,
            y=y,
            q_norm=self.q_norm,
            k_norm=k_norm,
            freqs=self.freqs,
            positions=batch.positions,
            slots=batch.slots,
            q=q,
            **planes,
            table=table,
            rows=count,
            n_q=self.n_q,
            n_kv=self.n_kv,
            flags=NORM_V * self.v_norm + V_FROM_K * self.v_from_k,
            width=width,
            capacity=capacity,
            eps=self.eps,
        )
        return q

    def _weight(self, kv: CudaKV) -> torch.Tensor:
        """Return the weight that queries are multiplied by, and set `kv.weight` if rows are
        appended."""
        if self.n_kv:
            assert self.v_from_k and self.v_norm and not self.pairs, self
            kv.weight = self.k_norm
        assert kv.head_dim == self.head_dim and kv.weight is not None, kv
        return kv.weight


def instance(
    head_dim: int,
    slices: int = 1,
    *,
    pairs: bool = False,
    q8: int = 0,
    rotary_pairs: int = 0,
) -> str:
    """Return the name of a kernel of heads.cu."""
    flags = (int(pairs), slices, q8, rotary_pairs)
    return f"finish_heads<{head_dim}, {', '.join(map(str, flags))}>"


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    return [
        Unit(
            "heads.cu",
            tuple(
                instance(dim, pairs=pairs, q8=q8)
                for dim in HEAD_DIMS
                for pairs in (False, True)
                for q8 in CACHE_NUMBERS
            ),
            max_registers=80,
        ),
        Unit(
            "heads.cu",
            (
                *(instance(dim, n, q8=TYPES["q8_0"].number) for dim in (128, 256) for n in (2, 4)),
                *(instance(512, q8=q8, rotary_pairs=CACHE_ROTARY_PAIRS) for q8 in CACHE_NUMBERS),
            ),
            max_registers=80,
        ),
    ]
