"""Weights of the fused ops, as a model passes them to `Ops`. Imports no torch at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of the projections of an attention sublayer.

    Attributes:
        q, k, v: weights [n * head_dim, H]. Without `k` the layer reads the KV cache of another;
            without `v` (but with `k`) the value is the key projection before norm and RoPE.
        q_norm, k_norm: weights [head_dim] of the norm of each head, or None. `v_norm`: whether
            values are normed (without weight).
        freqs: radians per position, [head_dim / 2].
        interleaved: whether RoPE rotates neighbours (2 i, 2 i + 1) instead of halves
            (i, i + head_dim / 2).
    """

    q: Any
    k: Any
    v: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    v_norm: bool
    head_dim: int
    eps: float
    freqs: torch.Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Weights of a layer with experts after its attention. Norms are weights [H].

    Attributes:
        post_attention, ffn_norm, post: norms of the result of attention, of the input of the dense
            branch, and of the sum of both branches.
        gate, up, down: the dense branch, [I, H] twice and [H, I]. post_dense: norm of its result.
        router: [E, H], for rows normed with `router_norm`. gains: [E]. n_used: experts per row.
        expert_norm, post_experts: norms of the input of the experts, and of their sum.
        gate_exps, up_exps: [E, I, H]; or both in `gate_exps` [E, 2 I, H].
        down_exps: [E, H, I].
    """

    post_attention: torch.Tensor
    ffn_norm: torch.Tensor
    post: torch.Tensor
    gate: Any
    up: Any
    down: Any
    post_dense: torch.Tensor
    router: torch.Tensor
    router_norm: torch.Tensor
    gains: torch.Tensor
    n_used: int
    expert_norm: torch.Tensor
    post_experts: torch.Tensor
    gate_exps: Any
    up_exps: Any
    down_exps: Any
    eps: float
