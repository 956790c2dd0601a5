"""EAGLE-3 and P-EAGLE drafts, GGUF architecture `eagle3`: speculators and SpecForge.

The input of the Llama-style layer is each token concatenated with the feature of the previous
position (inputs of some target layers, projected by `fc`). EAGLE-3 drafts one token per pass and
feeds its own output back as the next feature. P-EAGLE drafts all tokens in one pass, from mask
tokens with a learned feature. Files that upstream does not support get the architecture
`eagle3-g4spec`, which upstream refuses.

The rows of the query and key projections are stored interleaved, as upstream's Llama models are.

Sources: speculators 0.9.0 `models/eagle3` and `models/peagle`, llama.cpp `conversion/llama.py`,
`src/models/eagle3.cpp` and `common/speculative.cpp`. The forward pass is in `eagle3_drafter.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from g4spec.core import MAX_DRAFT
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF, KV, ValueType, array, boolean, string, u32
from g4spec.models import dflash
from g4spec.models.dflash_backbone import (
    DROPS,
    PREFIXES,
    caches,
    check_target,
    require_head,
    size_keys,
    tables,
    window_keys,
)
from g4spec.models.eagle3_config import ARCH, Config
from g4spec.models.eagle3_drafter import Drafter
from g4spec.models.fields import Fields
from g4spec.models.spec import Checkpoint, LayerSpec, TensorSpec
from g4spec.models.upstream import REFUSED_SUFFIX, Limit, architecture

__all__ = ["ARCH", "DROPS", "PREFIXES", "Config", "Drafter", "caches"]

ARCHS = (ARCH, ARCH + REFUSED_SUFFIX)
TITLE = "EAGLE-3 draft"
ALIASES = {"midlayer.": "layers.0."}
SPECULATORS = ("eagle3", "peagle")
FLAT = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")

QK_NORM = "blk.0.attn_q_norm.weight"
MASK = "mask_hidden.weight"
NORM_OUTPUT = "g4spec.eagle3.norm_output"
DEPTHS = "g4spec.eagle3.depths"


LIMITS = (
    Limit(
        "differs",
        "a sliding window",
        "attends to all positions",
        lambda c: any(s.window for s in c.layers),
    ),
    Limit(
        "refused",
        "features of more or fewer than three layers",
        "requires exactly three",
        lambda c: len(c.target_layers) != 3,
    ),
    Limit("refused", "several layers", "runs one", lambda c: len(c.layers) != 1),
    Limit("refused", "a norm for each feature (fc_norm)", "has none", lambda c: c.fc_norm),
    Limit("refused", "a norm for each head of queries and keys", "has none", lambda c: c.qk_norm),
    Limit(
        "refused",
        "feedback after the final norm (norm_output)",
        "feeds back the output before it",
        lambda c: c.norm_output,
    ),
    Limit(
        "refused",
        "a block drafted in one pass (P-EAGLE)",
        "drafts one token per pass",
        lambda c: c.depths > 0,
    ),
)


def claims(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint is an EAGLE-3 or P-EAGLE draft in a supported layout."""
    raw = checkpoint.config
    if "speculators_model_type" in raw:
        return raw["speculators_model_type"] in SPECULATORS
    return any(a in FLAT for a in raw.get("architectures") or ())


def notes(checkpoint: Checkpoint) -> list[str]:
    """Return remarks for users about a checkpoint's configuration."""
    if "norm_before_residual" in checkpoint.config:
        return []
    return [
        "config.json has no norm_before_residual: using false, the default of speculators and "
        "llama.cpp; the default of vLLM is true"
    ]


def parse_hf(checkpoint: Checkpoint, target: Any) -> Config:
    """Parse `config.json` and tensor names; `target` is the gemma4.Config of its target."""
    f = Fields(checkpoint.config, "config.json")
    nested = "speculators_model_type" in checkpoint.config
    inner = f.sub("transformer_layer_config") if nested else f
    names = {name.replace("midlayer.", "layers.0.") for name in dflash.stripped(checkpoint)}
    n_embd = inner.positive("hidden_size")
    n_vocab = inner.positive("vocab_size", target.n_vocab)
    n_draft = f.positive("draft_vocab_size", n_vocab)
    parallel = checkpoint.config.get("speculators_model_type") == "peagle"
    config = Config(
        n_vocab=n_vocab,
        n_embd=n_embd,
        n_ctx=inner.positive("max_position_embeddings", target.n_ctx),
        eps=inner.get(float, "rms_norm_eps", 1e-6),
        layers=_layers(inner),
        target_layers=_taps(f, target),
        n_target=f.get(int, "target_hidden_size", n_embd),
        own_embed="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        n_draft=n_draft if "d2t" in names else None,
        norm_before_residual=f.get(bool, "norm_before_residual", False),
        norm_before_fc=f.get(bool, "norm_before_fc", False),
        fc_norm=f.get(bool, "fc_norm", False),
        norm_output=f.get(bool, "norm_output", False),
        qk_norm="layers.0.self_attn.q_norm.weight" in names,
        mask_token=f.get(int, "mask_token_id") if parallel else 0,
        depths=_depths(f) if parallel else 0,
    )
    if config.norm_before_fc and config.fc_norm:
        raise InputError("config.json: norm_before_fc and fc_norm must not both be true")
    check_pair(config, target)
    return replace(config, arch=architecture(ARCH, LIMITS, config))


def _taps(f: Fields, target: Any) -> tuple[int, ...]:
    """Return the target layers whose inputs are read. speculators stores inputs; SpecForge's
    `eagle_config` stores outputs, which are one less."""
    key = "eagle_aux_hidden_state_layer_ids"
    outputs = f.sub("eagle_config")
    if not f.has(key) and outputs.has(key):
        return tuple(i + 1 for i in outputs.list(int, key))
    return tuple(f.list(int, key, dflash.default_taps(len(target.layers))))


def _depths(f: Fields) -> int:
    methods = f.sub("speculators_config").raw.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    if not isinstance(first, dict):
        raise InputError("config.json: proposal_methods", expected="objects", found=first)
    return Fields(first, "config.json: proposal_methods[0]").positive("speculative_tokens", 8)


def _layers(f: Fields) -> tuple[LayerSpec, ...]:
    types = dflash.layer_types(f, f.layers("num_hidden_layers"))
    window = dflash.sliding_window(f, types)
    template = dflash.qwen_layer(f)
    return tuple(
        replace(
            template,
            index=i,
            window=window if t == dflash.SLIDING else None,
        )
        for i, t in enumerate(types)
    )


def check_pair(config: Config, target: Any) -> None:
    """Raise unless the draft's shapes and layer ids match this target (its gemma4.Config)."""
    check_target("target's hidden size", config.n_target, config, target)
    if config.n_embd != target.n_embd and not (config.own_embed and config.own_head):
        raise Unsupported(
            "a draft of another hidden size than its target, without its own token table and head"
        )


def token_ids(config: Config, file: GGUF) -> dict[str, Any]:
    """Return metadata key -> token ids stored in metadata."""
    return {"tokenizer.ggml.mask_token_id": [config.mask_token]} if config.depths else {}


def parse_gguf(kv: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Config:
    """Parse GGUF metadata and tensor shapes (PyTorch order)."""
    arch = str(kv.get("general.architecture", ARCH))
    f, own = Fields(kv, "GGUF metadata", f"{arch}."), Fields(kv, "GGUF metadata")
    f.require_plain_positions()
    n_layer = f.layers("block_count")
    window = f.get(int, "attention.sliding_window", 0)
    sliding = f.list(bool, "attention.sliding_window_pattern", [bool(window)] * n_layer)
    if len(sliding) != n_layer:
        raise InputError(
            "GGUF metadata: per-layer arrays must have one entry per layer",
            expected=n_layer,
            found=len(sliding),
        )
    d2t = tensors.get("d2t")
    require_head(tensors)
    if DEPTHS in kv and MASK not in tensors:
        raise InputError(
            f"tensor {MASK} is missing, but the metadata describes a P-EAGLE draft",
            fix="convert the draft again",
        )
    depths = own.get(int, DEPTHS, 1) if MASK in tensors else 0
    return Config(
        n_vocab=f.vocabulary(),
        n_embd=f.positive("embedding_length"),
        n_ctx=f.positive("context_length"),
        eps=f.get(float, "attention.layer_norm_rms_epsilon"),
        layers=tuple(
            LayerSpec(
                index=i,
                window=window if s and window else None,
                n_head=f.positive("attention.head_count"),
                n_kv=f.positive("attention.head_count_kv"),
                head_dim=f.positive("attention.key_length"),
                n_ff=f.positive("feed_forward_length"),
                rope_base=f.get(float, "rope.freq_base", 10000.0),
            )
            for i, s in enumerate(sliding)
        ),
        target_layers=tuple(f.list(int, "target_layers")),
        n_target=f.positive("target_hidden_size"),
        own_embed="token_embd.weight" in tensors,
        own_head="output.weight" in tensors,
        n_draft=d2t[0] if d2t else None,
        norm_before_residual=f.get(bool, "norm_before_residual", False),
        norm_before_fc=f.get(bool, "norm_before_fc", False),
        fc_norm="fc_norm.0.weight" in tensors,
        norm_output=own.get(bool, NORM_OUTPUT, False),
        qk_norm=QK_NORM in tensors,
        mask_token=own.get(int, "tokenizer.ggml.mask_token_id") if depths else 0,
        depths=min(depths, MAX_DRAFT),
        arch=arch,
    )


def metadata(config: Config) -> KV:
    """Return upstream's keys, and `g4spec.` keys where upstream has none."""
    a = f"{config.arch}."
    kv: KV = {
        "general.architecture": string(config.arch),
        f"{a}vocab_size": u32(config.n_vocab),
        **size_keys(config),
        f"{a}target_layers": array(ValueType.I32, list(config.target_layers)),
        f"{a}target_hidden_size": u32(config.n_target),
        f"{a}norm_before_residual": boolean(config.norm_before_residual),
        f"{a}norm_before_fc": boolean(config.norm_before_fc),
        **window_keys(config),
    }
    if config.norm_output:
        kv[NORM_OUTPUT] = boolean(True)
    if config.depths:
        kv[DEPTHS] = u32(config.depths)
        kv["tokenizer.ggml.mask_token_id"] = u32(config.mask_token)
    return kv


def tensors(config: Config) -> list[TensorSpec]:
    """Return every tensor of the GGUF file, in order."""
    e, n = config.n_embd, len(config.target_layers)
    wide = n * config.n_target
    out = [TensorSpec("fc.weight", (e, wide), "matrix", "fc.weight")]
    if config.norm_before_fc:
        out.append(TensorSpec("enc.output_norm.weight", (wide,), "vector", "input_norm.weight"))
    if config.fc_norm:
        out += [
            TensorSpec(f"fc_norm.{i}.weight", (config.n_target,), "vector", f"fc_norm.{i}.weight")
            for i in range(n)
        ]
    if config.depths:
        out.append(TensorSpec(MASK, (1, 1, wide), "vector", "mask_hidden"))
    out.append(TensorSpec("output_norm.weight", (e,), "vector", "norm.weight"))
    out += tables(config.n_vocab, e, config.own_embed, config.own_head, config.n_draft)
    for spec in config.layers:
        out += _layer_tensors(spec, e, config.qk_norm)
    return out


def _layer_tensors(spec: LayerSpec, e: int, qk_norm: bool) -> list[TensorSpec]:
    i, hd = spec.index, spec.head_dim
    q, k = spec.n_head * hd, spec.n_kv * hd
    wide = 2 * e if i == 0 else e
    rows: list[tuple[str, tuple[int, ...], str]] = [
        ("attn_norm", (e,), "input_layernorm"),
        ("attn_q", (q, wide), "self_attn.q_proj"),
        ("attn_k", (k, wide), "self_attn.k_proj"),
        ("attn_v", (k, wide), "self_attn.v_proj"),
        ("attn_output", (e, q), "self_attn.o_proj"),
        ("ffn_norm", (e,), "post_attention_layernorm"),
        ("ffn_gate", (spec.n_ff, e), "mlp.gate_proj"),
        ("ffn_up", (spec.n_ff, e), "mlp.up_proj"),
        ("ffn_down", (e, spec.n_ff), "mlp.down_proj"),
    ]
    if i == 0:
        rows.append(("attn_norm_2", (e,), "hidden_norm"))
    if qk_norm:
        rows += [
            ("attn_q_norm", (hd,), "self_attn.q_norm"),
            ("attn_k_norm", (hd,), "self_attn.k_norm"),
        ]
    return [
        TensorSpec(
            f"blk.{i}.{name}.weight",
            shape,
            "vector" if len(shape) == 1 else "matrix",
            f"layers.{i}.{source}.weight",
            pairs=hd if name.startswith(("attn_q", "attn_k")) else 0,
        )
        for name, shape, source in rows
    ]
