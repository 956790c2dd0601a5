"""The forward pass of Gemma 4 text models.

Source: transformers `models/gemma4/modeling_gemma4.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from g4spec.core import Reach
from g4spec.models.gemma4_config import Config
from g4spec.models.spec import LayerSpec
from g4spec.ops.weights import Attention, ExpertLayer

if TYPE_CHECKING:
    import torch

    from g4spec.core import Batch
    from g4spec.ops.reference import Ops
    from g4spec.ops.spans import Span


class Model:
    """The forward pass. Weights are what the backend's `load` returns, by GGUF name.

    Attributes:
        freqs: radians per position [head_dim / 2] of each layer.
    """

    def __init__(self, config: Config, weights: Mapping[str, Any], ops: Ops) -> None:
        self.config, self.w, self.ops = config, weights, ops
        divisors = weights["rope_freqs.weight"]
        self.freqs = [
            ops.rope_freqs(s.rope_base, s.head_dim, divisors if s.window is None else None)
            for s in config.layers
        ]

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Return token embeddings [T] -> [T, H], times `scale` (default: sqrt(H))."""
        scale = self.config.embed_scale if scale is None else scale
        return self.ops.embed(self.w["token_embd.weight"], ids, scale)

    def forward(
        self,
        batch: Batch,
        kv: Sequence[Any],
        taps: tuple[int, ...] = (),
        pause: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run the rows of `batch` [T], appending to the caches `kv`.

        Args:
            kv: caches of the layers that have one (`gemma4.caches`), by layer.
            pause: called before the middle layer (`Backend.read`).

        Returns:
            The output after the final norm [T, H], and the residual entering each layer of `taps`,
            [T, H] (index n_layer is the output of the last layer before the final norm).
        """
        ops, w, eps = self.ops, self.w, self.config.eps
        x = self.embed(batch.ids)
        per_layer = self._per_layer_inputs(batch.ids, x)
        layers = self.config.layers
        spans = ops.spans(batch, {Reach.causal(s.window) for s in layers})
        norms = [w[f"blk.{s.index}.attn_norm.weight"] for s in layers]
        h, tapped = ops.norm_rows(x, norms[0], eps), {}
        for spec, next_norm in zip(layers, [*norms[1:], w["output_norm.weight"]], strict=True):
            if pause is not None and spec.index == len(layers) // 2:
                pause()
            if spec.index in taps:
                tapped[spec.index] = ops.copy_residual(x)
            h = self._attention(spec, h, spans[Reach.causal(spec.window)], kv)
            ple = per_layer[:, spec.index] if per_layer is not None else None
            x, h = finish_layer(
                ops,
                w,
                f"blk.{spec.index}.",
                x,
                h,
                eps,
                next_norm,
                spec,
                ple,
                unpacked=spec is layers[-1],
            )
        if len(layers) in taps:
            tapped[len(layers)] = x
        return h, tapped

    @property
    def table(self) -> Any:
        """Output projection [V, H], applied after the final norm."""
        return self.w.get("output.weight", self.w["token_embd.weight"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [T, V] with the final softcap from rows [T, H] after the final norm."""
        return self.ops.logits(hidden, self.table, self.config.softcap)

    def _per_layer_inputs(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Compute the per-layer embeddings of the tokens, [T, L, P]; None in models without
        them."""
        n, w = self.config.n_ple, self.w
        if not n:
            return None
        tokens = self.ops.embed(w["per_layer_token_embd.weight"], ids, math.sqrt(n))
        proj, norm = w["per_layer_model_proj.weight"], w["per_layer_proj_norm.weight"]
        return self.ops.per_layer_inputs(tokens, x, proj, norm, self.config.eps)

    def _attention(
        self,
        spec: LayerSpec,
        h: Any,
        span: Span,
        caches: Sequence[Any],
    ) -> torch.Tensor:
        """Compute the attention sublayer of rows `h` -> [T, H]. `span`: the batch, and positions
        each row attends to."""
        ops, w, b = self.ops, self.w, f"blk.{spec.index}."
        own = spec.kv_from is None
        kv = caches[spec.index if spec.kv_from is None else spec.kv_from]
        weights = attention(w, spec, self.config.eps, self.freqs[spec.index], own)
        q = ops.qkv(h, weights, span.batch, kv)
        out = w[b + "attn_output.weight"]
        return ops.linear(ops.attend(q, kv, span, 1.0), out, partial_sums=True)


def attention(
    w: Mapping[str, Any], spec: LayerSpec, eps: float, freqs: torch.Tensor, own_kv: bool
) -> Attention:
    """Collect the projection weights of a Gemma 4 layer; without `own_kv` it reads another layer's
    cache."""
    b = f"blk.{spec.index}."
    return Attention(
        q=w[b + "attn_q.weight"],
        k=w[b + "attn_k.weight"] if own_kv else None,
        v=w[b + "attn_v.weight"] if own_kv and not spec.v_from_k else None,
        q_norm=w[b + "attn_q_norm.weight"],
        k_norm=w[b + "attn_k_norm.weight"] if own_kv else None,
        v_norm=True,
        head_dim=spec.head_dim,
        eps=eps,
        freqs=freqs,
    )


def finish_layer(
    ops: Ops,
    w: Mapping[str, Any],
    b: str,
    x: torch.Tensor,
    h: torch.Tensor,
    eps: float,
    next_norm: torch.Tensor,
    spec: LayerSpec | None = None,
    ple: torch.Tensor | None = None,
    *,
    unpacked: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Compute the rest of a Gemma 4 layer after attention `h` [T, H] on residual `x` [T, H].

    Args:
        next_norm: norm weight [H] of the next layer.
        spec: the layer, needed if it has experts.
        ple: per-layer embeddings of the tokens, [T, P].
        unpacked: return the normed residual as a float32 tensor instead of rows.

    Returns:
        The residual [T, H], and its norm by `next_norm`.
    """
    scale, last = w.get(b + "layer_output_scale.weight"), w[b + "post_ffw_norm.weight"]
    if spec is not None and spec.n_expert:
        e = _experts(w, b, eps, spec)
        if ple is None:
            x, rows = ops.expert_layer(h, x, e, None if unpacked else next_norm, scale)
            return x, ops.rms_norm(x, next_norm, eps) if unpacked else rows
        x, _ = ops.expert_layer(h, x, e, None, None)
    else:
        x, h = ops.norm_residual_norm(
            h, x, w[b + "post_attention_norm.weight"], eps, w[b + "ffn_norm.weight"]
        )
        h = ops.gated(
            h,
            w[b + "ffn_gate.weight"],
            w[b + "ffn_up.weight"],
            w[b + "ffn_down.weight"],
            ops.gelu_tanh,
            partial_sums=True,
        )
        if ple is None:
            return ops.norm_residual_norm(h, x, last, eps, next_norm, scale, unpacked=unpacked)
        x, _ = ops.norm_residual_norm(h, x, last, eps, None)
    h = ops.modulated(x, w[b + "inp_gate.weight"], ple, w[b + "proj.weight"], ops.gelu_tanh)
    return ops.norm_residual_norm(
        h, x, w[b + "post_norm.weight"], eps, next_norm, scale, unpacked=unpacked
    )


def _experts(w: Mapping[str, Any], b: str, eps: float, spec: LayerSpec) -> ExpertLayer:
    both = not spec.split_experts
    return ExpertLayer(
        post_attention=w[b + "post_attention_norm.weight"],
        ffn_norm=w[b + "ffn_norm.weight"],
        post=w[b + "post_ffw_norm.weight"],
        gate=w[b + "ffn_gate.weight"],
        up=w[b + "ffn_up.weight"],
        down=w[b + "ffn_down.weight"],
        post_dense=w[b + "post_ffw_norm_1.weight"],
        router=w[b + "ffn_gate_inp.weight"],
        router_norm=w[b + "ffn_gate_inp.scale"],
        gains=w[b + "ffn_down_exps.scale"],
        n_used=spec.n_expert_used,
        expert_norm=w[b + "pre_ffw_norm_2.weight"],
        post_experts=w[b + "post_ffw_norm_2.weight"],
        gate_exps=w[b + ("ffn_gate_up_exps.weight" if both else "ffn_gate_exps.weight")],
        up_exps=None if both else w[b + "ffn_up_exps.weight"],
        down_exps=w[b + "ffn_down_exps.weight"],
        eps=eps,
    )
