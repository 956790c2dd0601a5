"""The op vocabulary on an NVIDIA GPU.

Rows are `cuda.step.packed_rows.Rows` for steps of at most 16 rows, float32 numbers for longer
chunks and for widths that kernels do not take. What has no kernel runs as torch on the GPU and is
named in `CudaOps.without_kernel`.

GPUs before sm_80 have not what most kernels of products and attention are made of. There, on those
that `nvrtc.ARCHS` does not know, and where it is asked for, rows are float32 throughout and meet
matrices as their file holds them (`g4spec.runtime.cuda.portable.portable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from g4spec.ops.reference import Graph, Ops, Reader, Run, Spans
from g4spec.ops.simple import in_order
from g4spec.runtime.cuda import gpu_memory as memory
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.cache import context
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV, Kind
from g4spec.runtime.cuda.cache.heads import HEAD_DIMS, Heads
from g4spec.runtime.cuda.portable import portable, products, torch_attention, torch_experts
from g4spec.runtime.cuda.prefill.long_reader import LongReader
from g4spec.runtime.cuda.step import attention, attention_window, elementwise, graphs, linear
from g4spec.runtime.cuda.step import packed_rows as rows
from g4spec.runtime.cuda.step.attention_window import Unfinished
from g4spec.runtime.cuda.step.cycle import Cycles, Picks
from g4spec.runtime.cuda.step.experts import Buffers, Experts, Shape
from g4spec.runtime.cuda.step.packed_rows import Residual, Rows
from g4spec.runtime.cuda.step.sampler import CudaSampler
from g4spec.runtime.cuda.weights import embedding, packing
from g4spec.runtime.cuda.weights.dequant import Weight
from g4spec.runtime.cuda.weights.loading import Uploader
from g4spec.runtime.cuda.weights.matrix import Matrix, Pairs, below, join, weight_of

if TYPE_CHECKING:
    from g4spec.core import CacheShape, Draft, Pick, Reach
    from g4spec.gguf import GGUF
    from g4spec.ops.sampling import Sampler
    from g4spec.ops.weights import Attention, ExpertLayer
    from g4spec.runtime.speculate import Player
    from g4spec.runtime.target import Target

PADDING = rows.MOST
"""Positions a cache holds beyond the context: padding rows of a step stand there."""

Activation = Callable[[torch.Tensor], torch.Tensor]
Value = torch.Tensor | Rows


class CudaOps(Ops):
    """`Ops` on a CUDA device.

    Args:
        cache_type: how keys and values are stored.
        portable: do with what every GPU has, also on those that could do better.

    Attributes:
        title: the GPU's name, and whether it runs the portable kernels.
        portable: whether it does.
        without_kernel: what ran as torch so far.
        pairs: how gates and ups are packed.
    """

    name = "cuda"

    def __init__(
        self, device: str = "cuda", cache_type: Kind = "f16", portable: bool = False
    ) -> None:
        super().__init__(device)
        self.cache_type = cache_type
        self.title = torch.cuda.get_device_name(self.device)
        self.portable = portable or launch.arch(self.device.index) not in attention.TENSOR_ARCHS
        self.title += ", portable kernels" if self.portable else ""
        self.chunk = memory.chunk(torch.cuda.get_device_properties(self.device).total_memory)
        self._exchange = linear.Exchange(self.device)
        self.pairs = Pairs()
        self._layers: dict[Any, Experts | None] = {}
        self._buffers: dict[Shape, Buffers] = {}
        self._contexts: dict[Any, context.Context | None] = {}
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._upload: Uploader | None = None

    # ---- loading

    def load(self, file: GGUF, name: str) -> Any:
        """Vectors, F32 and index tensors as numbers; other matrices as `Matrix`."""
        info = file.tensors[name]
        form = info.format
        if len(info.shape) < 2 or form.integer or form.name in ("f32", "f64"):
            return self.array(file.array(name))
        plain = {"f16": torch.float16, "bf16": torch.bfloat16}.get(form.name)
        columns, rows_ = info.shape[-1], info.shape[-2]
        if plain is None and (why := packing.unpackable(form.name, columns, self.portable)):
            self.without_kernel.add(why)
            return self.array(file.array(name))
        self._upload = self._upload or Uploader(self.device)
        width = columns * 2 if plain else form.row_bytes(columns)
        raw = self._upload(file.raw(name)).view(-1, width)
        return Matrix("" if plain else form.name, raw.view(plain) if plain else raw, rows_, columns,
                      len(raw) // rows_, keeps=self.portable)  # fmt: skip

    def cache(self, shape: CacheShape, n_ctx: int, slack: int) -> Any:
        return CudaKV(shape.n_kv, shape.head_dim, n_ctx + PADDING, shape.window, slack,
                      self.device, self.cache_type, shape.turning)  # fmt: skip

    def slack(self, chunk: int) -> int:
        return rows.MOST  # chunks go around the rings, see prefill_attention.py

    def reader(self, model: Any, caches: Sequence[Any], n_ctx: int, chunk: int) -> Reader:
        return LongReader(self, model, caches, n_ctx, chunk)

    def graph(self, run: Run, sizes: Sequence[int], keep: int = 0) -> Graph:
        return graphs.Recorded(self, run, sizes, keep, self._pool)

    def player(
        self, target: Target, draft: Draft | None, forced: int | None = None, keep: bool = False
    ) -> Player | None:
        if draft is not None and not (isinstance(draft, Recordable) and draft.recordable):
            return None
        return Cycles(target, draft, self._pool, forced, keep)

    def chooser(self, sampler: Sampler) -> Chooser:
        return CudaSampler(sampler, self.device)

    # ---- simple operations

    def embed(self, table: Any, ids: torch.Tensor, scale: float) -> torch.Tensor:
        if isinstance(table, torch.Tensor):
            return table[ids] * scale
        data, name = table.table, table.type
        if not name:
            name = "bf16" if data.dtype is torch.bfloat16 else "f16"
            data = data.view(torch.uint8)
        return embedding.embed(data, name, ids, table.columns, scale)

    def linear(self, x: Any, weight: Any, *, parts: bool = False) -> torch.Tensor:
        if isinstance(weight, torch.Tensor) and self.portable:
            return self._product(x, Weight("", weight, *weight.shape))
        if isinstance(weight, torch.Tensor):
            if len(x) <= rows.MOST:
                self.without_kernel.add("linear (float32)")
            return products.dense(products.numbers(x), weight)
        return self._product(self._rows(x), weight.alone, parts)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if x.shape[-1] % 4:
            return super().rms_norm(x, weight, eps)
        return rows.rms_norm(x, weight, eps)

    # ---- fused operations

    def spans(self, positions: torch.Tensor, reaches: Iterable[Reach]) -> Spans:
        return elementwise.spans(positions, list(reaches))

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
        following: torch.Tensor | None,
        scale: torch.Tensor | None = None,
        *,
        numbers: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        if x.shape[1] % 4:
            return super().norm_residual_norm(h, x, weight, eps, following, scale, numbers=numbers)
        end = Residual(weight, eps, scale)
        if following is None:
            return end(h, x), None
        if numbers or not self._as_rows(x):
            return end.numbers(h, x, following)
        y, (normed,) = end.rows(h, x, [following])
        return y, normed

    def qkv(
        self,
        h: Any,
        a: Attention,
        positions: torch.Tensor,
        kv: Any,
        *,
        queries: bool = True,
    ) -> Any:
        weights = [w for w in (a.q, a.k, a.v) if w is not None]
        if a.head_dim not in HEAD_DIMS:
            self.without_kernel.add(f"qkv (heads of {a.head_dim})")
            return super().qkv(h, a, positions, kv, queries=queries)
        y = self._products(h, weights, weights if queries else weights[1:], parts=True)
        if kv is not None:
            kv.positions = positions
        heads = Heads.of(a, queries)
        if len(positions) <= rows.MOST and not self.portable and attention_window.takes(heads, kv):
            return Unfinished(heads, y, positions)
        return heads(y, positions, kv)

    def keys_values(
        self, h: Any, layers: Sequence[Attention], positions: torch.Tensor, kvs: Sequence[Any]
    ) -> None:
        if layers[0].k not in self._contexts:
            self._contexts[layers[0].k] = context.of(layers, kvs)
        made = self._contexts[layers[0].k]
        if made is None or not isinstance(h, Rows):
            return super().keys_values(h, layers, positions, kvs)
        for kv in kvs:
            kv.positions = positions
        return made(h, positions, self._exchange)

    def attend(
        self, q: Any, kv: Any, first: torch.Tensor, last: torch.Tensor, scale: float
    ) -> Any:
        if isinstance(q, Unfinished):
            by = self._exchange
            return attention_window.attend(q, kv, first, last, scale, by.arrived, by.count)
        if q.dtype is torch.float16 and len(q) <= rows.MOST:
            settled = None if self.portable else kv.positions
            out = attention.attend(q, kv, first, last, scale, settled, plain=self.portable)
            if self.portable:
                return out.values
            return Rows(out.rows, len(q), q.shape[1] * q.shape[2])
        if len(q) <= rows.MOST:
            self.without_kernel.add("attend")
        return torch_attention.attend(q, kv, first, last, scale)

    def gated(
        self,
        x: Any,
        gate: Any,
        up: Any,
        down: Any,
        activation: Activation,
        *,
        parts: bool = False,
    ) -> torch.Tensor:
        if isinstance(gate, torch.Tensor) or isinstance(up, torch.Tensor):
            return super().gated(x, gate, up, down, activation, parts=parts)
        return self.linear(self._gated(x, gate, up, activation), down, parts=parts)

    def modulated(
        self, x: Any, gate: Any, by: torch.Tensor, down: Any, activation: Activation
    ) -> torch.Tensor:
        return self.linear(self._activated(self.linear(x, gate), by, activation), down)

    def per_layer_inputs(
        self,
        tokens: torch.Tensor,
        x: torch.Tensor,
        proj: Any,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        return elementwise.per_layer_inputs(self.linear(x, proj), tokens, norm, x.shape[1], eps)

    def logits(self, hidden: Any, table: Any, cap: float = 0.0, scale: float = 1.0) -> torch.Tensor:
        z = self.linear(hidden, table)
        return elementwise.softcap(z, cap, scale) if cap or scale != 1.0 else z

    def pick(
        self, hidden: torch.Tensor, table: Any, pick: Pick, at: int, cap: float = 0.0
    ) -> torch.Tensor:
        if isinstance(pick, Picks) and isinstance(table, Matrix) and self._as_rows(hidden):
            ids = pick.best(hidden, table.alone, self._exchange, at, cap)
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
        if len(x) <= rows.MOST:
            stacks = [weight_of(w) for w in (gate, up, down) if w is not None]
            if self.portable and all(portable.takes(w) for w in stacks):
                return self._visits(x, ids, weights, stacks, activation)
            self.without_kernel.add("experts")
        return torch_experts.experts(products.numbers(x), ids, weights, gate, up, down, activation)

    def expert_layer(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        e: ExpertLayer,
        following: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Any]:
        layer = self._layers.get(e.gate_exps) if self._as_rows(x) else None
        if layer is None and self._as_rows(x):
            layer = Experts.of(e, scale, self.pairs, self._buffers, self.device)
            self._layers[e.gate_exps] = layer
        if layer is None:
            if len(x) <= rows.MOST:
                self.without_kernel.add("choice of experts")
            return super().expert_layer(h, x, e, following, scale)
        end = Residual(e.post_attention, e.eps)
        x, (dense, routed) = end.rows(h, x, [e.ffn_norm, e.expert_norm])
        layer(x, dense, routed)
        return layer.finish(x, following)

    # ---- inside

    def _visits(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        stacks: list[Weight],
        activation: Activation,
    ) -> torch.Tensor:
        """See `Ops.experts`, with its matrices in the file's order."""
        flat = ids.flatten()
        parts = [portable.visits(x, flat, w) for w in stacks[:-1]]
        gates, ups = parts if len(parts) == 2 else parts[0].chunk(2, dim=1)
        inner = self._activated(gates, ups, activation)
        y = portable.visits(products.numbers(inner), flat, stacks[-1])
        return in_order(y.view(*ids.shape, -1) * weights[..., None])

    def _gated(self, x: Any, gate: Any, up: Any, activation: Activation) -> Value:
        """activation(gate x) * up x [T, I] for the next product."""
        if activation in (self.gelu_tanh, self.silu) and not self.portable:
            pair = self.pairs(gate, up)
            y = self._rows(x)
            fits = len(pair) == 1 and gate.rows % rows.BLOCK == 0
            if fits and isinstance(y, Rows) and pair[0].type:
                return linear.gate_up(y, pair[0], self._exchange, silu=activation == self.silu)
            if len(pair) == 1:
                both = self._product(y, pair[0])
                gates, ups = both.view(len(both), -1, 2, 16).unbind(2)
                return (activation(gates) * ups).flatten(1)
        both = self._products(x, [gate, up], [gate, up])
        return self._activated(both[:, : gate.rows], both[:, gate.rows :], activation)

    def _activated(self, gate: torch.Tensor, by: torch.Tensor, activation: Activation) -> Value:
        """activation(gate) * by [T, I] for the next product."""
        name: elementwise.Activation = "gelu_tanh" if activation == self.gelu_tanh else "silu"
        assert name == "gelu_tanh" or activation == self.silu, activation
        if gate.shape[1] % 4 or by.data_ptr() % 16:
            return activation(gate) * by
        form = elementwise.gated_rows if self._as_rows(gate) else elementwise.gated
        return form(gate, by, name)

    def _rows(self, x: Value) -> Value:
        """Numbers of a step as rows, where their width allows."""
        if isinstance(x, Rows) or not self._as_rows(x):
            return x
        return rows.pack_rows(x)

    def _products(
        self, x: Value, together: list[Any], wanted: list[Any], parts: bool = False
    ) -> torch.Tensor:
        """x times `wanted` below each other; `together` are packed behind each other."""
        if any(isinstance(w, torch.Tensor) for w in wanted):
            return torch.cat([self.linear(x, w) for w in wanted], dim=1)
        join(together)
        x, weights = self._rows(x), below(wanted)
        if len(weights) == 1:
            return self._product(x, weights[0], parts)
        if len(weights) == 2 and isinstance(x, Rows) and all(w.type for w in weights):
            return linear.linear_two(x, weights[0], weights[1], self._exchange)
        return torch.cat([self._product(x, w) for w in weights], dim=1)

    def _as_rows(self, x: torch.Tensor) -> bool:
        """Whether x [T, K] becomes rows for products."""
        return not self.portable and len(x) <= rows.MOST and x.shape[1] % rows.BLOCK == 0

    def _product(self, x: Value, weight: Weight, parts: bool = False) -> torch.Tensor:
        """x [T, K] times a matrix as it lies in memory -> [T, N]. `parts`: as of `linear`."""
        if isinstance(x, Rows) and weight.type:
            parts = parts and weight.rows % 4 == 0
            return linear.linear(x, weight, self._exchange, parts=parts)
        if len(x) <= rows.MOST:
            if self.portable and portable.takes(weight):
                return portable.linear(products.numbers(x), weight)
            self.without_kernel.add(f"linear ({weight.type or str(weight.data.dtype)[6:]})")
        return products.product(x, weight, split=not self.portable)
