"""The ops for prefill: chunks of whole prompt blocks of one sequence.

They compute the same forward pass as steps, in half precision with float32 sums, on matrices that
are dequantized just before use; the bits need not be those of a step. The residual and the inputs
of norms stay float32. Values that could exceed half precision are divided by a power of two, which
is exact: projections by 16 (norms and GELU compensate), the inner values of the feed-forward by 64,
and residuals that are inputs of matmuls (per-layer embeddings) by one factor per row.

The bits of a row depend only on the tokens up to the end of its block: matrices
are dequantized once per chunk but multiplied block by block (`Products`), attention is aligned by
absolute position (`prefill_attention`), and experts give a row the same result in any batch
(`prefill_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from g4spec.core import PROMPT_BLOCK, Batch, Reach
from g4spec.models.gemma4_config import Config
from g4spec.ops import weights as op
from g4spec.ops.reference import Spans
from g4spec.ops.spans import Span
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import GATED_CHANNELS, GATED_THREADS
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.prefill import prefill_attention
from g4spec.runtime.cuda.prefill.buffers import allocate
from g4spec.runtime.cuda.prefill.plan import kind_of, most_rows, shared, ways
from g4spec.runtime.cuda.prefill.prefill_attention import Chunk, HeadWeights
from g4spec.runtime.cuda.prefill.prefill_experts import Experts, Stacks
from g4spec.runtime.cuda.prefill.rotary import RotaryTables
from g4spec.runtime.cuda.step import packed_rows
from g4spec.runtime.cuda.weights.dequant import Products, Weight
from g4spec.runtime.cuda.weights.matrix import (
    Matrix,
    concat_rows,
    interleave_experts,
    join,
    weight_of,
)

PROJECTED = 2.0**-4
"""Factor of projections, to stay within half precision."""

HIDDEN = 2.0**-6
"""Factor of gelu(gate) * up, to stay within half precision."""

NORM_WEIGHTS = ("weight", "next", "dense", "experts", "router", "post")
"""Arguments of kernels for rows [H] that are vectors [H]."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows [T, N] between two ops, in a buffer that a later op overwrites.

    Attributes:
        values: float16 inputs of a matmul, or its float32 results.
        factor: `values` are the actual numbers times this factor.
    """

    values: torch.Tensor
    factor: float = 1.0

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries in the layout of attention, `heads` of them per row."""

    on: prefill_attention.Attention
    heads: int


class LongOps(CudaOps):
    """`Ops` for chunks (`Chunk`) of a Gemma 4 target.

    The residual is updated in place; `keep` copies it. Ops that Gemma targets do not use are those
    of steps.

    Args:
        ops: the ops of steps; weights are packed once, for both.
        config: configuration of the target.
        chunk: maximum number of rows of a call, a multiple of PROMPT_BLOCK.
        n_ctx: context length of a sequence.
    """

    _normed: torch.Tensor  # [T, H] float16: what the next product reads
    _sums: torch.Tensor  # [T, H] float32: what a sublayer gives
    _wide: torch.Tensor  # float16: queries, keys and values; or gates and ups
    _inner: torch.Tensor  # float16: attention; or the feed-forward's inner values
    _scratch: torch.Tensor  # float16: a matrix

    def __init__(self, ops: CudaOps, config: Config, chunk: int, n_ctx: int) -> None:
        vars(self).update(vars(ops))
        self._config, most = config, most_rows(chunk, n_ctx)
        self._arch = "" if ops.portable else launch.arch(self.device.index)
        self._ways = {
            kind: way(spec, most, n_ctx, self.device)
            for kind, (spec, way) in ways(config, self._arch).items()
        }
        self._experts, first = None, config.layers[0]
        if first.n_expert:
            self._experts = Experts(first, config.n_embd, most, self.device, self._arch)
            if not self._experts.grouped:
                self.without_kernel.add("experts of prompts, one by one")
        for name, buffer in allocate(shared(config, most), self.device).items():
            setattr(self, name, buffer)
        self.products = Products(self._scratch, PROMPT_BLOCK)
        self._freqs: dict[tuple[float, int, torch.Tensor | None], torch.Tensor] = {}
        self._rotary = RotaryTables()

    # ---- around layers

    def rope_freqs(
        self, base: float, head_dim: int, divisors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Ops.rope_freqs`. Equal layers share one tensor, which is the key in
        `RotaryTables`."""
        key = base, head_dim, divisors
        if key not in self._freqs:
            self._freqs[key] = super().rope_freqs(*key)
        return self._freqs[key]

    def spans(self, batch: Batch, reaches: Iterable[Reach]) -> Spans:
        """See `Ops.spans`. Attention uses the window of each layer's cache instead."""
        own, out = batch.positions, {}
        for reach in reaches:
            assert not (reach.from_first or reach.to_last), reach
            first = own * 0 if reach.back is None else (own - reach.back).clamp(min=0)
            out[reach] = Span(batch, first, own)
        return out

    def copy_residual(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def linear(self, x: Any, weight: Any, *, partial_sums: bool = False) -> Any:
        """See `Ops.linear`. `Scaled` rows give `Scaled`, which the next call overwrites; the
        residual [T, H] gives float32 [T, N]."""
        if isinstance(x, Scaled):
            assert partial_sums, "only norm_residual_norm reads scaled rows"
            return self._down(x, weight)
        rows, powers = self._halves(x)
        out = torch.empty(len(x), weight.shape[0], dtype=torch.float32, device=self.device)
        self.products.floats(rows, [weight_of(weight)], out)
        return out.mul_(powers[:, None])

    # ---- sublayers

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return packed_rows.rms_norm(x, weight, eps)

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Scaled:
        self._kernel("norm", len(x), x=x, weight=weight, to=self._normed, eps=eps)
        return Scaled(self._normed[: len(x)])

    def norm_residual_norm(
        self,
        h: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None = None,
        *,
        unpacked: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        assert isinstance(h, Scaled) and weight is not None, type(h)
        rows = None if next_norm is None or unpacked else self._normed
        self._kernel(
            "add_norm",
            len(x),
            h=h.values,
            x=x,
            weight=weight,
            scale=scale,
            next=None if rows is None else next_norm,
            to=rows,
            stored=1 / h.factor,
            eps=eps,
        )
        if rows is not None:
            return x, Scaled(rows[: len(x)])
        return x, None if next_norm is None else self.rms_norm(x, next_norm, eps)

    def qkv(self, h: Any, a: op.Attention, batch: Batch, kv: Any, *, queries: bool = True) -> Any:
        assert isinstance(h, Scaled) and isinstance(batch, Chunk) and queries
        assert a.q_norm is not None and a.v_norm and not a.interleaved, a
        launch.assert_lengths(a.head_dim, a.q_norm, a.k_norm)
        n_head = a.q.shape[0] // a.head_dim
        on = self._ways[kind_of(kv.window, n_head, kv.n_kv, kv.head_dim, kv.rotary_pairs)]
        weights = _concat_rows([w for w in (a.q, a.k, a.v) if w is not None])
        x = self._view(self._wide, len(h), sum(w.rows for w in weights))
        self.products.halves(h.values, weights, x, PROJECTED)
        norms = HeadWeights(
            a.q_norm, a.k_norm if a.k is not None else None, a.v is not None, a.eps * PROJECTED**2
        )
        on.prepare(x, norms, self._rotary(a.freqs, batch), kv, batch)
        return Queries(on, n_head)

    def attend(self, q: Any, kv: Any, span: Span, scale: float) -> Any:
        batch = span.batch
        assert isinstance(q, Queries) and isinstance(batch, Chunk) and scale == 1.0, scale
        out = self._view(self._inner, len(batch), q.heads * kv.head_dim)
        q.on.attend(out, batch.start)
        return Scaled(out)

    def gated(
        self,
        x: Any,
        gate: Any,
        up: Any,
        down: Any,
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        partial_sums: bool = False,
    ) -> Any:
        assert isinstance(x, Scaled) and partial_sums and activation == self.gelu_tanh
        n, width = len(x), gate.shape[0]
        pair, both = self._pair(gate, up), self._view(self._wide, n, 2 * width)
        self.products.halves(x.values, pair, both, PROJECTED)
        inner = self._view(self._inner, n, width)
        halves = "false" if len(pair) == 1 else "true"
        launch.kernel("prefill.cu", f"gated<Half, {halves}>")(
            (n, -(-width // (GATED_THREADS * GATED_CHANNELS))),
            GATED_THREADS,
            gate_up=both,
            to=inner,
            width=width,
            in_scale=1 / PROJECTED,
            out_scale=HIDDEN,
            pdl=False,
        )
        return self._down(Scaled(inner, HIDDEN), down)

    def modulated(
        self,
        x: Any,
        gate: Any,
        by: torch.Tensor,
        down: Any,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> Any:
        assert activation == self.gelu_tanh
        rows, powers = self._halves(x)
        n, width = len(x), gate.shape[0]
        gates = x.new_empty(n, width)
        self.products.floats(rows, [weight_of(gate)], gates)
        inner = self._view(self._inner, n, width)
        launch.kernel("prefill.cu", "modulated")(
            (n, -(-width // GATED_THREADS)),
            GATED_THREADS,
            gate=gates,
            powers=powers,
            by=launch.Strided(by),
            stride=by.stride(0),
            to=inner,
            width=width,
            pdl=False,
        )
        return self._down(Scaled(inner), down)

    def expert_layer(
        self,
        h: Any,
        x: torch.Tensor,
        e: op.ExpertLayer,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Any]:
        on, n, eps = self._experts, len(x), e.eps
        assert on is not None and isinstance(h, Scaled) and h.factor == 1.0
        self._kernel(
            "add_norm_experts",
            n,
            h=h.values,
            x=x,
            weight=e.post_attention,
            dense=e.ffn_norm,
            to_dense=self._normed,
            experts=e.expert_norm,
            to_experts=on.rows,
            router=e.router_norm,
            to_router=on.routed,
            share=x.shape[1] ** -0.5,
            eps=eps,
        )
        dense = self.gated(
            Scaled(self._normed[:n]), e.gate, e.up, e.down, self.gelu_tanh, partial_sums=True
        )
        y = on(_stacks(e), e.router, e.gains, self.products, n)
        rows = None if next_norm is None else self._normed
        self._kernel(
            "add_experts",
            n,
            h=dense.values,
            y=y,
            places=on.places,
            weights=on.weights,
            k=e.n_used,
            x=x,
            dense=e.post_dense,
            experts=e.post_experts,
            post=e.post,
            scale=scale,
            next=next_norm,
            to=rows,
            stored=1 / dense.factor,
            eps=eps,
        )
        return x, None if rows is None else Scaled(rows[:n])

    # ---- inside

    def _down(self, x: Scaled, weight: Any) -> Scaled:
        """Multiply rows with a matrix [H, N]; return the result of a sublayer."""
        out = self._sums[: len(x)]
        self.products.floats(x.values, [weight_of(weight)], out)
        return Scaled(out, x.factor)

    def _halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert the residual [T, H] to the input of a matmul; return it and the factor [T] of its
        result."""
        powers = x.new_empty(len(x))
        self._kernel("convert", len(x), x=x, to=self._normed, powers=powers)
        return self._normed[: len(x)], powers

    def _pair(self, gate: Any, up: Any) -> Sequence[Weight]:
        """Return gate and up projections as one matrix, interleaved by 16 rows, or as two."""
        if isinstance(gate, Matrix) and isinstance(up, Matrix):
            return self.pairs(gate, up)
        return [weight_of(gate), weight_of(up)]

    def _kernel(self, name: str, count: int, **arguments: Any) -> None:
        """Launch a kernel of prefill.cu that processes one row per block."""
        width = self._config.n_embd
        instance, threads = row_kernel(name, width)
        launch.assert_lengths(width, *(arguments.get(weight) for weight in NORM_WEIGHTS))
        launch.kernel("prefill.cu", instance)(count, threads, **arguments, pdl=False)

    @staticmethod
    def _view(buffer: torch.Tensor, count: int, width: int) -> torch.Tensor:
        return buffer[: count * width].view(count, width)


def _concat_rows(matrices: Sequence[Any]) -> list[Weight]:
    """Concatenate matrices along rows, into as few as their layout allows."""
    if not all(isinstance(m, Matrix) for m in matrices):
        return [weight_of(m) for m in matrices]
    join(matrices)
    return concat_rows(matrices)


def _stacks(e: op.ExpertLayer) -> Stacks:
    """Return the experts' matrices, packed for both kinds of ops at first use."""
    stacks = [w for w in (e.gate_exps, e.up_exps) if w is not None]
    turned = None
    if all(isinstance(stack, Matrix) for stack in stacks):
        turned = interleave_experts(e.gate_exps, e.up_exps)
    parts = [weight_of(stack) for stack in stacks] if turned is None else [turned]
    return Stacks(parts, weight_of(e.down_exps), interleaved=turned is not None)


def row_kernel(name: str, width: int) -> tuple[str, int]:
    """Return the instance and thread count of a kernel of prefill.cu for rows of `width`: the shape
    with the least idle threads, with about six warps."""
    quads = width // 4
    assert width % 4 == 0, width
    shapes = [(warps, -(-quads // (32 * warps))) for warps in range(1, 33)]
    warps, _ = min(
        (s for s in shapes if s[1] <= 8), key=lambda s: (s[0] * s[1] * 32 - quads, abs(s[0] - 6))
    )
    return f"{name}<{width}, {warps}>", 32 * warps


def list_units() -> list[Unit]:
    """Return the instances that tests compile: hidden sizes of the targets, and their experts with
    how many a token visits."""
    gated = [f"gated<{t}, {halves}>" for t in ("Half", "Bfloat") for halves in ("false", "true")]
    by_row = ("norm", "add_norm", "convert", "add_norm_experts", "add_experts")
    rows = [row_kernel(name, w)[0] for w in (5376, 3840, 2816, 2560, 1536) for name in by_row]
    return [
        Unit("prefill.cu", ("modulated", *gated, *rows), max_registers=96),
        Unit("prefill_experts.cu", ("order", "route<128, 8>", "gather<2816>"), max_registers=64),
    ]
