"""Hyperparameters of EAGLE-3 and P-EAGLE drafts."""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.models.spec import LayerSpec

ARCH = "eagle3"


@dataclass(frozen=True, slots=True)
class Config:
    """Hyperparameters of an EAGLE-3 draft.

    Attributes:
        target_layers: layers of the target whose *input* is a feature, in the order of `fc`.
        n_target: hidden size of the target.
        n_draft: rows of a reduced head (`d2t` present), or None.
        norm_before_residual: the residual is the normed feature instead of the feature.
        norm_before_fc, fc_norm: a norm over all features together, or one for each.
        norm_output: the draft feeds back its output after the final norm instead of before.
        qk_norm: queries and keys are normed by head (Qwen 3).
        mask_token, depths: of P-EAGLE: what stands for tokens not drafted yet, and how many tokens
            are drafted at once; 0 depths is EAGLE-3.
    """

    n_vocab: int
    n_embd: int
    n_ctx: int
    eps: float
    layers: tuple[LayerSpec, ...]
    target_layers: tuple[int, ...]
    n_target: int
    own_embed: bool
    own_head: bool
    n_draft: int | None
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    mask_token: int = 0
    depths: int = 0
    arch: str = ARCH
