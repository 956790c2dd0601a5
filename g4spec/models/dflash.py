"""DFlash drafts, GGUF architecture `dflash`: z-lab and speculators checkpoints.

A draft of a few Qwen3-style layers fills a block [anchor, mask, mask, ...] in one pass. Its keys
and values of earlier positions come from target features: layer inputs of the target, fused by
`fc`. The forward pass is in `dflash_drafter.py`, what the GGUF file holds in `dflash_backbone.py`.

Sources: z-lab/dflash `model.py`, speculators 0.9.0 `models/dflash`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from g4spec.errors import InputError, Unsupported
from g4spec.models import dflash_backbone as backbone
from g4spec.models.dflash_backbone import (
    ARCH,
    ARCHS,
    DROPS,
    PREFIXES,
    Config,
    caches,
    check_pair,
    metadata,
    parse_gguf,
    tensors,
    token_ids,
)
from g4spec.models.dflash_drafter import Drafter
from g4spec.models.fields import Fields
from g4spec.models.spec import Checkpoint, LayerSpec
from g4spec.models.upstream import Limit, architecture

__all__ = [
    "ARCH",
    "ARCHS",
    "DROPS",
    "PREFIXES",
    "Config",
    "Drafter",
    "caches",
    "check_pair",
    "metadata",
    "parse_gguf",
    "tensors",
    "token_ids",
]

TITLE = "DFlash draft"

SCALE = "input_embedding_scale"
SETTINGS = (
    "target_layer_ids",
    "mask_token_id",
    "mask_token",
    "block_size",
    "num_target_layers",
    "target_hidden_size",
    "is_causal",
    "causal",
    "causal_head",
    "use_swa",
    "swa_window_size",
    "final_logit_softcapping",
    SCALE,
)
"""Keys of `dflash_config` that are read, or say what is known anyway."""
HEADS = (
    ("LiLiCorr", "lilicorr_enabled", (None, False)),
    ("Domino", "projector_type", (None, "none")),
)
"""Heads that have no code here: name, the key that asks for one, its values that do not."""

READS_ROW_ONE = Limit(
    "refused",
    "drafts read from the anchor's row on",
    "reads them from the next row on, so that every draft is off by one",
    lambda c: c.from_anchor,
)
LIMITS = (*backbone.LIMITS, READS_ROW_ONE)


def claims(checkpoint: Checkpoint) -> bool:
    """Whether the folder holds a DFlash draft of a layout known here."""
    raw = checkpoint.config
    if "speculators_model_type" in raw:
        return bool(raw["speculators_model_type"] == "dflash")
    return "dflash_config" in raw and "DFlashDraftModel" in (raw.get("architectures") or ())


def parse_hf(checkpoint: Checkpoint, target: Any) -> Config:
    """Hyperparameters from `config.json` and tensor names; `target` is its gemma4.Config."""
    nested = "speculators_model_type" in checkpoint.config
    config = (parse_speculators if nested else parse_zlab)(checkpoint, target)
    check_pair(config, target)
    return replace(config, arch=architecture(ARCH, LIMITS, config))


def parse_zlab(checkpoint: Checkpoint, target: Any, *own: str) -> Config:
    """A flat configuration with a `dflash_config`; `own`: keys of it that another kind reads."""
    f = Fields(checkpoint.config, "config.json")
    inner = settings(f, target, *own)
    ids = inner.list(int, "target_layer_ids")
    names = stripped(checkpoint)
    window = f.positive("sliding_window") if f.get(bool, "use_sliding_window", False) else None
    everywhere = inner.get(bool, "use_swa", False)
    if everywhere:
        window = inner.positive("swa_window_size")
    return Config(
        n_vocab=f.positive("vocab_size"),
        n_embd=f.positive("hidden_size"),
        n_ctx=f.positive("max_position_embeddings"),
        eps=f.get(float, "rms_norm_eps", 1e-6),
        softcap=inner.get(
            float, "final_logit_softcapping", f.get(float, "final_logit_softcapping", 0.0)
        ),
        layers=_layers(f, window, causality(f, inner), everywhere),
        target_layers=tuple(i + 1 for i in ids),
        block_size=inner.get(int, "block_size", f.get(int, "block_size", 16)),
        mask_token=inner.get(int, "mask_token_id"),
        embed_scale=inner.get(float, SCALE, f.get(float, SCALE, math.sqrt(target.n_embd))),
        own_embed="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        n_draft=None,
        window_from_anchor=False,
    )


def settings(f: Fields, target: Any, *own: str) -> Fields:
    """`dflash_config`, every key of it read or refused. Heads that have no code here are refused by
    name. `own`: more keys that the kind reads."""
    inner = f.sub("dflash_config")
    for name, key, off in HEADS:
        if inner.raw.get(key) not in off:
            raise Unsupported(
                f"config.json: a draft with a {name} head (dflash_config.{key})",
                fix="use a draft without it",
            )
    inner.require("target_hidden_size", (None, target.n_embd), None)  # else an adapter comes first
    inner.require("num_target_layers", (None, len(target.layers)), None)
    inner.reject_unknown(
        *SETTINGS,
        *own,
        *(key for _, key, _ in HEADS),
        fix="the draft would be computed otherwise than it was trained; see docs/kinds.md",
    )
    return inner


def causality(f: Fields, inner: Fields) -> bool | None:
    """One causality for all layers, if the configuration says so: `is_causal` before `causal`, as
    upstream reads them. JetSpec's `causal_head` makes all layers causal."""
    said = (
        f.get(bool, "is_causal", None),
        inner.get(bool, "is_causal", None),
        inner.get(bool, "causal", None),
    )
    first = next((x for x in said if x is not None), None)
    if not inner.get(bool, "causal_head", False):
        return first
    if first is False:
        raise InputError(
            "config.json: dflash_config.causal_head contradicts is_causal",
            expected="both true, or one of them",
            found="true and false",
        )
    return True


def parse_speculators(
    checkpoint: Checkpoint, target: Any, *, from_anchor: bool = False, non_causal: bool = False
) -> Config:
    """A configuration with a nested `transformer_layer_config`; `from_anchor` and `non_causal` are
    what the kind's configuration class assumes when a key is missing."""
    f = Fields(checkpoint.config, "config.json")
    inner = f.sub("transformer_layer_config")
    names = stripped(checkpoint)
    n_vocab = inner.positive("vocab_size", target.n_vocab)
    n_draft = f.positive("draft_vocab_size", n_vocab)
    n_layer = inner.layers("num_hidden_layers")
    f.require("target_hidden_size", (None, inner.positive("hidden_size")), None)
    ids = f.list(int, "aux_hidden_state_layer_ids", default_taps(len(target.layers)))
    mask = f.get(int, "mask_token_id", None)
    if mask is None:
        raise InputError("config.json: mask_token_id is missing; a DFlash block needs it")
    sliding = "sliding_attention" in (inner.raw.get("layer_types") or ["full_attention"] * n_layer)
    causal = False if f.get(bool, "sliding_window_non_causal", non_causal) else None
    return Config(
        n_vocab=n_vocab,
        n_embd=inner.positive("hidden_size"),
        n_ctx=inner.positive("max_position_embeddings", target.n_ctx),
        eps=inner.get(float, "rms_norm_eps", 1e-6),
        softcap=0.0,
        layers=_layers(inner, inner.positive("sliding_window") if sliding else None, causal),
        target_layers=tuple(ids),
        block_size=f.positive("block_size", 8),
        mask_token=mask,
        embed_scale=1.0,
        own_embed="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        n_draft=n_draft if "d2t" in names else None,
        window_from_anchor=True,
        from_anchor=f.get(bool, backbone.FROM_ANCHOR, from_anchor),
    )


def default_taps(n_layer: int) -> list[int]:
    """What speculators assumes when the configuration names no layers."""
    return [2, n_layer // 2, n_layer - 3]


def stripped(checkpoint: Checkpoint) -> set[str]:
    """Tensor names without prefix."""
    return {name.removeprefix("model.") for name in checkpoint.tensors}


def _layers(
    f: Fields, window: int | None, causal: bool | None, everywhere: bool = False
) -> tuple[LayerSpec, ...]:
    """`causal` None: sliding layers are causal inside the block, full layers are not.
    `everywhere`: all layers slide, whatever `layer_types` says."""
    n_layer = f.layers("num_hidden_layers")
    types = f.list(str, "layer_types", ["full_attention"] * n_layer)
    if len(types) != n_layer:
        raise InputError(f"{f.where}: layer_types", expected=n_layer, found=len(types))
    sliding = [everywhere or (window is not None and t == "sliding_attention") for t in types]
    like = qwen_layer(f)
    return tuple(
        replace(like, index=i, window=window if s else None, causal=s if causal is None else causal)
        for i, s in enumerate(sliding)
    )


def qwen_layer(f: Fields) -> LayerSpec:
    """What all layers of a Llama- or Qwen-style configuration have in common."""
    f.require("hidden_act", ("silu",), "silu")
    f.require("attention_bias", (False,), False)
    f.require("rope_scaling", (None,), None)
    rope = f.sub("rope_parameters")
    rope.reject_unknown("rope_type", "rope_theta", "partial_rotary_factor", "factor")
    rope.require("factor", (None, 1, 1.0), None)
    rope.require("partial_rotary_factor", (None, 1, 1.0), None)
    f.require("partial_rotary_factor", (None, 1, 1.0), None)
    if rope.raw.get("rope_type", "default") != "default":
        raise Unsupported(f"{f.where}: rope_type {rope.raw['rope_type']!r} in a draft")
    theta = rope.get(float, "rope_theta", f.get(float, "rope_theta", 10000.0))
    n_head = f.positive("num_attention_heads")
    return LayerSpec(
        index=0,
        window=None,
        n_head=n_head,
        n_kv=f.positive("num_key_value_heads", n_head),
        head_dim=f.positive("head_dim", f.positive("hidden_size") // n_head),
        n_ff=f.positive("intermediate_size"),
        rope_base=theta,
    )
