"""The ops on an NVIDIA GPU, for steps.

A step has any number of rows, at most 16 of each sequence, or up to 128 of the end of a prompt.
Inputs of matmuls are `PackedRows`, in groups of 16 rows, or float32 tensors for widths that kernels
do not support. A matmul reads each weight once for up to 64 rows of any sequences; a row has the
same bits in a batch of any size. Expert layers group up to 128 rows by expert; matmuls in torch
process 16 rows at a time. Long chunks of prompts have ops of their own (`cuda.prefill`). Ops
without a kernel run in torch on the GPU and are named in `CudaOps.without_kernel`.

GPUs before sm_80 lack instructions that most matmul and attention kernels need. On them, on GPUs
that `nvrtc.ARCHS` does not contain, and on request, rows are float32 throughout and matrices have
the file's order (`g4spec.runtime.cuda.portable.portable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from g4spec.core import Batch
from g4spec.ops.reference import Ops, Spans
from g4spec.ops.simple import sum_in_order
from g4spec.ops.spans import Span
from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.constants import ACT_COLUMNS, GROUP_ROWS
from g4spec.runtime.cuda.cache.heads import HEAD_DIMS, Heads
from g4spec.runtime.cuda.portable import portable, products, torch_attention, torch_experts
from g4spec.runtime.cuda.step import (
    attention,
    attention_window,
    context,
    elementwise,
    linear_wide,
    packed_layout,
)
from g4spec.runtime.cuda.step import packed_rows as rows
from g4spec.runtime.cuda.step.attention_window import ProjectedQkv
from g4spec.runtime.cuda.step.experts import Buffers, Experts, ExpertShape
from g4spec.runtime.cuda.step.linear import SplitKWorkspace
from g4spec.runtime.cuda.step.packed_rows import PackedRows, Residual
from g4spec.runtime.cuda.step.tiles import in_tiles
from g4spec.runtime.cuda.weights import embedding
from g4spec.runtime.cuda.weights.dequant import Weight
from g4spec.runtime.cuda.weights.matrix import GateUpPairs, Matrix, concat_rows, join, weight_of

if TYPE_CHECKING:
    from g4spec.core import Pick, Reach
    from g4spec.ops.weights import Attention, ExpertLayer

Value = torch.Tensor | PackedRows
Activation = Callable[[torch.Tensor], torch.Tensor]


@runtime_checkable
class TablePick(Protocol):
    """A `Pick` that can choose tokens from hidden states and the token table, without all
    logits."""

    def best(
        self, hidden: torch.Tensor, table: Weight, by: SplitKWorkspace, at: int, cap: float
    ) -> torch.Tensor | None:
        """Return tokens for rows [T, H] and the table [V, H], or None if all logits are needed."""
        ...


class CudaOps(Ops):
    """`Ops` on a CUDA device.

    Args:
        portable: use only the kernels for every GPU, also on GPUs that support the fast ones.

    Attributes:
        title: name of the GPU, and the architecture of its kernels if it is not the GPU's own.
        portable: it uses only the kernels for every GPU.
        without_kernel: ops that have run in torch so far.
        fused_windows: use one kernel for attention of layers with a window, at most 16 rows of each
            sequence.
        pairs: packed gate and up projections.
    """

    name = "cuda"

    def __init__(self, device: str = "cuda", portable: bool = False) -> None:
        super().__init__(device)
        self.title = torch.cuda.get_device_name(self.device)
        self.portable = portable or launch.arch(self.device.index) not in nvrtc.TENSOR_ARCHS
        arch = launch.arch(self.device.index)
        self.title += f", kernels of {arch}" if arch != launch.own_arch(self.device.index) else ""
        self.title += ", portable kernels" if self.portable else ""
        self.fused_windows = True
        self._exchange = SplitKWorkspace(self.device)
        self.pairs = GateUpPairs()
        self._layers: dict[Any, Experts | None] = {}
        self._buffers: dict[ExpertShape, Buffers] = {}
        self._contexts: dict[Any, context.Context | None] = {}

    # ---- simple operations

    def embed(self, table: Any, ids: torch.Tensor, scale: float) -> torch.Tensor:
        if isinstance(table, torch.Tensor):
            return table[ids] * scale
        if table.columns % 4:  # quantized rows are wider blocks
            self.without_kernel.add(f"rows of {table.columns} values")
            values: torch.Tensor = table.table[ids]
            return values.float() * scale
        data, name = table.table, table.type
        if not name:
            name = "bf16" if data.dtype is torch.bfloat16 else "f16"
            data = data.view(torch.uint8)
        return embedding.embed(data, name, ids, table.columns, scale)

    def linear(self, x: Any, weight: Any, *, partial_sums: bool = False) -> torch.Tensor:
        if isinstance(weight, torch.Tensor) and self.portable:
            return self._product(x, weight_of(weight))
        if isinstance(weight, torch.Tensor):
            self.without_kernel.add("linear (float32)")
            return in_tiles(lambda part: products.dense(part, weight), products.numbers(x))
        return self._product(self._rows(x), weight.weight, partial_sums)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if not rows.fits(x.shape[-1]):
            return super().rms_norm(x, weight, eps)
        return rows.rms_norm(x, weight, eps)

    # ---- fused operations

    def spans(self, batch: Batch, reaches: Iterable[Reach]) -> Spans:
        if not batch.rows_per_sequence:
            return super().spans(batch, reaches)
        return elementwise.spans(batch, list(reaches))

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        if not self._as_rows(x):
            return self.rms_norm(x, weight, eps)
        return rows.rms_norm_rows(x, weight, eps)

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
        if not rows.fits(x.shape[1]):
            return super().norm_residual_norm(
                h, x, weight, eps, next_norm, scale, unpacked=unpacked
            )
        end = Residual(weight, eps, scale)
        if next_norm is None:
            return end(h, x), None
        if unpacked or not self._as_rows(x):
            return end.numbers(h, x, next_norm)
        y, (normed,) = end.rows(h, x, [next_norm])
        return y, normed

    def qkv(self, h: Any, a: Attention, batch: Batch, kv: Any, *, queries: bool = True) -> Any:
        weights = [w for w in (a.q, a.k, a.v) if w is not None]
        if a.head_dim not in HEAD_DIMS:
            self.without_kernel.add(f"qkv (heads of {a.head_dim})")
            return super().qkv(h, a, batch, kv, queries=queries)
        y = self._products(h, weights, weights if queries else weights[1:], parts=True)
        heads = Heads.of(a, queries)
        if self.fused_windows and not self.portable and attention_window.takes(heads, kv):
            return ProjectedQkv(heads, y)
        return heads(y, batch, kv)

    def keys_values(
        self, h: Any, layers: Sequence[Attention], batch: Batch, kvs: Sequence[Any]
    ) -> None:
        together = self._context(layers, kvs)
        if together is None or isinstance(h, torch.Tensor):
            super().keys_values(h, layers, batch, kvs)
            return
        together(h, batch.positions, batch.slots, self._exchange)

    def attend(self, q: Any, kv: Any, span: Span, scale: float) -> Any:
        batch, first, last = span.batch, span.first, span.last
        if batch.rows_per_sequence > GROUP_ROWS:
            assert not isinstance(q, ProjectedQkv), "keys of the batch are not in the cache yet"
            batch = _in_groups(batch)
        if not batch.rows_per_sequence:
            return self._attend_each(q, kv, span, scale)
        if isinstance(q, ProjectedQkv):
            by = self._exchange
            return attention_window.attend(q, kv, batch, first, last, scale, by.arrived, by.count)
        portable = self.portable
        if q.dtype is torch.float16 and (portable or attention.takes(q.shape[1], kv)):
            out = attention.attend(
                q, kv, batch, first, last, scale, plain=portable, values=portable
            )
            return out.values if portable else out.rows
        self.without_kernel.add("attend")
        return torch_attention.attend(q, kv, batch, first, last, scale)

    def _attend_each(self, q: Any, kv: Any, span: Span, scale: float) -> Value:
        """Compute `attend` for one sequence after the other, if they have different numbers of
        rows."""
        out, batch = [], span.batch
        for begin, size in zip(batch.starts, batch.sizes, strict=True):
            at = slice(begin, begin + size)
            own = q.rows(begin, begin + size) if isinstance(q, ProjectedQkv) else q[at]
            out.append(self.attend(own, kv, span.part(at), scale))
        return packed_layout.concat_rows(out) if isinstance(out[0], PackedRows) else torch.cat(out)

    def gated(
        self,
        x: Any,
        gate: Any,
        up: Any,
        down: Any,
        activation: Activation,
        *,
        partial_sums: bool = False,
    ) -> torch.Tensor:
        if isinstance(gate, torch.Tensor) or isinstance(up, torch.Tensor):
            return super().gated(x, gate, up, down, activation, partial_sums=partial_sums)
        return self.linear(self._gated(x, gate, up, activation), down, partial_sums=partial_sums)

    def modulated(
        self, x: Any, gate: Any, by: torch.Tensor, down: Any, activation: Activation
    ) -> torch.Tensor:
        return self.linear(self._activated(self.linear(x, gate), by, activation), down)

    def per_layer_inputs(
        self, tokens: torch.Tensor, x: torch.Tensor, proj: Any, norm: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return elementwise.per_layer_inputs(self.linear(x, proj), tokens, norm, x.shape[1], eps)

    def logits(self, hidden: Any, table: Any, cap: float = 0.0, scale: float = 1.0) -> torch.Tensor:
        z = self.linear(hidden, table)
        return elementwise.softcap(z, cap, scale) if cap or scale != 1.0 else z

    def pick(
        self, hidden: torch.Tensor, table: Any, pick: Pick, at: int, cap: float = 0.0
    ) -> torch.Tensor:
        if isinstance(pick, TablePick) and isinstance(table, Matrix) and self._as_rows(hidden):
            ids = pick.best(hidden, table.weight, self._exchange, at, cap)
            if ids is not None:
                return ids
        return super().pick(hidden, table, pick, at, cap)

    def experts(
        self,
        x: Any,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate: Any,
        up: Any,
        down: Any,
        activation: Activation,
    ) -> torch.Tensor:
        stacks, x = [weight_of(w) for w in (gate, up, down) if w is not None], products.numbers(x)
        if self.portable and all(portable.takes(w) for w in stacks):
            return in_tiles(
                lambda x, i, w: self._visits(x, i, w, stacks, activation), x, ids, weights
            )
        self.without_kernel.add("experts")
        return torch_experts.experts(x, ids, weights, gate, up, down, activation)

    def expert_layer(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        e: ExpertLayer,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Any]:
        layer = self._layers.get(e.gate_exps) if self._as_rows(x) else None
        if layer is None and self._as_rows(x):
            layer = Experts.of(e, scale, self.pairs, self._buffers, self.device)
            self._layers[e.gate_exps] = layer
        if layer is None:
            self.without_kernel.add("choice of experts")
            return super().expert_layer(h, x, e, next_norm, scale)
        end, out = Residual(e.post_attention, e.eps), torch.empty_like(x)
        to = None if next_norm is None else rows.empty(len(x), x.shape[1], x.device)
        norms = [e.ffn_norm, e.expert_norm]
        y, (dense, routed) = end.rows(h, x, norms, single=True)
        for at in range(0, len(x), layer.capacity):
            part, end_at = slice(at, at + layer.capacity), min(at + layer.capacity, len(x))
            tiles, groups = (at // 8, -(-end_at // 8)), (at // GROUP_ROWS, rows.groups(end_at))
            try:
                layer(y[part], dense.part(*tiles), routed.part(*tiles))
                layer.finish(y[part], next_norm, out[part], to and to.part(*groups))
            except BaseException:  # Ctrl-C while `finish` is compiled: it would zero the counters
                layer.buffers.arrived.zero_()
                raise
        return out, to

    # ---- inside

    def _context(self, layers: Sequence[Attention], kvs: Sequence[Any]) -> context.Context | None:
        """Return keys and values of these layers as a `Context`, or None if they cannot be packed
        together, for instance because one is already packed alone."""
        if layers[0].k not in self._contexts:
            self._contexts[layers[0].k] = context.of(layers, kvs)
        return self._contexts[layers[0].k]

    def _visits(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        stacks: list[Weight],
        activation: Activation,
    ) -> torch.Tensor:
        """Compute `Ops.experts` with matrices in the file's order."""
        flat = ids.flatten()
        parts = [portable.visits(x, flat, w) for w in stacks[:-1]]
        gates, ups = parts if len(parts) == 2 else parts[0].chunk(2, dim=1)
        inner = self._activated(gates, ups, activation)
        y = portable.visits(products.numbers(inner), flat, stacks[-1])
        return sum_in_order(y.view(*ids.shape, -1) * weights[..., None])

    def _gated(self, x: Any, gate: Any, up: Any, activation: Activation) -> Value:
        """Return activation(gate x) * up x [T, I] as the input of the next matmul."""
        if activation in (self.gelu_tanh, self.silu) and not self.portable:
            pair = self.pairs(gate, up)
            y = self._rows(x)
            fits = len(pair) == 1 and gate.rows % ACT_COLUMNS == 0
            if fits and isinstance(y, PackedRows) and pair[0].type:
                return linear_wide.gate_up(y, pair[0], self._exchange, silu=activation == self.silu)
            if len(pair) == 1:
                both = self._product(y, pair[0])
                gates, ups = both.view(len(both), -1, 2, 16).unbind(2)
                return (activation(gates) * ups).flatten(1)
        both = self._products(x, [gate, up], [gate, up])
        return self._activated(both[:, : gate.rows], both[:, gate.rows :], activation)

    def _activated(self, gate: torch.Tensor, by: torch.Tensor, activation: Activation) -> Value:
        """Return activation(gate) * by [T, I] as the input of the next matmul."""
        name: elementwise.Activation = "gelu_tanh" if activation == self.gelu_tanh else "silu"
        assert name == "gelu_tanh" or activation == self.silu, activation
        if gate.shape[1] % 4 or by.data_ptr() % 16:
            return activation(gate) * by
        form = elementwise.gated_rows if self._as_rows(gate) else elementwise.gated
        return form(gate, by, name)

    def _rows(self, x: Value) -> Value:
        """Return x as packed rows if their width allows."""
        if isinstance(x, PackedRows) or not self._as_rows(x):
            return x
        return rows.pack_rows(x)

    def _products(
        self, x: Value, together: list[Any], wanted: list[Any], parts: bool = False
    ) -> torch.Tensor:
        """Return x times the concatenation of `wanted`. The matrices `together` are packed one
        after the other."""
        if any(isinstance(w, torch.Tensor) for w in wanted):
            return torch.cat([self.linear(x, w) for w in wanted], dim=1)
        join(together)
        x, weights = self._rows(x), concat_rows(wanted)
        if len(weights) == 1:
            return self._product(x, weights[0], parts)
        if len(weights) == 2 and isinstance(x, PackedRows) and all(w.type for w in weights):
            return linear_wide.linear_two(x, weights[0], weights[1], self._exchange)
        return torch.cat([self._product(x, w) for w in weights], dim=1)

    def _as_rows(self, x: torch.Tensor) -> bool:
        """Return whether kernels take x [T, K] as packed rows."""
        width = x.shape[1]
        return not self.portable and width % ACT_COLUMNS == 0 and rows.fits(width)

    def _product(self, x: Value, weight: Weight, parts: bool = False) -> torch.Tensor:
        """Multiply rows x [T, K] with a matrix in its current layout -> [T, N]. `parts`: as in
        `linear`."""
        if isinstance(x, PackedRows) and weight.type:
            parts = parts and weight.rows % 4 == 0
            return linear_wide.linear(x, weight, self._exchange, parts=parts)
        if self.portable and portable.takes(weight):
            return in_tiles(lambda part: portable.linear(part, weight), products.numbers(x))
        self.without_kernel.add(f"linear ({weight.type or str(weight.data.dtype)[6:]})")
        split = not self.portable
        return in_tiles(lambda part: products.product(part, weight, split=split), x)


def _in_groups(batch: Batch) -> Batch:
    """Return the rows of a prompt, whose keys are already in the cache, as sequences of GROUP_ROWS
    rows each, for attention."""
    assert batch.rows_per_sequence % GROUP_ROWS == 0, batch.sizes
    # The kernel loads keys of earlier positions before the preceding kernel has ended. Here that
    # kernel writes some of them (`launch.in_order`).
    assert not launch.overlaps(), batch.sizes
    return replace(batch, sizes=(GROUP_ROWS,) * (len(batch) // GROUP_ROWS))


def drop_weights(ops: CudaOps) -> None:
    """Drop what `ops` keeps: references to weights, and buffers."""
    ops.pairs = GateUpPairs()
    for kept in (ops._layers, ops._buffers, ops._contexts):
        kept.clear()
