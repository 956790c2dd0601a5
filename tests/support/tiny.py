"""Tiny random checkpoints in the published formats: a target and its drafts, tokenizer included.

Every function writes one folder and returns its path. Weights are seeded, so two calls with the
same arguments write the same bytes. Only numpy is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_tokenizer import NEWLINE, SPECIALS, VOCAB, dump, tokenizer

__all__ = [
    "NEWLINE",
    "SPECIALS",
    "VOCAB",
    "assistant",
    "save",
    "save_all",
    "speculators_dflash",
    "target",
    "tokenizer",
    "zlab_dflash",
]

# ---- safetensors


def store(x: np.ndarray, dtype: str) -> bytes:
    """Return `x` as bytes of a safetensors type; BF16 is rounded to nearest even."""
    if dtype != "BF16":
        kinds = {
            "F64": "<f8",
            "F32": "<f4",
            "F16": "<f2",
            "I64": "<i8",
            "I32": "<i4",
            "BOOL": "?",
            "U8": "u1",
            "F8_E4M3": "u1",
        }
        return np.ascontiguousarray(x).astype(kinds[dtype]).tobytes()
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def save(path: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> Path:
    """Write a safetensors file of name -> (values, safetensors type)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, at = [], 0
    for name, (x, dtype) in tensors.items():
        blobs.append(store(x, dtype))
        span = [at, at + len(blobs[-1])]
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": span}
        at += len(blobs[-1])
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))
    return path


def save_all(folder: Path, tensors: dict[str, tuple[np.ndarray, str]], shards: int = 1) -> None:
    """Write `model.safetensors`, or `shards` files and their index."""
    if shards == 1:
        save(folder / "model.safetensors", tensors)
        return
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save(folder / name, part)
        weight_map.update(dict.fromkeys(part, name))
    dump(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


class Weights:
    """Collects seeded random tensors under a name prefix."""

    def __init__(self, seed: int, dtype: str = "BF16", prefix: str = "") -> None:
        self.rng, self.dtype, self.prefix = np.random.default_rng(seed), dtype, prefix
        self.out: dict[str, tuple[np.ndarray, str]] = {}

    def matrix(self, name: str, *shape: int, scale: float = 0.2) -> None:
        self.put(name, self.rng.standard_normal(shape, np.float32) * np.float32(scale))

    def norm(self, name: str, n: int) -> None:
        self.put(name, 1 + self.rng.standard_normal(n, np.float32) * np.float32(0.1))

    def put(self, name: str, x: np.ndarray, dtype: str | None = None) -> None:
        self.out[self.prefix + name] = (x, dtype or self.dtype)


# ---- checkpoints

ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _gemma_config(
    *,
    layers: int,
    hidden: int,
    inter: int,
    heads: int,
    kv: int,
    global_kv: int,
    head_dim: int,
    global_head_dim: int,
    window: int,
    softcap: float | None,
    vocab: int,
    per_layer: bool,
    k_eq_v: bool,
    n_ctx: int,
    period: int,
) -> dict[str, Any]:
    full = [(i + 1) % period == 0 or i == layers - 1 for i in range(layers)]
    config = {
        "model_type": "gemma4_text",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "sliding_window": window,
        "layer_types": ["full_attention" if f else "sliding_attention" for f in full],
        "attention_k_eq_v": k_eq_v,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": vocab,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": softcap,
        "rope_parameters": ROPE,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": n_ctx,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }
    if per_layer:
        config["per_layer_config"] = {
            f"{i:0{len(str(layers - 1))}d}": {
                "head_dim": global_head_dim,
                "num_key_value_heads": global_kv,
            }
            for i, f in enumerate(full)
            if f
        }
    else:
        config["global_head_dim"] = global_head_dim
        config["num_global_key_value_heads"] = global_kv
    return config


def _gemma_layers(
    w: Weights, c: dict[str, Any], *, own_kv: bool, kv_full: int, hd_full: int, spare: bool = False
) -> None:
    """Add Gemma layers. `own_kv`: number of layers with keys and values; `spare`: write them for
    the sharing layers too."""
    e, first = c["hidden_size"], c["num_hidden_layers"] - c["num_kv_shared_layers"]
    for i, kind in enumerate(c["layer_types"]):
        full, p = kind == "full_attention", f"layers.{i}."
        ff = c["intermediate_size"] * (2 if i >= first and c["use_double_wide_mlp"] else 1)
        hd = hd_full if full else c["head_dim"]
        q = c["num_attention_heads"] * hd
        k = (kv_full if full else c["num_key_value_heads"]) * hd
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            w.norm(p + name + ".weight", e)
        w.matrix(p + "self_attn.q_proj.weight", q, e)
        w.norm(p + "self_attn.q_norm.weight", hd)
        w.matrix(p + "self_attn.o_proj.weight", e, q)
        if own_kv and (i < first or spare):
            w.matrix(p + "self_attn.k_proj.weight", k, e)
            w.norm(p + "self_attn.k_norm.weight", hd)
            if not (full and c["attention_k_eq_v"]):
                w.matrix(p + "self_attn.v_proj.weight", k, e)
        w.matrix(p + "mlp.gate_proj.weight", ff, e)
        w.matrix(p + "mlp.up_proj.weight", ff, e)
        w.matrix(p + "mlp.down_proj.weight", e, ff)
        w.put(p + "layer_scalar", np.array([1 + 0.1 * w.rng.standard_normal()]))
        _gemma_extras(w, c, p)


def _gemma_extras(w: Weights, c: dict[str, Any], p: str) -> None:
    """Add the experts and per-layer embeddings of one layer, if the model has them."""
    e = c["hidden_size"]
    if c["enable_moe_block"]:
        n, ff = c["num_experts"], c["moe_intermediate_size"]
        w.matrix(p + "router.proj.weight", n, e, scale=1.0)
        w.norm(p + "router.scale", e)
        w.norm(p + "router.per_expert_scale", n)
        w.matrix(p + "experts.gate_up_proj", n, 2 * ff, e)
        w.matrix(p + "experts.down_proj", n, e, ff)
        for name in (
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
            "pre_feedforward_layernorm_2",
        ):
            w.norm(p + name + ".weight", e)
    if ple := c["hidden_size_per_layer_input"]:
        w.matrix(p + "per_layer_input_gate.weight", ple, e)
        w.matrix(p + "per_layer_projection.weight", e, ple)
        w.norm(p + "post_per_layer_input_norm.weight", e)


def target(
    folder: Path,
    *,
    layers: int = 12,
    hidden: int = 64,
    inter: int = 96,
    heads: int = 4,
    kv: int = 2,
    global_kv: int = 1,
    head_dim: int = 16,
    global_head_dim: int = 32,
    window: int = 8,
    softcap: float | None = 30.0,
    vocab: int = VOCAB,
    tokens: int | None = None,
    k_eq_v: bool = True,
    per_layer: bool = False,
    nested: bool = True,
    shards: int = 1,
    period: int = 6,
    n_ctx: int = 131072,
    dtype: str = "BF16",
    seed: int = 0,
    experts: int = 0,
    top_k: int = 2,
    expert_inter: int = 24,
    ple: int = 0,
    shared: int = 0,
    spare: bool = False,
    unified: bool = False,
    vision: bool = False,
    suppress: list[int] | None = None,
) -> Path:
    """Write a Gemma 4 target, dense by default.

    Args:
        global_kv: KV heads of full layers with `k_eq_v` (these layers have no v_proj).
        tokens: entries of the tokenizer, if fewer than `vocab`.
        per_layer: write `per_layer_config` instead of `global_head_dim` and similar keys.
        nested: write the settings under `text_config`, as in the multimodal releases.
        period: every `period`-th layer has full attention, and the last one.
        experts: number of experts beside each feed-forward block; `top_k` are active, each is
            `expert_inter` wide.
        ple: width of per-layer embeddings.
        shared: number of last layers without keys and values, which are twice as wide; `spare`: the
            checkpoint has these tensors anyway.
        unified: use the key names of the 12B.
        vision: add tensors that a text model does not need.
        suppress: `suppress_tokens` of generation_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _gemma_config(
        layers=layers,
        hidden=hidden,
        inter=inter,
        heads=heads,
        kv=kv,
        global_kv=global_kv,
        head_dim=head_dim,
        global_head_dim=global_head_dim,
        window=window,
        softcap=softcap,
        vocab=vocab,
        per_layer=per_layer,
        k_eq_v=k_eq_v,
        n_ctx=n_ctx,
        period=period,
    )
    if experts:
        config |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": top_k,
            "moe_intermediate_size": expert_inter,
        }
    config |= {
        "hidden_size_per_layer_input": ple,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": shared > 0,
    }
    brand, family = ("Gemma4Unified", "gemma4_unified") if unified else ("Gemma4", "gemma4")
    config["model_type"] = f"{family}_text"
    if nested:
        outer = {
            "architectures": [f"{brand}ForConditionalGeneration"],
            "model_type": family,
            "text_config": config,
            "eos_token_id": [1, 106],
            "tie_word_embeddings": True,
            "vision_config": None,
            "audio_config": None,
            "dtype": "bfloat16",
        }
    else:
        outer = {"architectures": [f"{brand}ForCausalLM"], **config}
    dump(folder / "config.json", outer)
    w = Weights(seed, dtype, "model.language_model." if nested else "model.")
    w.matrix("embed_tokens.weight", vocab, hidden)
    kv_full = global_kv if k_eq_v else kv
    _gemma_layers(w, config, own_kv=True, kv_full=kv_full, hd_full=global_head_dim, spare=spare)
    w.norm("norm.weight", hidden)
    if ple:
        w.matrix("embed_tokens_per_layer.weight", vocab, layers * ple)
        w.matrix("per_layer_model_projection.weight", layers * ple, hidden)
        w.norm("per_layer_projection_norm.weight", ple)
    if vision:
        w.prefix = "model."
        w.matrix("vision_tower.encoder.layers.0.mlp.gate_proj.weight", 8, 8)
        w.matrix("embed_vision.embedding_projection.weight", hidden, 8)
        w.matrix("embed_audio.embedding_projection.weight", hidden, 8)
    save_all(folder, w.out, shards)
    tokenizer(folder, tokens or vocab)
    if suppress is not None:
        path = folder / "generation_config.json"
        dump(path, json.loads(path.read_text()) | {"suppress_tokens": suppress})
    return folder


def _text(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = config.get("text_config") or config
    return text


def _qwen_layers(w: Weights, n: int, e: int, ff: int, heads: int, kv: int, hd: int) -> None:
    for i in range(n):
        p = f"layers.{i}."
        w.norm(p + "input_layernorm.weight", e)
        w.norm(p + "post_attention_layernorm.weight", e)
        w.matrix(p + "self_attn.q_proj.weight", heads * hd, e)
        w.matrix(p + "self_attn.k_proj.weight", kv * hd, e)
        w.matrix(p + "self_attn.v_proj.weight", kv * hd, e)
        w.matrix(p + "self_attn.o_proj.weight", e, heads * hd)
        w.norm(p + "self_attn.q_norm.weight", hd)
        w.norm(p + "self_attn.k_norm.weight", hd)
        w.matrix(p + "mlp.gate_proj.weight", ff, e)
        w.matrix(p + "mlp.up_proj.weight", ff, e)
        w.matrix(p + "mlp.down_proj.weight", e, ff)


def zlab_dflash(
    folder: Path,
    target: Path,
    *,
    layers: int = 2,
    inter: int = 96,
    heads: int = 4,
    kv: int = 2,
    head_dim: int = 16,
    block: int = 4,
    taps: tuple[int, ...] | None = None,
    window: int = 8,
    mask: int = 4,
    nested_rope: bool = False,
    shards: int = 1,
    dtype: str = "BF16",
    seed: int = 1,
    **config: Any,
) -> Path:
    """Write a z-lab DFlash draft: sliding layers and one full layer; uses the target's embedding
    and head.

    Args:
        taps: target layers whose *output* is read; default three, placed as z-lab does.
        nested_rope: write theta under `rope_parameters`, as newer exports do.
        config: further keys of config.json; None removes one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = _text(target)
    e, depth = text["hidden_size"], text["num_hidden_layers"]
    ids = list(taps or [round(1 + k * (depth - 4) / 2) for k in range(3)])
    rope = (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
        if nested_rope
        else {"rope_theta": 1e6, "rope_scaling": None}
    )
    settings = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": e,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "block_size": block,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": ids},
        "num_target_layers": depth,
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
        "final_logit_softcapping": 30.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        **rope,
        "max_position_embeddings": text["max_position_embeddings"],
        "attention_bias": False,
        "vocab_size": text["vocab_size"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    } | config
    dump(folder / "config.json", {k: v for k, v in settings.items() if v is not None})
    w = Weights(seed, dtype)
    w.matrix("fc.weight", e, len(ids) * e)
    w.norm("hidden_norm.weight", e)
    w.norm("norm.weight", e)
    _qwen_layers(w, layers, e, inter, heads, kv, head_dim)
    save_all(folder, w.out, shards)
    return folder


def speculators_dflash(
    folder: Path,
    target: Path,
    *,
    draft_vocab: int | None = 64,
    layers: int = 2,
    inter: int = 96,
    heads: int = 4,
    kv: int = 2,
    head_dim: int = 16,
    block: int = 4,
    taps: tuple[int, ...] | None = None,
    window: int | None = None,
    mask: int | None = 4,
    non_causal: bool = False,
    embed: bool = True,
    shards: int = 1,
    dtype: str = "BF16",
    seed: int = 2,
    **config: Any,
) -> Path:
    """Write a speculators DFlash draft.

    Args:
        draft_vocab: rows of the reduced head with `d2t` and `t2d`; None: full vocabulary.
        taps: target layers whose *input* is read (speculators' convention).
        window: sliding window of all layers but the last, in tokens; None: all layers are full.
        embed: include `embed_tokens`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = _text(target)
    e, depth, vocab = text["hidden_size"], text["num_hidden_layers"], text["vocab_size"]
    ids = list(taps or [round(2 + k * (depth - 4) / 2) for k in range(3)])
    inner = {
        "model_type": "qwen3",
        "hidden_size": e,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": text["max_position_embeddings"],
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if window:
        inner["layer_types"] = ["sliding_attention"] * (layers - 1) + ["full_attention"]
        inner |= {"sliding_window": window, "use_sliding_window": True}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": block - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    settings = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "draft_vocab_size": draft_vocab or vocab,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "tiny", "architectures": []},
        },
        "transformer_layer_config": inner,
        "block_size": block,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": ids,
        "mask_token_id": mask,
        "sliding_window_non_causal": non_causal,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    } | config
    dump(folder / "config.json", settings)
    w = Weights(seed, dtype)
    if embed:
        w.matrix("embed_tokens.weight", vocab, e)
    w.matrix("lm_head.weight", draft_vocab or vocab, e)
    w.matrix("fc.weight", e, len(ids) * e)
    w.norm("hidden_norm.weight", e)
    w.norm("norm.weight", e)
    _qwen_layers(w, layers, e, inter, heads, kv, head_dim)
    if draft_vocab:
        reduced(w, vocab, draft_vocab)
    save_all(folder, w.out, shards)
    return folder


def reduced(w: Weights, vocab: int, draft_vocab: int) -> None:
    """Return `d2t` and `t2d` of a head with `draft_vocab` rows, including the stop tokens."""
    chosen = {1, 106, NEWLINE}
    rest = [i for i in w.rng.permutation(vocab) if int(i) not in chosen]
    ids_sorted = np.array(sorted([*chosen, *rest[: draft_vocab - len(chosen)]]))
    w.put("d2t", ids_sorted - np.arange(draft_vocab), "I64")
    w.put("t2d", np.isin(np.arange(vocab), ids_sorted), "BOOL")


def assistant(
    folder: Path,
    target: Path,
    *,
    layers: int = 4,
    hidden: int = 32,
    inter: int = 64,
    heads: int | None = None,
    centroids: int = 0,
    top_k: int = 4,
    shards: int = 1,
    dtype: str = "BF16",
    seed: int = 3,
    shared: int | None = -1,
    unified: bool = False,
    **config: Any,
) -> Path:
    """Write a Gemma 4 MTP assistant; `centroids` > 0 gives it a centroid head.

    Args:
        shared: `num_kv_shared_layers` as published; None omits the key; default: all layers.
        unified: use the key names of the 12B.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = _text(target)
    over = next(iter(text.get("per_layer_config", {}).values()), {})
    hd_full = text.get("global_head_dim") or over["head_dim"]
    kv_full = text.get("num_global_key_value_heads") or over.get("num_key_value_heads", 1)
    inner = _gemma_config(
        layers=layers,
        hidden=hidden,
        inter=inter,
        heads=heads or text["num_attention_heads"],
        kv=text["num_key_value_heads"],
        global_kv=kv_full,
        head_dim=text["head_dim"],
        global_head_dim=hd_full,
        window=text["sliding_window"],
        softcap=None,
        vocab=text["vocab_size"],
        per_layer="per_layer_config" in text,
        k_eq_v=text["attention_k_eq_v"],
        n_ctx=text["max_position_embeddings"],
        period=layers,
    )
    brand, family = ("Gemma4Unified", "gemma4_unified") if unified else ("Gemma4", "gemma4")
    inner |= {
        "num_kv_shared_layers": layers if shared == -1 else shared,
        "vocab_size_per_layer_input": 0,
        "model_type": f"{family}_text",
    }
    settings = {
        "architectures": [f"{brand}AssistantForCausalLM"],
        "model_type": f"{family}_assistant",
        "backbone_hidden_size": text["hidden_size"],
        "text_config": inner,
        "use_ordered_embeddings": centroids > 0,
        "num_centroids": centroids or 2048,
        "centroid_intermediate_top_k": top_k if centroids else 32,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    } | config
    if shared is None:
        del inner["num_kv_shared_layers"]
    dump(folder / "config.json", settings)
    w = Weights(seed, dtype, "model.")
    w.matrix("embed_tokens.weight", text["vocab_size"], hidden)
    inner["num_kv_shared_layers"] = 0
    _gemma_layers(w, inner, own_kv=False, kv_full=kv_full, hd_full=hd_full)
    w.norm("norm.weight", hidden)
    w.prefix = ""
    w.matrix("pre_projection.weight", hidden, 2 * text["hidden_size"])
    w.matrix("post_projection.weight", text["hidden_size"], hidden)
    if centroids:
        w.matrix("masked_embedding.centroids.weight", centroids, hidden)
        w.put("masked_embedding.token_ordering", w.rng.permutation(text["vocab_size"]), "I64")
    save_all(folder, w.out, shards)
    return folder
