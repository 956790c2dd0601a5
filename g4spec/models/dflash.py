"""DFlash drafts, GGUF architecture `dflash`: z-lab and speculators checkpoints.

A draft of a few Qwen3-style layers fills a block [anchor, mask, mask, ...] in one pass. Its keys
and values of earlier positions come from target features: layer inputs of the target, fused by
`fc`. The forward pass is in `dflash_drafter.py`.

Sources: z-lab/dflash `model.py`, speculators 0.9.0 `models/dflash`, llama.cpp `conversion/qwen.py`
and `src/models/dflash.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from g4spec.errors import InputError, Unsupported
from g4spec.gguf import KV, T, array, boolean, f32, string, u32
from g4spec.models.dflash_drafter import Drafter
from g4spec.models.fields import Fields
from g4spec.models.spec import (
    MAX_DRAFT,
    CacheShape,
    Checkpoint,
    Drop,
    LayerSpec,
    TensorSpec,
)

__all__ = ["Config", "Drafter"]

ARCH = "dflash"
TITLE = "DFlash draft"
PREFIXES = ("model.", "")
DROPS = (
    Drop(r"t2d", "a mask that repeats what d2t says; its digest is kept"),
    Drop(r"verifier_(norm|lm_head)\..*", "a copy of the target's own tensor"),
)


@dataclass(frozen=True, slots=True)
class Config:
    """Hyperparameters of a DFlash draft.

    Attributes:
        target_layers: layers of the target whose *input* is a feature, in the order of `fc`.
        block_size: rows of one pass, anchor included; block_size - 1 tokens are drafted.
        embed_scale: factor on token rows: sqrt(H) for z-lab drafts (trained on Gemma's scaled
            embedding), 1 for speculators drafts (trained on the raw table).
        own_embed, own_head: whether the file brings its own tables or borrows the target's.
        n_draft: rows of a reduced head (`d2t` present), or None.
        window_from_anchor: a sliding layer's window is counted from the anchor (speculators: W
            context rows for every row of the block) or from each row (z-lab, as engines run it).
    """

    n_vocab: int
    n_embd: int
    n_ctx: int
    eps: float
    softcap: float
    layers: tuple[LayerSpec, ...]
    target_layers: tuple[int, ...]
    block_size: int
    mask_token: int
    embed_scale: float
    own_embed: bool
    own_head: bool
    n_draft: int | None
    window_from_anchor: bool
    arch: str = ARCH


def claims(checkpoint: Checkpoint) -> bool:
    """Whether the folder holds a DFlash draft of a layout known here."""
    raw = checkpoint.config
    if "speculators_model_type" in raw:
        return bool(raw["speculators_model_type"] == "dflash")
    return "dflash_config" in raw and "DFlashDraftModel" in (raw.get("architectures") or ())


def parse_hf(checkpoint: Checkpoint, target: Any) -> Config:
    """Hyperparameters from `config.json` and tensor names; `target` is its gemma4.Config."""
    nested = "speculators_model_type" in checkpoint.config
    config = (_parse_speculators if nested else _parse_zlab)(checkpoint, target)
    check_pair(config, target)
    return config


def check_pair(config: Config, target: Any) -> None:
    """Raise unless the draft's shapes and layer ids fit this target (its gemma4.Config)."""
    fix = "pass the target this draft was trained for"
    for what, mine, its in (
        ("hidden size", config.n_embd, target.n_embd),
        ("vocabulary", config.n_vocab, target.n_vocab),
    ):
        if mine != its:
            raise InputError(f"the draft's {what} must equal its target's",
                             expected=its, found=mine, fix=fix)  # fmt: skip
    n_layer = len(target.layers)
    if not all(1 <= i <= n_layer for i in config.target_layers):
        raise InputError("the draft reads target layers that do not exist",
                         expected=f"layer inputs 1..{n_layer}", found=list(config.target_layers),
                         fix=fix)  # fmt: skip
    if config.block_size - 1 > MAX_DRAFT:
        raise Unsupported(f"a block of {config.block_size} rows: a step has at most "
                          f"{MAX_DRAFT} drafted tokens")  # fmt: skip


def _parse_zlab(checkpoint: Checkpoint, target: Any) -> Config:
    f = Fields(checkpoint.config, "config.json")
    inner = f.sub("dflash_config")
    ids = inner.list(int, "target_layer_ids")
    names = _stripped(checkpoint)
    causal = inner.raw.get("causal", f.raw.get("is_causal"))
    window = f.positive("sliding_window") if f.get(bool, "use_sliding_window", False) else None
    return Config(
        n_vocab=f.positive("vocab_size"),
        n_embd=f.positive("hidden_size"),
        n_ctx=f.positive("max_position_embeddings"),
        eps=f.get(float, "rms_norm_eps", 1e-6),
        softcap=inner.get(float, "final_logit_softcapping",
                          f.get(float, "final_logit_softcapping", 0.0)),
        layers=_layers(f, window, causal),
        target_layers=tuple(i + 1 for i in ids),
        block_size=inner.get(int, "block_size", f.get(int, "block_size", 16)),
        mask_token=inner.get(int, "mask_token_id"),
        embed_scale=math.sqrt(target.n_embd),
        own_embed="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        n_draft=None,
        window_from_anchor=False,
    )  # fmt: skip


def _parse_speculators(checkpoint: Checkpoint, target: Any) -> Config:
    f = Fields(checkpoint.config, "config.json")
    f.require("sample_from_anchor", (False,), False)
    inner = f.sub("transformer_layer_config")
    names = _stripped(checkpoint)
    n_vocab = inner.positive("vocab_size", target.n_vocab)
    n_draft = f.positive("draft_vocab_size", n_vocab)
    n_layer = inner.layers("num_hidden_layers")
    f.require("target_hidden_size", (None, inner.positive("hidden_size")), None)
    ids = f.list(int, "aux_hidden_state_layer_ids", _default_taps(len(target.layers)))
    mask = f.get(int, "mask_token_id", None)
    if mask is None:
        raise InputError("config.json: mask_token_id is missing; a DFlash block needs it")
    sliding = "sliding_attention" in (inner.raw.get("layer_types") or ["full_attention"] * n_layer)
    causal = False if f.get(bool, "sliding_window_non_causal", False) else None
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
    )


def _default_taps(n_layer: int) -> list[int]:
    """What speculators assumes when the configuration names no layers."""
    return [2, n_layer // 2, n_layer - 3]


def _stripped(checkpoint: Checkpoint) -> set[str]:
    return {name.removeprefix("model.") for name in checkpoint.tensors}


def _layers(f: Fields, window: int | None, causal: bool | None) -> tuple[LayerSpec, ...]:
    """`causal` None: sliding layers are causal inside the block, full layers are not."""
    f.require("hidden_act", ("silu",), "silu")
    f.require("attention_bias", (False,), False)
    f.require("rope_scaling", (None,), None)
    n_layer = f.layers("num_hidden_layers")
    types = f.list(str, "layer_types", ["full_attention"] * n_layer)
    if len(types) != n_layer:
        raise InputError(f"{f.where}: layer_types", expected=n_layer, found=len(types))
    rope = f.get(dict, "rope_parameters", {})
    if rope.get("rope_type", "default") != "default":
        raise Unsupported(f"{f.where}: rope_type {rope['rope_type']!r} in a DFlash draft")
    theta = rope.get("rope_theta", f.raw.get("rope_theta"))
    n_head = f.positive("num_attention_heads")
    sliding = [window is not None and t == "sliding_attention" for t in types]
    return tuple(
        LayerSpec(
            index=i,
            window=window if s else None,
            n_head=n_head,
            n_kv=f.positive("num_key_value_heads", n_head),
            head_dim=f.positive("head_dim", f.positive("hidden_size") // n_head),
            n_ff=f.positive("intermediate_size"),
            rope_base=10000.0 if theta is None else float(theta),
            causal=s if causal is None else causal,
        )
        for i, s in enumerate(sliding)
    )


def parse_gguf(kv: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Config:
    """Hyperparameters from GGUF metadata and tensor shapes (PyTorch order)."""
    f = Fields(kv, "GGUF metadata", "dflash.")
    for name, feature in (("markov_w1.weight", "DSpark's Markov head"),
                          ("selector_hidden.weight", "DFlash2's selector")):  # fmt: skip
        if name in tensors:
            raise Unsupported(f"{feature} is not supported yet")
    n_layer = f.layers("block_count")
    window = f.get(int, "attention.sliding_window", 0)
    sliding = f.list(bool, "attention.sliding_window_pattern", [False] * n_layer)
    every = f.get(bool, "attention.causal", False)
    own = Fields(kv, "GGUF metadata", "g4spec.dflash.")
    causal = own.list(bool, "layer_causal", [every] * n_layer)
    if len(sliding) != n_layer or len(causal) != n_layer:
        raise InputError("GGUF metadata: per-layer arrays must have one entry a layer",
                         expected=n_layer, found=(len(sliding), len(causal)))  # fmt: skip
    head_dim = f.positive("attention.key_length")
    layers = tuple(
        LayerSpec(
            index=i,
            window=window if sliding[i] and window else None,
            n_head=f.positive("attention.head_count"),
            n_kv=f.positive("attention.head_count_kv"),
            head_dim=head_dim,
            n_ff=f.positive("feed_forward_length"),
            rope_base=f.get(float, "rope.freq_base", 10000.0),
            causal=causal[i],
        )
        for i in range(n_layer)
    )
    d2t = tensors.get("d2t")
    return Config(
        n_vocab=f.get(int, "vocab_size", len(kv.get("tokenizer.ggml.tokens") or ())),
        n_embd=f.positive("embedding_length"),
        n_ctx=f.positive("context_length"),
        eps=f.get(float, "attention.layer_norm_rms_epsilon"),
        softcap=f.get(float, "final_logit_softcapping", 0.0),
        layers=layers,
        target_layers=tuple(f.list(int, "target_layers")),
        block_size=f.positive("block_size", 16),
        mask_token=Fields(kv, "GGUF metadata").get(int, "tokenizer.ggml.mask_token_id"),
        embed_scale=f.get(float, "embedding_scale", 1.0),
        own_embed="token_embd.weight" in tensors,
        own_head="output.weight" in tensors,
        n_draft=d2t[0] if d2t else None,
        window_from_anchor=own.get(bool, "window_from_anchor", False),
    )


def metadata(config: Config) -> KV:
    """Upstream's keys, and under `g4spec.` what upstream has no key for."""
    layer = config.layers[0]
    causal = [s.causal for s in config.layers]
    kv: KV = {
        "general.architecture": string(ARCH),
        "dflash.context_length": u32(config.n_ctx),
        "dflash.embedding_length": u32(config.n_embd),
        "dflash.block_count": u32(len(config.layers)),
        "dflash.feed_forward_length": u32(layer.n_ff),
        "dflash.attention.head_count": u32(layer.n_head),
        "dflash.attention.head_count_kv": u32(layer.n_kv),
        "dflash.attention.key_length": u32(layer.head_dim),
        "dflash.attention.value_length": u32(layer.head_dim),
        "dflash.attention.layer_norm_rms_epsilon": f32(config.eps),
        "dflash.rope.freq_base": f32(layer.rope_base),
        "dflash.rope.dimension_count": u32(layer.head_dim),
        "dflash.block_size": u32(config.block_size),
        "dflash.target_layers": array(T.I32, list(config.target_layers)),
        "dflash.attention.causal": boolean(all(causal)),
        "tokenizer.ggml.mask_token_id": u32(config.mask_token),
        "g4spec.dflash.layer_causal": array(T.BOOL, causal),
        "g4spec.dflash.window_from_anchor": boolean(config.window_from_anchor),
    }
    window = next((s.window for s in config.layers if s.window), None)
    if window:
        kv["dflash.attention.sliding_window"] = u32(window)
        kv["dflash.attention.sliding_window_pattern"] = array(
            T.BOOL, [s.window is not None for s in config.layers]
        )
    if config.embed_scale != 1.0:
        kv["dflash.embedding_scale"] = f32(config.embed_scale)
    if config.softcap:
        kv["dflash.final_logit_softcapping"] = f32(config.softcap)
    return kv


def tensors(config: Config) -> list[TensorSpec]:
    """Every tensor of the GGUF file, in order."""
    e = config.n_embd
    out = [
        TensorSpec("fc.weight", (e, len(config.target_layers) * e), "matrix", "fc.weight"),
        TensorSpec("enc.output_norm.weight", (e,), "vector", "hidden_norm.weight"),
        TensorSpec("output_norm.weight", (e,), "vector", "norm.weight"),
    ]
    if config.own_embed:
        out.append(TensorSpec("token_embd.weight", (config.n_vocab, e), "embed",
                              "embed_tokens.weight"))  # fmt: skip
    if config.own_head:
        rows = config.n_draft or config.n_vocab
        out.append(TensorSpec("output.weight", (rows, e), "output", "lm_head.weight"))
    if config.n_draft:
        out.append(TensorSpec("d2t", (config.n_draft,), "index", "d2t", "absolute_d2t"))
    for spec in config.layers:
        out += _layer_tensors(spec, e)
    return out


def _layer_tensors(spec: LayerSpec, e: int) -> list[TensorSpec]:
    i, hd = spec.index, spec.head_dim
    q, k = spec.n_head * hd, spec.n_kv * hd
    rows = (
        ("attn_norm", (e,), "input_layernorm"),
        ("attn_q", (q, e), "self_attn.q_proj"),
        ("attn_k", (k, e), "self_attn.k_proj"),
        ("attn_v", (k, e), "self_attn.v_proj"),
        ("attn_output", (e, q), "self_attn.o_proj"),
        ("attn_q_norm", (hd,), "self_attn.q_norm"),
        ("attn_k_norm", (hd,), "self_attn.k_norm"),
        ("ffn_norm", (e,), "post_attention_layernorm"),
        ("ffn_gate", (spec.n_ff, e), "mlp.gate_proj"),
        ("ffn_up", (spec.n_ff, e), "mlp.up_proj"),
        ("ffn_down", (e, spec.n_ff), "mlp.down_proj"),
    )
    return [
        TensorSpec(f"blk.{i}.{name}.weight", shape, "vector" if len(shape) == 1 else "matrix",
                   f"layers.{i}.{source}.weight")
        for name, shape, source in rows
    ]  # fmt: skip


def caches(config: Config, window: int | None) -> list[CacheShape]:
    """What each layer's cache holds; `window` bounds layers with full attention."""
    return [CacheShape(s.n_kv, s.head_dim, s.window or window) for s in config.layers]
