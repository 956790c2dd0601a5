"""DFlash drafts, GGUF architecture `dflash`: z-lab and speculators checkpoints.

A draft of a few Qwen3-style layers fills a block [anchor, mask, mask, ...] in one pass. Its keys
and values of earlier positions are computed from target features: inputs of some target layers,
projected by `fc`. The forward pass is in `dflash_drafter.py`, the GGUF side in
`dflash_backbone.py`.

Sources: z-lab/dflash `model.py`, speculators 0.9.0 `models/dflash`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
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
    file_notes,
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
    "file_notes",
    "metadata",
    "parse_gguf",
    "tensors",
    "token_ids",
]

TITLE = "DFlash draft"
SLIDING = "sliding_attention"

ADAPTER = "hidden_dim_adapter.proj.weight"
SCALE = "input_embedding_scale"
MULTIPLIER = "output_multiplier"
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
"""Keys of `dflash_config` that are read or are redundant."""
HEADS = (
    ("LiLiCorr", "lilicorr_enabled", (None, False)),
    ("Domino", "projector_type", (None, "none")),
)
"""Unsupported heads: (name, key that enables it, values of the key that do not)."""

DRAFTS_FROM_ANCHOR = Limit(
    "refused",
    "drafts that start in the anchor's row",
    "starts in the next row, so every drafted token is off by one",
    lambda c: c.from_anchor,
)
LIMITS = (*backbone.LIMITS, DRAFTS_FROM_ANCHOR)


def claims(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint is a DFlash draft in a supported layout."""
    raw = checkpoint.config
    if "speculators_model_type" in raw:
        return bool(raw["speculators_model_type"] == "dflash")
    return "dflash_config" in raw and "DFlashDraftModel" in (raw.get("architectures") or ())


def parse_hf(checkpoint: Checkpoint, target: Any) -> Config:
    """Parse `config.json` and tensor names; `target` is the gemma4.Config of its target."""
    nested = "speculators_model_type" in checkpoint.config
    config = (parse_speculators if nested else parse_zlab)(checkpoint, target)
    check_pair(config, target)
    return replace(config, arch=architecture(ARCH, LIMITS, config))


def parse_zlab(checkpoint: Checkpoint, target: Any, *extra: str) -> Config:
    """Parse a flat configuration with a `dflash_config`. `extra`: keys of it that the calling kind
    reads."""
    f = Fields(checkpoint.config, "config.json")
    names = stripped(checkpoint)
    _refuse_adapter(f, names)
    inner = settings(f, target, *extra)
    ids = inner.list(int, "target_layer_ids")
    if MULTIPLIER not in extra:
        f.require(MULTIPLIER, (None, 1, 1.0), None)
    all_sliding = inner.get(bool, "use_swa", False)
    slides = all_sliding or f.get(bool, "use_sliding_window", False)
    return Config(
        n_vocab=f.positive("vocab_size"),
        n_embd=f.positive("hidden_size"),
        n_ctx=f.positive("max_position_embeddings"),
        eps=f.get(float, "rms_norm_eps", 1e-6),
        softcap=inner.get(
            float, "final_logit_softcapping", f.get(float, "final_logit_softcapping", 0.0)
        ),
        layers=_layers(f, window(f, inner) if slides else None, causality(f, inner), all_sliding),
        target_layers=tuple(i + 1 for i in ids),
        block_size=inner.get(int, "block_size", f.get(int, "block_size", 16)),
        mask_token=inner.get(int, "mask_token_id"),
        embed_scale=embedding_scale(f, inner, target),
        own_embed="embed_tokens.weight" in names and f.get(bool, "has_embed_tokens", True),
        own_head="lm_head.weight" in names,
        n_draft=None,
        window_from_anchor=False,
    )


def settings(f: Fields, target: Any, *extra: str) -> Fields:
    """Return `dflash_config`. Raise Unsupported for unknown keys and unsupported heads. `extra`:
    more keys that the calling kind reads."""
    inner = f.sub("dflash_config")
    for name, key, off in HEADS:
        if inner.raw.get(key) not in off:
            raise Unsupported(
                f"config.json: a draft with a {name} head (dflash_config.{key})",
                fix="use a draft without it",
            )
    inner.require("target_hidden_size", (None, target.n_embd), None)
    inner.require("num_target_layers", (None, len(target.layers)), None)
    inner.reject_unknown(
        *SETTINGS,
        *extra,
        *(key for _, key, _ in HEADS),
        fix="see docs/kinds.md for the supported settings",
    )
    return inner


def _refuse_adapter(f: Fields, names: Container[str]) -> None:
    """Raise Unsupported for JetSpec's adapter to targets of another width than the draft's."""
    width = f.sub("dflash_config").get(int, "target_hidden_size", None)
    if width not in (None, f.positive("hidden_size")):
        found = f"config.json: dflash_config.target_hidden_size {width}"
    elif ADAPTER in names:
        found = ADAPTER
    else:
        return
    raise Unsupported(
        f"{found}: a draft with an adapter to a target of another width; JetSpec initializes it at "
        "random, and the block's token rows, which are the target's, do not pass through it",
        expected=f"a target of the draft's width, {f.positive('hidden_size')}",
        fix="use a draft that was trained for this target",
    )


def embedding_scale(f: Fields, inner: Fields, target: Any) -> float:
    """Return the factor on token rows; drafts are trained on Gemma's scaled embedding by
    default."""
    return inner.get(float, SCALE, f.get(float, SCALE, math.sqrt(target.n_embd)))


def window(f: Fields, inner: Fields) -> int:
    """Return the window of sliding layers; `swa_window_size` has priority over `sliding_window`, as
    in vLLM and llama.cpp."""
    return (inner if inner.has("swa_window_size") else f).positive(
        "swa_window_size" if inner.has("swa_window_size") else "sliding_window"
    )


def causality(f: Fields, inner: Fields) -> bool | None:
    """Return whether all layers are causal, or None if the configuration does not say. `is_causal`
    has priority over `causal`, as upstream reads them. JetSpec's `causal_head` makes all causal."""
    flags = (
        f.get(bool, "is_causal", None),
        inner.get(bool, "is_causal", None),
        inner.get(bool, "causal", None),
    )
    first = next((x for x in flags if x is not None), None)
    if not inner.get(bool, "causal_head", False):
        return first
    if first is False:
        raise InputError(
            "config.json: dflash_config.causal_head contradicts is_causal",
            expected="equal values, or only one of them",
            found="true and false",
        )
    return True


def parse_speculators(
    checkpoint: Checkpoint, target: Any, *, from_anchor: bool = False, non_causal: bool = False
) -> Config:
    """Parse a configuration with a nested `transformer_layer_config`. `from_anchor` and
    `non_causal` are the defaults of the kind's configuration class for missing keys."""
    f = Fields(checkpoint.config, "config.json")
    inner = f.sub("transformer_layer_config")
    names = stripped(checkpoint)
    n_vocab = inner.positive("vocab_size", target.n_vocab)
    n_draft = f.positive("draft_vocab_size", n_vocab)
    f.require("target_hidden_size", (None, inner.positive("hidden_size")), None)
    ids = f.list(int, "aux_hidden_state_layer_ids", default_taps(len(target.layers)))
    mask = f.get(int, "mask_token_id", None)
    if mask is None:
        raise InputError("config.json: mask_token_id is missing; a DFlash block is filled with it")
    types = layer_types(inner, inner.layers("num_hidden_layers"))
    causal = False if f.get(bool, "sliding_window_non_causal", non_causal) else None
    return Config(
        n_vocab=n_vocab,
        n_embd=inner.positive("hidden_size"),
        n_ctx=inner.positive("max_position_embeddings", target.n_ctx),
        eps=inner.get(float, "rms_norm_eps", 1e-6),
        softcap=0.0,
        layers=_layers(inner, sliding_window(inner, types), causal),
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
    """Return the target layers that speculators reads if the configuration names none."""
    return [2, n_layer // 2, n_layer - 3]


def stripped(checkpoint: Checkpoint) -> set[str]:
    """Return the tensor names without the prefix "model."."""
    return {name.removeprefix("model.") for name in checkpoint.tensors}


def _layers(
    f: Fields, window: int | None, causal: bool | None, all_sliding: bool = False
) -> tuple[LayerSpec, ...]:
    """Return the layers.

    Args:
        causal: whether all layers are causal inside the block. None: those that `layer_types` calls
            sliding are, full ones are not, also if `all_sliding` gives them a window. This is
            vLLM's rule; drafts with `use_swa` are trained with full attention inside the block.
        all_sliding: give every layer the window, whatever `layer_types` says.
    """
    types = layer_types(f, f.layers("num_hidden_layers"))
    sliding = [window is not None and t == SLIDING for t in types]
    template = qwen_layer(f)
    return tuple(
        replace(
            template,
            index=i,
            window=window if s or all_sliding else None,
            causal=s if causal is None else causal,
        )
        for i, s in enumerate(sliding)
    )


def _is_qwen3(f: Fields) -> bool:
    """Return whether transformers reads the configuration with its Qwen3 class, which is
    speculators' default. SpecForge's drafts have Llama in the name of their architecture."""
    llama = "Llama" in str(f.raw.get("architectures"))
    return f.get(str, "model_type", "llama" if llama else "qwen3") == "qwen3"


def layer_types(f: Fields, n_layer: int) -> list[str]:
    """Return `layer_types` of a Llama- or Qwen-style configuration. If the key is missing, all
    layers are full, but in Qwen3's class of transformers those from `max_window_layers` on slide if
    `use_sliding_window` is set."""
    slides = _is_qwen3(f) and f.get(bool, "use_sliding_window", False)
    first = f.get(int, "max_window_layers", 28) if slides else n_layer
    default = [SLIDING if i >= first else "full_attention" for i in range(n_layer)]
    types = f.list(str, "layer_types", default)
    if len(types) != n_layer:
        raise InputError(f"{f.where}: layer_types", expected=n_layer, found=len(types))
    return types


def sliding_window(f: Fields, types: Sequence[str]) -> int | None:
    """Return the window of the layers that slide by `types`. None: they attend to everything, as
    full layers do. Qwen3's class of transformers drops the window unless `use_sliding_window` is
    set, and speculators trains what it reads from there."""
    if SLIDING not in types or (_is_qwen3(f) and not f.get(bool, "use_sliding_window", False)):
        return None
    return f.positive("sliding_window")


def qwen_layer(f: Fields) -> LayerSpec:
    """Return the fields shared by all layers of a Llama- or Qwen-style configuration, with the
    defaults of its class in transformers."""
    f.require("hidden_act", ("silu",), "silu")
    f.require("attention_bias", (False,), False)
    f.require("rope_scaling", (None,), None)
    f.require("rope_is_neox_style", (None, True), None)  # otherwise pairs are neighbours
    rope = f.sub("rope_parameters")
    rope.reject_unknown("rope_type", "rope_theta", "partial_rotary_factor", "factor")
    rope.require("factor", (None, 1, 1.0), None)
    rope.require("partial_rotary_factor", (None, 1, 1.0), None)
    f.require("partial_rotary_factor", (None, 1, 1.0), None)
    if rope.raw.get("rope_type", "default") != "default":
        raise Unsupported(f"{f.where}: rope_type {rope.raw['rope_type']!r} in a draft")
    theta = rope.get(float, "rope_theta", f.get(float, "rope_theta", 10000.0))
    n_head = f.positive("num_attention_heads")
    head_dim = 128 if _is_qwen3(f) else f.positive("hidden_size") // n_head
    return LayerSpec(
        index=0,
        window=None,
        n_head=n_head,
        n_kv=f.positive("num_key_value_heads", n_head),
        head_dim=f.positive("head_dim", head_dim),
        n_ff=f.positive("intermediate_size"),
        rope_base=theta,
    )
