"""Keys and values of several layers from the same rows, a draft's context, in two launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from g4spec.ops.weights import Attention
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import HEADS_PER_BLOCK, NORM_V, PACK_ROWS
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.cache.heads import CACHE_NUMBERS, HEAD_DIMS, Heads
from g4spec.runtime.cuda.step import linear_wide
from g4spec.runtime.cuda.step.linear import SplitKWorkspace
from g4spec.runtime.cuda.step.packed_rows import PackedRows
from g4spec.runtime.cuda.weights.dequant import Weight
from g4spec.runtime.cuda.weights.held_size import MOST_ROWS
from g4spec.runtime.cuda.weights.matrix import Matrix, join


@dataclass(frozen=True, slots=True)
class Context:
    """Layers of one shape whose keys and values are computed together.

    Attributes:
        weight: projections of keys and values of each layer, concatenated.
        layers: int64 [L, 8], structs `Layer` of heads.cu; `held` keeps what they point to alive.
        heads: norms and RoPE of all layers.
        q8: their caches are Q8_0.
    """

    weight: Weight
    layers: torch.Tensor
    held: list[torch.Tensor | None]
    heads: Heads
    q8: int

    def __call__(
        self,
        x: PackedRows,
        positions: torch.Tensor,
        slots: torch.Tensor,
        workspace: SplitKWorkspace,
    ) -> None:
        """Append the keys and values of rows x [T, H] at `positions` [T] of `slots` [T] (as in
        `Heads`)."""
        h, y = self.heads, linear_wide.linear(x, self.weight, workspace)
        launch.kernel("heads.cu", instance(h.head_dim, self.q8))(
            (-(-2 * h.n_kv // HEADS_PER_BLOCK), len(x), len(self.layers)),
            32 * HEADS_PER_BLOCK,
            y=y,
            layers=self.layers,
            freqs=h.freqs,
            positions=positions,
            slots=slots,
            rows=len(x),
            n_kv=h.n_kv,
            flags=NORM_V * h.v_norm,
            eps=h.eps,
        )


def of(layers: Sequence[Attention], kvs: Sequence[CudaKV]) -> Context | None:
    """Return these layers as a context, their projections packed together. Return None if they
    differ or are already packed."""
    matrices = [m for a in layers for m in (a.k, a.v)]
    if not all(isinstance(m, Matrix) and m.grouped and not m.packed for m in matrices):
        return None
    heads = [Heads.of(a, queries=False) for a in layers]
    kinds = {(m.type, m.shape) for m in matrices}
    alike = {(h.n_kv, h.v_norm, h.pairs, h.eps, h.freqs, h.k_norm is None) for h in heads}
    stored = {(kv.kind, kv.rotary_pairs) for kv in kvs}
    if len(kinds) > 1 or len(alike) > 1 or len(stored) > 1 or heads[0].pairs or kvs[0].rotary_pairs:
        return None
    if sum(m.rows for m in matrices) > MOST_ROWS:
        return None
    if matrices[0].rows % PACK_ROWS or heads[0].head_dim not in HEAD_DIMS:
        return None
    launch.assert_lengths(heads[0].head_dim, *(h.k_norm for h in heads))
    join(matrices)
    planes = [
        (h.k_norm, kv.keys, kv.key_scales, kv.values, kv.value_scales, kv.table)
        for h, kv in zip(heads, kvs, strict=True)
    ]
    rows = [
        [*(0 if x is None else x.data_ptr() for x in held), kv.space.table.shape[1], kv.capacity]
        for held, kv in zip(planes, kvs, strict=True)
    ]
    weight = matrices[0].span_to(matrices[-1], sum(m.rows for m in matrices))
    structs = torch.tensor(rows, device=kvs[0].keys.device)
    return Context(weight, structs, [x for p in planes for x in p], heads[0], kvs[0].type.number)


def instance(head_dim: int, q8: int) -> str:
    """Return the name of a kernel of heads.cu."""
    return f"append_layers<{head_dim}, {q8}>"


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    return [
        Unit(
            "heads.cu",
            tuple(instance(dim, q8) for dim in HEAD_DIMS for q8 in CACHE_NUMBERS),
            max_registers=80,
        ),
    ]
