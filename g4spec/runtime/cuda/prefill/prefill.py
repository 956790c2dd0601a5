"""Reading a prompt: Gemma 4's layers for a chunk of hundreds or thousands of rows.

The arithmetic is that of `g4spec.models.gemma4_model`, in half precision with float32 sums, on
matrices that are dequantized when their turn comes; nothing here has to give the bits of a step.
The residual and what norms read stay float32. What could leave half precision's range is divided by
a power of two, which loses nothing: projections by 16 (norms and gelu take it back), the
feed-forward's inner values by 64, and residuals that are multiplied as they are (per-layer
embeddings) by one of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from g4spec.models.gemma4_config import Config
from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.prefill import prefill_attention
from g4spec.runtime.cuda.prefill.buffers import Shapes, allocate, nbytes
from g4spec.runtime.cuda.prefill.prefill_attention import Attention, HeadWeights
from g4spec.runtime.cuda.prefill.prefill_experts import Experts, ExpertWeights
from g4spec.runtime.cuda.step.attention import TENSOR_ARCHS
from g4spec.runtime.cuda.weights.dequant import Products, Weight

PROJECTED = 2.0**-4
"""What projections are multiplied with, to fit half precision."""

HIDDEN = 2.0**-6
"""What gelu(gate) * up is multiplied with, for the same reason."""

_INT, _FLOAT = np.int32, np.float32


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """What a layer is told about the token again: `gate` [P, H], `out` [H, P], `post` [H]."""

    gate: Weight
    out: Weight
    post: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms are float32 [H].

    Attributes:
        qkv: rows of queries, then (unless the layer reads another's cache) of keys and values.
        gate_up: one matrix, gates and ups in turns of 16 rows; or two, gates and ups.
        scale: float32 [1] or None.
    """

    attn_norm: torch.Tensor
    qkv: Sequence[Weight]
    heads: HeadWeights
    attn_output: Weight
    post_attention_norm: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: Sequence[Weight]
    down: Weight
    post_ffw_norm: torch.Tensor
    scale: torch.Tensor | None = None
    experts: ExpertWeights | None = None
    per_layer: PerLayerWeights | None = None


class Prefill:
    """The layers of a model, for chunks of rows.

    Args:
        layers: weights, in the order of `config.layers`.
        caches: of the layers that have one, by layer.
        freqs: radians a position [D / 2] of each layer; those of pairs that do not turn are 0.
        chunk: most rows of a call.
        n_ctx: positions the sequence may have.
        portable: only what every GPU can do.

    Attributes:
        halves: whether experts are multiplied in half precision, one by one: GPUs before sm_80
            have no fast product in bfloat16, nor torch's grouped one.
    """

    _rows: torch.Tensor  # [T, H] float16: what the next product reads
    _out: torch.Tensor  # [T, H] float32: what a sublayer gives
    _wide: torch.Tensor  # float16: queries, keys and values; or gates and ups
    _inner: torch.Tensor  # float16: attention; or the feed-forward's inner values
    _scratch: torch.Tensor  # float16: a matrix

    def __init__(
        self,
        config: Config,
        layers: Sequence[LayerWeights],
        caches: Sequence[CudaKV],
        freqs: Sequence[torch.Tensor],
        chunk: int,
        n_ctx: int,
        portable: bool = False,
    ) -> None:
        self.config, self.layers, self.caches, self.chunk = config, layers, caches, chunk
        device, first = layers[0].attn_norm.device, config.layers[0]
        self._freqs = {s.window is None: _turning(f)
                       for s, f in zip(config.layers, freqs, strict=True)}  # fmt: skip
        pairs = {full: len(f) for full, f in self._freqs.items()}
        arch = "" if portable else launch.arch(device.index)
        self.halves = arch not in TENSOR_ARCHS
        self._attention = {kind: way(spec, chunk, n_ctx, device)
                           for kind, (spec, way) in _ways(config, pairs, arch).items()}  # fmt: skip
        self._experts = None
        if first.n_expert:
            self._experts = Experts(first, config.n_embd, chunk, device, self.halves)
        for name, buffer in allocate(_buffers(config, chunk), device).items():
            setattr(self, name, buffer)
        self.products = Products(self._scratch)

    def __call__(
        self,
        x: torch.Tensor,
        start: int,
        taps: Mapping[int, torch.Tensor] | None = None,
        per_layer: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows x [T, H] float32 at positions start, start + 1, ... through all layers, in place.

        Args:
            taps: for each wanted layer (index n_layer: behind the last), where the residual
                entering it is copied to, [T, H] of any float type and distance between rows.
            per_layer: [T, layers, P] float32, what each layer is told about the token again.
        """
        assert 0 < len(x) <= self.chunk and x.is_contiguous() and x.dtype == torch.float32
        taps = taps or {}
        turns = {full: self._turns(f, start, len(x)) for full, f in self._freqs.items()}
        self._norm(x, self.layers[0].attn_norm)
        for i, spec in enumerate(self.config.layers):
            if i in taps:
                taps[i].copy_(x)
            self.attention(spec, x, start, turns[spec.window is None])
            self.feed_forward(spec, x, None if per_layer is None else per_layer[:, i])
        if len(self.layers) in taps:
            taps[len(self.layers)].copy_(x)
        return x

    def attention(self, spec: LayerSpec, x: torch.Tensor, start: int, turns: torch.Tensor) -> None:
        """The attention sublayer of `_rows` added to x; `_rows` then are the next sublayer's."""
        w, n, own = self.layers[spec.index], len(x), spec.kv_from is None
        donor = spec if spec.kv_from is None else self.config.layers[spec.kv_from]
        on = self._attention[_kind(donor)]
        qkv = self._view(self._wide, n, sum(m.rows for m in w.qkv))
        self.products.halves(self._rows[:n], w.qkv, qkv, PROJECTED)
        norms = HeadWeights(w.heads.q_norm, self.layers[donor.index].heads.k_norm)
        on.prepare(qkv, norms, turns, start, self.caches[donor.index],
                   own and not spec.v_from_k, self.config.eps * PROJECTED**2)  # fmt: skip
        out = self._view(self._inner, n, spec.n_head * spec.head_dim)
        on.attend(out, start)
        self.products.floats(out, [w.attn_output], self._out[:n])
        e = w.experts
        if e is None or self._experts is None:
            self._add_norm(x, w.post_attention_norm, None, w.ffn_norm)
            return
        self._kernel("add_norm_experts", n, self._out, x, w.post_attention_norm, w.ffn_norm,
                     self._rows, e.norm, self._experts.rows, e.router_norm, self._experts.routed,
                     _FLOAT(self.config.n_embd**-0.5))  # fmt: skip

    def feed_forward(
        self, spec: LayerSpec, x: torch.Tensor, per_layer: torch.Tensor | None
    ) -> None:
        """The rest of a layer; `_rows` then are the next layer's, if there is one."""
        w, n = self.layers[spec.index], len(x)
        last = spec.index + 1 == len(self.layers)
        following = None if last else self.layers[spec.index + 1].attn_norm
        self._dense(spec, w, n)
        if w.experts is not None and self._experts is not None:
            e, y = w.experts, self._experts(w.experts, self.products, n)
            self._kernel("add_experts", n, self._out, y, self._experts.places,
                         self._experts.weights, _INT(spec.n_expert_used), x, e.post_dense, e.post,
                         w.post_ffw_norm, w.scale, following, None if last else self._rows,
                         _FLOAT(1 / HIDDEN))  # fmt: skip
        elif w.per_layer is None or per_layer is None:
            self._add_norm(x, w.post_ffw_norm, w.scale, following, HIDDEN)
        else:
            self._add_norm(x, w.post_ffw_norm, None, None, HIDDEN)
            self._told_again(w.per_layer, x, per_layer)
            self._add_norm(x, w.per_layer.post, w.scale, following)

    def _dense(self, spec: LayerSpec, w: LayerWeights, n: int) -> None:
        """`_out` = HIDDEN times the dense feed-forward of `_rows`."""
        both = self._view(self._wide, n, 2 * spec.n_ff)
        self.products.halves(self._rows[:n], w.gate_up, both, PROJECTED)
        inner = self._view(self._inner, n, spec.n_ff)
        turns = "false" if len(w.gate_up) == 1 else "true"
        launch.kernel("prefill.cu", f"gated<Half, {turns}>")(
            (n, -(-spec.n_ff // 2048)), 256, both, inner, _INT(spec.n_ff),
            _FLOAT(1 / PROJECTED), _FLOAT(HIDDEN), pdl=False,
        )  # fmt: skip
        self.products.floats(inner, [w.down], self._out[:n])

    def _told_again(self, w: PerLayerWeights, x: torch.Tensor, by: torch.Tensor) -> None:
        """`_out` = out(gelu(gate x) * by), with `by` [T, P]."""
        n, width = len(x), w.gate.rows
        powers, gate = x.new_empty(n), x.new_empty(n, width)
        self._kernel("convert", n, x, self._rows, powers, eps=False)
        self.products.floats(self._rows[:n], [w.gate], gate)
        told = self._view(self._inner, n, width)
        launch.kernel("prefill.cu", "modulated")(
            (n, -(-width // 256)), 256, gate, powers, launch.Strided(by),
            np.int64(by.stride(0)), told, _INT(width), pdl=False,
        )  # fmt: skip
        self.products.floats(told, [w.out], self._out[:n])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """`_rows` = rms_norm of x."""
        self._kernel("norm", len(x), x, weight, self._rows)

    def _add_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        following: torch.Tensor | None,
        stored: float = 1.0,
    ) -> None:
        """x = (x + rms_norm(`_out` / stored) * weight) * scale, and its norm as `_rows`."""
        rows = None if following is None else self._rows
        self._kernel("add_norm", len(x), self._out, x, weight, scale, following, rows,
                     _FLOAT(1 / stored))  # fmt: skip

    def _kernel(self, name: str, count: int, *args: Any, eps: bool = True) -> None:
        """One of prefill.cu that takes a row a block."""
        last = (_FLOAT(self.config.eps),) if eps else ()
        instance, threads = row_kernel(name, self.config.n_embd)
        launch.kernel("prefill.cu", instance)(count, threads, *args, *last, pdl=False)

    def _turns(self, freqs: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """Cosines and sines of positions start ..., [T, pairs, 2]."""
        positions = torch.arange(start, start + count, device=freqs.device)
        angle = positions.to(torch.float32)[:, None] * freqs
        return torch.stack((angle.cos(), angle.sin()), dim=-1)

    @staticmethod
    def _view(buffer: torch.Tensor, count: int, width: int) -> torch.Tensor:
        return buffer[: count * width].view(count, width)


def row_kernel(name: str, width: int) -> tuple[str, int]:
    """Instance and threads of a kernel of prefill.cu that takes a row of `width` a block: the
    shape that wastes least, with about six warps."""
    quads = width // 4
    assert width % 4 == 0, width
    shapes = [(warps, -(-quads // (32 * warps))) for warps in range(1, 33)]
    warps, _ = min((s for s in shapes if s[1] <= 8),
                   key=lambda s: (s[0] * s[1] * 32 - quads, abs(s[0] - 6)))  # fmt: skip
    return f"{name}<{width}, {warps}>", 32 * warps


Kind = tuple[int, ...]


def _kind(spec: LayerSpec) -> Kind:
    """Layers alike in this share their buffers of queries, keys and values. A layer that reads
    another's cache finds there what was gathered for the other: it comes after all of its kind
    that have their own."""
    return spec.window or 0, spec.n_head, spec.n_kv, spec.head_dim, spec.v_from_k


def _ways(
    config: Config, pairs: Mapping[bool, int], arch: str
) -> dict[Kind, tuple[LayerSpec, type[Attention]]]:
    """A layer of each kind that has keys, and how it attends on `arch` ("": on any).

    Args:
        pairs: of a head that turn, of layers without and with a window.
    """
    return {_kind(s): (s, prefill_attention.kind(s, pairs[s.window is None], arch))
            for s in config.layers if s.kv_from is None}  # fmt: skip


def _buffers(config: Config, chunk: int) -> Shapes:
    """What all layers use in turn."""
    h, layers, half = config.n_embd, config.layers, torch.float16
    wide = max(max(s.n_ff * 2, (s.n_head + 2 * s.n_kv) * s.head_dim) for s in layers)
    inner = max(max(s.n_ff, s.n_head * s.head_dim, s.n_ple) for s in layers)
    largest = max(max(wide, s.n_expert * s.n_ff_expert * 2, s.n_ple) for s in layers) * h
    return {"_rows": ((chunk, h), half), "_out": ((chunk, h), torch.float32),
            "_wide": ((chunk * wide,), half), "_inner": ((chunk * inner,), half),
            "_scratch": ((largest,), half)}  # fmt: skip


def workspace(config: Config, chunk: int, n_ctx: int, arch: str) -> tuple[int, int]:
    """Bytes that a :class:`Prefill` keeps beside weights and caches, and bytes that a call takes
    for a moment beside the residual it is given (cuBLAS's own workspace not counted)."""
    pairs = {s.window is None: s.rotary_pairs for s in config.layers}
    ways, first = _ways(config, pairs, arch).values(), config.layers[0]
    kept = nbytes(_buffers(config, chunk)) + sum(
        nbytes(way.buffers(spec, chunk, n_ctx)) for spec, way in ways
    )  # fmt: skip
    passing = chunk * 4 * (first.n_ple + sum(2 * count for count in pairs.values()))
    if first.n_expert:
        kept += nbytes(Experts.buffers(first, config.n_embd, chunk))
        passing += Experts.passing(first, config.n_embd, chunk, arch not in TENSOR_ARCHS)
    return kept, passing


def _turning(freqs: torch.Tensor) -> torch.Tensor:
    """The leading pairs that turn."""
    count = int((freqs > 1e-20).sum())
    assert bool((freqs[:count] > 1e-20).all()), "pairs that turn come first"
    return freqs[:count].contiguous()


# What the targets launch: hidden size, and experts with how many a token visits.
UNITS = [
    Unit("prefill.cu", (
        "modulated",
        *(f"gated<{t}, {turns}>" for t in ("Half", "Bfloat") for turns in ("false", "true")),
        *(row_kernel(name, width)[0] for width in (5376, 3840, 2816, 2560, 1536)
          for name in ("norm", "add_norm", "convert", "add_norm_experts", "add_experts")),
    ), max_registers=96),
    Unit("prefill_experts.cu", ("order", "route<128, 8>", "gather<2816>"), max_registers=64),
]  # fmt: skip
