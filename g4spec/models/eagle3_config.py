"""Hyperparameters of EAGLE-3 and P-EAGLE drafts."""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.models.spec import LayerSpec

ARCH = "eagle3"


@dataclass(frozen=True, slots=True)
class Config:
    """Hyperparameters of an EAGLE-3 draft.

    Attributes:
        target_layers: target layers whose *input* is read, in the order of the columns of `fc`.
        n_target: hidden size of the target.
        n_draft: number of rows of a head with a reduced vocabulary (`d2t`), or None.
        norm_before_residual: whether the residual is the feature after its norm.
        norm_before_fc, fc_norm: whether a norm over all features, or one per feature, precedes
            `fc`.
        norm_output: whether the draft feeds back its output after the final norm.
        qk_norm: whether each head of queries and keys has a norm (Qwen 3).
        mask_token, depths: P-EAGLE's mask token, and its number of tokens per pass; `depths` is 0
            for EAGLE-3.
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
