"""A Gemma 4 model that reads long prompts: `gemma4.Model.forward` for hundreds of rows and more,
over the same weights and caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from g4spec.models.gemma4 import Model
from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.prefill.prefill import LayerWeights, PerLayerWeights, Prefill
from g4spec.runtime.cuda.prefill.prefill_attention import HeadWeights
from g4spec.runtime.cuda.prefill.prefill_experts import ExpertWeights
from g4spec.runtime.cuda.weights.dequant import Weight
from g4spec.runtime.cuda.weights.matrix import Matrix, below, in_turns, join

Pair = Callable[[Matrix, Matrix], Sequence[Weight]]
"""Gates and ups as one matrix in turns of 16 rows, or as two."""


class LongModel:
    """What `Model` computes, for any number of rows.

    Args:
        model: its weights are `Matrix`, or numbers.
        caches, chunk, n_ctx: see `Prefill`.
        pair: how steps have packed gates and ups.
        portable: see `Prefill`.
    """

    def __init__(
        self,
        model: Model,
        caches: Sequence[CudaKV],
        chunk: int,
        n_ctx: int,
        pair: Pair,
        portable: bool = False,
    ) -> None:
        self._model = model
        layers = [layer_weights(model.w, spec, pair) for spec in model.config.layers]
        _weight(model.table)  # packed before the buffers of chunks take the room for it
        self._prefill = Prefill(model.config, layers, caches, model._freqs, chunk, n_ctx, portable)

    def forward(
        self, ids: torch.Tensor, start: int, taps: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run tokens `ids` [T] at positions start, start + 1, ...; see `Model.forward`."""
        model, step = self._model, self._prefill.chunk
        x = model.embed(ids)
        told = model._per_layer_inputs(ids, x)
        tapped = {i: torch.empty_like(x) for i in taps}
        for at in range(0, len(ids), step):
            rows = slice(at, min(at + step, len(ids)))
            self._prefill(x[rows], start + at, {i: tap[rows] for i, tap in tapped.items()},
                          None if told is None else told[rows])  # fmt: skip
        norm = model.w["output_norm.weight"]
        return model.ops.rms_norm(x, norm, model.config.eps), tapped


def layer_weights(w: Mapping[str, Any], spec: LayerSpec, pair: Pair) -> LayerWeights:
    """A layer's weights by their GGUF names."""
    b = f"blk.{spec.index}."

    def named(name: str) -> Any:
        return w[f"{b}{name}.weight"]

    def one(name: str) -> Weight:
        return _weight(named(name))

    names = ["attn_q"]
    if spec.kv_from is None:
        names += ["attn_k"] if spec.v_from_k else ["attn_k", "attn_v"]
    k_norm = named("attn_k_norm") if spec.kv_from is None else None
    per_layer = None
    if spec.n_ple:
        per_layer = PerLayerWeights(one("inp_gate"), one("proj"), named("post_norm"))
    return LayerWeights(
        named("attn_norm"), _below([named(name) for name in names]),
        HeadWeights(named("attn_q_norm"), k_norm), one("attn_output"),
        named("post_attention_norm"), named("ffn_norm"),
        _pair(named("ffn_gate"), named("ffn_up"), pair), one("ffn_down"), named("post_ffw_norm"),
        w.get(f"{b}layer_output_scale.weight"), _experts(w, spec), per_layer,
    )  # fmt: skip


def _experts(w: Mapping[str, Any], spec: LayerSpec) -> ExpertWeights | None:
    if not spec.n_expert:
        return None
    b = f"blk.{spec.index}."
    names = ("gate", "up") if spec.split_experts else ("gate_up",)
    stacks = [w[f"{b}ffn_{name}_exps.weight"] for name in names]
    turned = None
    if all(isinstance(stack, Matrix) for stack in stacks):
        turned = in_turns(stacks[0], stacks[1] if len(stacks) > 1 else None)
    return ExpertWeights(
        w[b + "ffn_gate_inp.weight"], w[b + "ffn_gate_inp.scale"], w[b + "ffn_down_exps.scale"],
        [_weight(stack) for stack in stacks] if turned is None else [turned],
        _weight(w[b + "ffn_down_exps.weight"]), w[b + "pre_ffw_norm_2.weight"],
        w[b + "post_ffw_norm_1.weight"], w[b + "post_ffw_norm_2.weight"],
        interleaved=turned is not None,
    )  # fmt: skip


def _weight(x: Any) -> Weight:
    """A matrix, or a stack of them, as it lies in memory."""
    if isinstance(x, Matrix):
        return x.alone
    return Weight("", x, x.shape[-2], x.shape[-1], x.shape[0] if x.dim() == 3 else 1)


def _below(matrices: Sequence[Any]) -> list[Weight]:
    if not all(isinstance(m, Matrix) for m in matrices):
        return [_weight(m) for m in matrices]
    join(matrices)
    return below(matrices)


def _pair(gate: Any, up: Any, pair: Pair) -> Sequence[Weight]:
    if isinstance(gate, Matrix) and isinstance(up, Matrix):
        return pair(gate, up)
    return [_weight(gate), _weight(up)]
