"""The forward pass of Gemma 4 text models.

Source: transformers `models/gemma4/modeling_gemma4.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from g4spec.models.gemma4_config import Config
from g4spec.models.spec import LayerSpec

if TYPE_CHECKING:
    import torch

    from g4spec.runtime.kv import LayerKV
    from g4spec.runtime.ops import Ops


class Model:
    """The forward pass. Weights are whatever `ops.load` returns, by GGUF name."""

    def __init__(self, config: Config, weights: Mapping[str, Any], ops: Ops) -> None:
        self.config, self.w, self.ops = config, weights, ops
        divisors = weights["rope_freqs.weight"]
        self._freqs = [
            ops.rope_freqs(s.rope_base, s.head_dim, divisors if s.window is None else None)
            for s in config.layers
        ]

    def embed(self, ids: torch.Tensor, *, scaled: bool) -> torch.Tensor:
        """Token rows [T] -> [T, H], times sqrt(H) if `scaled`."""
        scale = self.config.embed_scale if scaled else 1.0
        return self.ops.embed(self.w["token_embd.weight"], ids, scale)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        kv: list[LayerKV],
        taps: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run tokens `ids` [T] at consecutive `positions` [T], appending to `kv`.

        Args:
            kv: caches of the layers that have one (`gemma4.caches`), by layer.

        Returns:
            The final-norm output [T, H], and the residual entering each layer of `taps`, [T, H]
            (index n_layer is what leaves the last layer, before the final norm).
        """
        x = self.embed(ids, scaled=True)
        per_layer = self._per_layer_inputs(ids, x)
        tapped = {}
        for spec in self.config.layers:
            if spec.index in taps:
                tapped[spec.index] = x
            ple = per_layer[:, spec.index] if per_layer is not None else None
            x = self._layer(spec, x, positions, kv, ple)
        if len(self.config.layers) in taps:
            tapped[len(self.config.layers)] = x
        return self.ops.rms_norm(x, self.w["output_norm.weight"], self.config.eps), tapped

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [T, H] after the final norm -> raw logits [T, V]."""
        return self.ops.linear(hidden, self.w.get("output.weight", self.w["token_embd.weight"]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`head` with the final softcap."""
        z = self.head(hidden)
        return self.ops.softcap(z, self.config.softcap) if self.config.softcap else z

    def _per_layer_inputs(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """What each layer is told about the token again, [T, L, P]; None in models without it."""
        n, w = self.config.n_ple, self.w
        if not n:
            return None
        tokens = self.ops.embed(w["per_layer_token_embd.weight"], ids, math.sqrt(n))
        proj, norm = w["per_layer_model_proj.weight"], w["per_layer_proj_norm.weight"]
        return self.ops.per_layer_inputs(tokens, x, proj, norm, self.config.eps)

    def _layer(
        self,
        spec: LayerSpec,
        x: torch.Tensor,
        positions: torch.Tensor,
        caches: list[LayerKV],
        ple: torch.Tensor | None,
    ) -> torch.Tensor:
        ops, eps, b = self.ops, self.config.eps, f"blk.{spec.index}."
        w = self.w
        h = ops.rms_norm(x, w[b + "attn_norm.weight"], eps)
        if spec.kv_from is None:
            kv = caches[spec.index]
            self._append(spec, h, positions, kv)
        else:
            kv = caches[spec.kv_from]
        q = ops.heads(h, w[b + "attn_q.weight"], w[b + "attn_q_norm.weight"], spec.head_dim, eps)
        q = ops.rope(q, positions, self._freqs[spec.index])
        first = positions * 0 if spec.window is None else (positions - spec.window + 1).clamp(min=0)
        h = ops.linear(ops.attend(q, kv, first, positions, 1.0), w[b + "attn_output.weight"])
        return sandwich(ops, w, b, x, h, eps, spec, ple)

    def _append(
        self, spec: LayerSpec, h: torch.Tensor, positions: torch.Tensor, kv: LayerKV
    ) -> None:
        ops, eps, b, w = self.ops, self.config.eps, f"blk.{spec.index}.", self.w
        k = ops.linear(h, w[b + "attn_k.weight"]).view(len(h), spec.n_kv, spec.head_dim)
        v = k
        if not spec.v_from_k:
            v = ops.linear(h, w[b + "attn_v.weight"]).view(len(h), spec.n_kv, spec.head_dim)
        k = ops.rope(ops.rms_norm(k, w[b + "attn_k_norm.weight"], eps), positions,
                     self._freqs[spec.index])  # fmt: skip
        kv.append(int(positions[0]), k, ops.rms_norm(v, None, eps))


def sandwich(
    ops: Ops,
    w: Mapping[str, Any],
    b: str,
    x: torch.Tensor,
    h: torch.Tensor,
    eps: float,
    spec: LayerSpec | None = None,
    ple: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rest of a Gemma 4 layer after attention `h` [T, H] on residual `x` [T, H].

    Args:
        spec: the layer, needed if it has experts.
        ple: what the layer is told about the tokens again, [T, P].
    """
    x = ops.norm_residual(h, x, w[b + "post_attention_norm.weight"], eps)
    h = ops.rms_norm(x, w[b + "ffn_norm.weight"], eps)
    h = ops.gated(h, w[b + "ffn_gate.weight"], w[b + "ffn_up.weight"], w[b + "ffn_down.weight"],
                  ops.gelu_tanh)  # fmt: skip
    if spec is not None and spec.n_expert:
        h = ops.norm_residual(_experts(ops, w, b, x, eps, spec),
                              ops.rms_norm(h, w[b + "post_ffw_norm_1.weight"], eps),
                              w[b + "post_ffw_norm_2.weight"], eps)  # fmt: skip
    x = ops.norm_residual(h, x, w[b + "post_ffw_norm.weight"], eps)
    if ple is not None:
        h = ops.modulated(x, w[b + "inp_gate.weight"], ple, w[b + "proj.weight"], ops.gelu_tanh)
        x = ops.norm_residual(h, x, w[b + "post_norm.weight"], eps)
    scale = w.get(b + "layer_output_scale.weight")
    return x if scale is None else x * scale


def _experts(
    ops: Ops, w: Mapping[str, Any], b: str, x: torch.Tensor, eps: float, spec: LayerSpec
) -> torch.Tensor:
    """The experts' sum for rows [T, H] of the residual. They are chosen by the residual itself;
    what they read is normed with a weight of its own."""
    ids, weights = ops.route(x, w[b + "ffn_gate_inp.scale"], w[b + "ffn_gate_inp.weight"],
                             w[b + "ffn_down_exps.scale"], spec.n_expert_used, eps)  # fmt: skip
    if spec.split_experts:
        gate, up = w[b + "ffn_gate_exps.weight"], w[b + "ffn_up_exps.weight"]
    else:
        gate, up = w[b + "ffn_gate_up_exps.weight"].split(spec.n_ff_expert, dim=1)
    h = ops.rms_norm(x, w[b + "pre_ffw_norm_2.weight"], eps)
    return ops.experts(h, ids, weights, gate, up, w[b + "ffn_down_exps.weight"], ops.gelu_tanh)
