"""Gemma 4 text targets of all five sizes, GGUF architecture `gemma4`.

The 26B-A4B has experts in addition to its dense feed-forward. E2B and E4B add a per-layer token
embedding to every layer, and their last layers read the KV cache of earlier ones. The tensors of
the 12B have other names ("unified"). Tensors for vision and audio are dropped.

The configuration is in `gemma4_config.py`, the forward pass in `gemma4_model.py`.

Sources: transformers `models/gemma4` and `models/gemma4_unified`, llama.cpp `conversion/gemma.py`
and `src/models/gemma4.cpp` (names and shapes).
"""

from __future__ import annotations

from g4spec.core import CacheShape
from g4spec.models.gemma4_config import (
    GEMMA4,
    Config,
    layers_hf,
    metadata,
    parse_gguf,
    parse_hf,
    samples,
)
from g4spec.models.gemma4_model import Model, attention, finish_layer
from g4spec.models.spec import QUANTIZED_ACTIVATIONS, Checkpoint, Drop, LayerSpec, TensorSpec

__all__ = [
    "ARCH",
    "ARCHITECTURES",
    "DROPS",
    "PREFIXES",
    "TITLE",
    "Config",
    "Model",
    "attention",
    "caches",
    "claims",
    "finish_layer",
    "layer_tensors",
    "layers_hf",
    "metadata",
    "parse_gguf",
    "parse_hf",
    "rope_tensor",
    "tensors",
]

ARCH = GEMMA4
TITLE = "Gemma 4 target"
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
ARCHITECTURES = (
    "Gemma4ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
    "Gemma4UnifiedForCausalLM",
    # The base classes: a model's output projection is its token table.
    "Gemma4Model",
    "Gemma4TextModel",
    "Gemma4UnifiedModel",
    "Gemma4UnifiedTextModel",
)

PARTS = "vision and audio are not part of a text GGUF"
DROPS = (
    Drop(r"(.*\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*", PARTS),
    QUANTIZED_ACTIVATIONS,
    Drop(r"v_head\..*", "the value head of a training, for which generation has no use"),
    Drop(r"(model\.)?lm_head\.weight", "tied to the token table", "embed_tokens.weight"),
)


def claims(checkpoint: Checkpoint) -> bool:
    """Return whether the configuration is that of a Gemma 4 target."""
    return any(a in ARCHITECTURES for a in checkpoint.config.get("architectures") or ())


def layer_tensors(spec: LayerSpec, n_embd: int, own_kv: bool = True) -> list[TensorSpec]:
    """Return the tensors of one layer, in file order. Assistants have no K and V (`own_kv`
    false)."""
    i, hd, e = spec.index, spec.head_dim, n_embd
    q, k = spec.n_head * hd, spec.n_kv * hd
    shared = spec.kv_from is not None  # published files contain K and V nevertheless, unused

    def t(
        name: str, shape: tuple[int, ...], source: str, vector: bool = False, optional: bool = False
    ) -> TensorSpec:
        return TensorSpec(
            f"blk.{i}.{name}.weight",
            shape,
            "vector" if vector else "matrix",
            f"layers.{i}.{source}",
            optional=optional,
        )

    out = [
        t("attn_norm", (e,), "input_layernorm.weight", True),
        t("attn_q", (q, e), "self_attn.q_proj.weight"),
        t("attn_q_norm", (hd,), "self_attn.q_norm.weight", True),
        t("attn_output", (e, q), "self_attn.o_proj.weight"),
        t("post_attention_norm", (e,), "post_attention_layernorm.weight", True),
        t("ffn_norm", (e,), "pre_feedforward_layernorm.weight", True),
        t("ffn_gate", (spec.n_ff, e), "mlp.gate_proj.weight"),
        t("ffn_up", (spec.n_ff, e), "mlp.up_proj.weight"),
        t("ffn_down", (e, spec.n_ff), "mlp.down_proj.weight"),
        t("post_ffw_norm", (e,), "post_feedforward_layernorm.weight", True),
        *_expert_tensors(spec, e),
        t("layer_output_scale", (1,), "layer_scalar", True),
    ]
    if spec.n_ple:
        out += [
            t("inp_gate", (spec.n_ple, e), "per_layer_input_gate.weight"),
            t("proj", (e, spec.n_ple), "per_layer_projection.weight"),
            t("post_norm", (e,), "post_per_layer_input_norm.weight", True),
        ]
    if own_kv:
        out[2:2] = [t("attn_k", (k, e), "self_attn.k_proj.weight", optional=shared)]
        out[4:4] = [t("attn_k_norm", (hd,), "self_attn.k_norm.weight", True, shared)]
        if not spec.v_from_k:
            out[3:3] = [t("attn_v", (k, e), "self_attn.v_proj.weight", optional=shared)]
    return out


def _expert_tensors(spec: LayerSpec, e: int) -> list[TensorSpec]:
    """Return router, experts and the norms around them; nothing for a layer without experts."""
    b, hf, n, ff = f"blk.{spec.index}.", f"layers.{spec.index}.", spec.n_expert, spec.n_ff_expert
    if not n:
        return []
    gate_up = [
        TensorSpec(
            b + "ffn_gate_up_exps.weight", (n, 2 * ff, e), "matrix", hf + "experts.gate_up_proj"
        )
    ]
    if spec.split_experts:  # only in files by other converters
        gate_up = [
            TensorSpec(b + f"ffn_{x}_exps.weight", (n, ff, e), "matrix", hf + f"experts.{x}_proj")
            for x in ("gate", "up")
        ]
    return [
        TensorSpec(b + "ffn_gate_inp.weight", (n, e), "matrix", hf + "router.proj.weight"),
        TensorSpec(b + "ffn_gate_inp.scale", (e,), "vector", hf + "router.scale"),
        *gate_up,
        TensorSpec(b + "ffn_down_exps.weight", (n, e, ff), "matrix", hf + "experts.down_proj"),
        TensorSpec(b + "ffn_down_exps.scale", (n,), "vector", hf + "router.per_expert_scale"),
        TensorSpec(
            b + "pre_ffw_norm_2.weight", (e,), "vector", hf + "pre_feedforward_layernorm_2.weight"
        ),
        TensorSpec(
            b + "post_ffw_norm_1.weight", (e,), "vector", hf + "post_feedforward_layernorm_1.weight"
        ),
        TensorSpec(
            b + "post_ffw_norm_2.weight", (e,), "vector", hf + "post_feedforward_layernorm_2.weight"
        ),
    ]


def rope_tensor(config: Config) -> TensorSpec:
    """Return the RoPE divisors of the global layers: 1, then 1e30 for pairs that do not rotate."""
    full, _ = samples(config)
    return TensorSpec("rope_freqs.weight", (full.head_dim // 2,), "vector", None, "rope_freqs")


def tensors(config: Config) -> list[TensorSpec]:
    """Return every tensor of the GGUF file, in order."""
    h, width = config.n_embd, len(config.layers) * config.n_ple
    out = [
        TensorSpec("token_embd.weight", (config.n_vocab, h), "embed", "embed_tokens.weight"),
        rope_tensor(config),
    ]
    if width:
        out += [
            TensorSpec(
                "per_layer_token_embd.weight",
                (config.n_vocab, width),
                "embed",
                "embed_tokens_per_layer.weight",
            ),
            TensorSpec(
                "per_layer_model_proj.weight",
                (width, h),
                "matrix",
                "per_layer_model_projection.weight",
            ),
            TensorSpec(
                "per_layer_proj_norm.weight",
                (config.n_ple,),
                "vector",
                "per_layer_projection_norm.weight",
            ),
        ]
    for spec in config.layers:
        out += layer_tensors(spec, h)
    out.append(TensorSpec("output_norm.weight", (h,), "vector", "norm.weight"))
    if config.own_head:
        out.append(TensorSpec("output.weight", (config.n_vocab, h), "output", "lm_head.weight"))
    return out


def caches(config: Config) -> list[CacheShape]:
    """Return the cache shapes of the layers with a KV cache of their own. These layers come first,
    so that the index of a cache is that of its layer."""
    return [
        CacheShape(s.n_kv, s.head_dim, s.window, s.rotary_pairs if s.v_from_k else 0)
        for s in config.layers
        if s.kv_from is None
    ]
