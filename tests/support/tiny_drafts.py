"""Tiny random checkpoints of DSpark, EAGLE-3 and DFlash2 drafts, in the layout of each trainer. As
in `tests.support.tiny`, every function writes one folder and returns its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from g4spec.convert.safetensors import read
from tests.support import tiny
from tests.support.tiny import Weights, dump, save


def extend(folder: Path, weights: Weights, **config: Any) -> Path:
    """Add tensors and settings to a single-file checkpoint."""
    stored = {}
    for name, t in read(folder / "model.safetensors").items():
        stored[name] = (np.array(t.array() if t.format else t.raw.reshape(t.shape)), t.dtype)
    (folder / "model.safetensors").unlink()
    save(folder / "model.safetensors", stored | weights.out)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dump(folder / "config.json", settings | config)
    return folder


def heads(
    w: Weights, *, vocab: int, rows: int, e: int, rank: int, head: str, confidence: str
) -> None:
    """Add DSpark's heads; `confidence` is "none", "hidden" or "both"."""
    if rank:
        w.matrix("markov_head.markov_w1.weight", vocab, rank, scale=1.0)
        w.matrix("markov_head.markov_w2.weight", rows, rank, scale=1.0)
    if head == "gated":
        w.matrix("markov_head.gate_proj.weight", rank, e + rank)
        w.matrix("markov_head.gate_proj.bias", rank)
    if head == "rnn":
        w.matrix("markov_head.joint_proj.weight", 3 * rank, 2 * rank + e)
        w.matrix("markov_head.joint_proj.bias", 3 * rank)
    if confidence != "none":
        w.matrix("confidence_head.proj.weight", 1, e + (rank if confidence == "both" else 0))
        w.matrix("confidence_head.proj.bias", 1)


def head_settings(rank: int, head: str, confidence: str) -> dict[str, Any]:
    return {
        "markov_rank": rank,
        "markov_head_type": head,
        "enable_confidence_head": confidence != "none",
        "confidence_head_with_markov": confidence == "both",
    }


def speculators_dspark(
    folder: Path,
    target: Path,
    *,
    draft_vocab: int | None = 64,
    rank: int = 8,
    head: str = "vanilla",
    confidence: str = "both",
    from_anchor: bool | None = True,
    dtype: str = "BF16",
    seed: int = 4,
    **options: Any,
) -> Path:
    """Write a speculators DSpark draft; `options` as in `tiny.speculators_dflash`. `from_anchor`
    None omits the key."""
    tiny.speculators_dflash(folder, target, draft_vocab=draft_vocab, dtype=dtype, **options)
    text = tiny._text(target)
    w = Weights(seed, dtype)
    heads(
        w,
        vocab=text["vocab_size"],
        rows=draft_vocab or text["vocab_size"],
        e=text["hidden_size"],
        rank=rank,
        head=head,
        confidence=confidence,
    )
    extend(
        folder,
        w,
        speculators_model_type="dspark",
        architectures=["DSparkDraftModel"],
        sample_from_anchor=from_anchor,
        **head_settings(rank, head, confidence),
    )
    if from_anchor is None:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        del settings["sample_from_anchor"]
        dump(folder / "config.json", settings)
    return folder


def deepspec_dspark(
    folder: Path,
    target: Path,
    *,
    layers: int = 2,
    inter: int = 96,
    heads_: int = 4,
    global_kv: int = 1,
    head_dim: int = 32,
    block: int = 4,
    rank: int = 8,
    head: str = "vanilla",
    confidence: str = "both",
    softcap: float | None = 30.0,
    partial: float = 0.25,
    alias: bool = False,
    own_values: bool = False,
    dtype: str = "BF16",
    seed: int = 5,
    **config: Any,
) -> Path:
    """Write a DeepSpec `Gemma4DSparkModel`: Gemma 4 layers, all with full attention and V = K, own
    embedding and head.

    Args:
        alias: use the other tensor name of the confidence head.
        own_values: as exported by NVIDIA: separate V, settings written twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = tiny._text(target)
    e, depth, vocab = text["hidden_size"], text["num_hidden_layers"], text["vocab_size"]
    ids = [round(1 + k * (depth - 4) / 2) for k in range(3)]
    inner = tiny._gemma_config(
        layers=layers,
        hidden=e,
        inter=inter,
        heads=heads_,
        kv=2,
        global_kv=global_kv,
        head_dim=16,
        global_head_dim=head_dim,
        window=8,
        softcap=softcap,
        vocab=vocab,
        per_layer=False,
        k_eq_v=not own_values,
        n_ctx=text["max_position_embeddings"],
        period=1,
    )
    rope = {"rope_type": "proportional", "partial_rotary_factor": partial, "rope_theta": 1e6}
    settings = (
        inner
        | {
            "architectures": ["Gemma4DSparkModel"],
            "target_layer_ids": ids,
            "mask_token_id": 4,
            "block_size": block,
            "num_target_layers": depth,
            "tie_word_embeddings": False,
            "rope_parameters": {**tiny.ROPE, "full_attention": rope},
            **head_settings(rank, head, confidence),
        }
        | config
    )
    if own_values:
        settings |= {
            "model_type": "gemma4_text",
            "dflash_config": {"target_layer_ids": ids, "mask_token_id": 4, "markov_rank": rank},
        }
    dump(folder / "config.json", settings)
    w = Weights(seed, dtype)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        w.matrix(name, vocab, e)
    w.matrix("fc.weight", e, len(ids) * e)
    w.norm("hidden_norm.weight", e)
    w.norm("norm.weight", e)
    tiny._gemma_layers(
        w, inner, own_kv=True, kv_full=2 if own_values else global_kv, hd_full=head_dim
    )
    heads(w, vocab=vocab, rows=vocab, e=e, rank=rank, head=head, confidence=confidence)
    if alias:
        w.out = {n.replace("confidence_head.proj", "confidence_proj"): x for n, x in w.out.items()}
    tiny.save_all(folder, w.out)
    return folder


def _eagle_layers(
    w: Weights, names: list[str], e: int, inter: int, heads_: int, kv: int, hd: int, qk_norm: bool
) -> None:
    for i, p in enumerate(names):
        wide = 2 * e if i == 0 else e
        for name in ("input_layernorm", "post_attention_layernorm", *["hidden_norm"] * (i == 0)):
            w.norm(p + name + ".weight", e)
        w.matrix(p + "self_attn.q_proj.weight", heads_ * hd, wide, scale=0.1)
        w.matrix(p + "self_attn.k_proj.weight", kv * hd, wide, scale=0.1)
        w.matrix(p + "self_attn.v_proj.weight", kv * hd, wide)
        w.matrix(p + "self_attn.o_proj.weight", e, heads_ * hd)
        if qk_norm:
            w.norm(p + "self_attn.q_norm.weight", hd)
            w.norm(p + "self_attn.k_norm.weight", hd)
        w.matrix(p + "mlp.gate_proj.weight", inter, e)
        w.matrix(p + "mlp.up_proj.weight", inter, e)
        w.matrix(p + "mlp.down_proj.weight", e, inter)


def eagle3(
    folder: Path,
    target: Path,
    *,
    layout: str = "speculators",
    draft_vocab: int | None = 64,
    layers: int = 1,
    inter: int = 96,
    heads_: int = 4,
    kv: int = 2,
    head_dim: int = 16,
    taps: tuple[int, ...] | None = None,
    window: int | None = None,
    qwen: bool = False,
    before_residual: bool | None = True,
    before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    depths: int = 0,
    embed: bool = True,
    dtype: str = "BF16",
    seed: int = 6,
    **config: Any,
) -> Path:
    """Write an EAGLE-3 draft.

    Args:
        layout: "speculators" (nested configuration) or "specforge" (flat, `midlayer.*`).
        taps: target layers whose *input* is read; default three.
        window: sliding window of all layers, in tokens; None: all layers are full.
        qwen: add per-head norms of queries and keys.
        before_residual: None omits the key.
        depths: depths of P-EAGLE; 0: EAGLE-3.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = tiny._text(target)
    e, depth, vocab = text["hidden_size"], text["num_hidden_layers"], text["vocab_size"]
    ids = list(taps or [2, depth // 2, depth - 2])
    inner = {
        "model_type": "qwen3" if qwen else "llama",
        "hidden_size": e,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads_,
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
        inner |= {
            "layer_types": ["sliding_attention"] * layers,
            "sliding_window": window,
            "use_sliding_window": True,
        }
    flat = layout == "specforge"
    settings = {
        "draft_vocab_size": draft_vocab or vocab,
        "tie_word_embeddings": False,
        "norm_before_residual": before_residual,
        "norm_before_fc": before_fc,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "dtype": "bfloat16",
    }
    if flat:
        settings |= inner | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids]},
        }
    else:
        proposal = {"proposal_type": "greedy", "speculative_tokens": depths or 3}
        settings |= {
            "architectures": ["Eagle3DraftModel"],
            "transformer_layer_config": inner,
            "speculators_model_type": "peagle" if depths else "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": None, "architectures": []},
            },
            "eagle_aux_hidden_state_layer_ids": ids,
            **({"mask_token_id": 4} if depths else {}),
        }
    settings = {k: v for k, v in (settings | config).items() if v is not None}
    dump(folder / "config.json", settings)
    w = Weights(seed, dtype)
    if embed:
        w.matrix("embed_tokens.weight", vocab, e)
    w.matrix("lm_head.weight", draft_vocab or vocab, e)
    w.matrix("fc.weight", e, len(ids) * e)
    w.norm("norm.weight", e)
    if before_fc:
        w.norm("input_norm.weight", len(ids) * e)
    if fc_norm:
        for i in range(len(ids)):
            w.norm(f"fc_norm.{i}.weight", e)
    if depths:
        w.put("mask_hidden", w.rng.standard_normal((1, 1, len(ids) * e), np.float32))
    names = ["midlayer." if flat else f"layers.{i}." for i in range(layers)]
    _eagle_layers(w, names, e, inter, heads_, kv, head_dim, qwen)
    if draft_vocab:
        tiny.reduced(w, vocab, draft_vocab)
    tiny.save_all(folder, w.out)
    return folder


def _selector(
    target: Path, layers: int, dtype: str, seed: int, kernel: int, group: int, rank: int
) -> Weights:
    """Add DFlash2's convolutions and selector."""
    text = tiny._text(target)
    e, w = text["hidden_size"], Weights(seed, dtype)
    for i in range(layers):
        for name in ("attention_conv", "mlp_conv"):
            p = f"layers.{i}.{name}."
            w.matrix(p + "base_kernel", 2, kernel, e, scale=0.5)
            w.matrix(p + "kernel_projection.weight", 2 * kernel * (e // group), e, scale=0.1)
    for name in ("predecessor_codebook", "successor_codebook"):
        w.matrix(f"candidate_selector.{name}", text["vocab_size"], rank, scale=1.0)
    w.matrix("candidate_selector.hidden_projection.weight", rank, e)
    return w


def speculators_dflash2(
    folder: Path,
    target: Path,
    *,
    layers: int = 2,
    kernel: int = 2,
    group: int = 16,
    rank: int = 8,
    top_k: int = 6,
    non_causal: bool | None = None,
    dtype: str = "BF16",
    seed: int = 7,
    **options: Any,
) -> Path:
    """Write a speculators DFlash2 draft; `options` as in `tiny.speculators_dflash`. `non_causal`
    None omits the key."""
    tiny.speculators_dflash(folder, target, draft_vocab=None, layers=layers, dtype=dtype, **options)
    extend(
        folder,
        _selector(target, layers, dtype, seed, kernel, group, rank),
        speculators_model_type="dflash2",
        architectures=["DFlash2DraftModel"],
        conv_kernel_size=kernel,
        conv_group_size=group,
        selector_rank=rank,
        selector_top_k=top_k,
        sliding_window_non_causal=non_causal,
    )
    return folder


def zlab_dflash2(
    folder: Path,
    target: Path,
    *,
    layers: int = 2,
    kernel: int = 2,
    group: int = 16,
    rank: int = 8,
    top_k: int = 6,
    multiplier: float = 1.5,
    dtype: str = "BF16",
    seed: int = 8,
    **options: Any,
) -> Path:
    """Write a z-lab DFlash2 draft; `options` as in `tiny.zlab_dflash`."""
    tiny.zlab_dflash(folder, target, layers=layers, dtype=dtype, **options)
    inner = json.loads((folder / "config.json").read_text(encoding="utf-8"))["dflash_config"]
    inner |= {
        "conv_kernel_size": kernel,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": top_k,
        "output_multiplier": multiplier,
    }
    return extend(
        folder,
        _selector(target, layers, dtype, seed, kernel, group, rank),
        architectures=["DFlash2DraftModel"],
        dflash_config=inner,
    )
