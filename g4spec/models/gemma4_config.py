"""Hyperparameters of Gemma 4 text models: from `config.json`, from GGUF metadata, and back.

Everything that differs between layers is decided here once and stored in the layer's `LayerSpec`.

Sources: transformers `models/gemma4` and `models/gemma4_unified` (configuration), llama.cpp
`conversion/gemma.py` and `src/models/gemma4.cpp` (keys).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from g4spec.errors import InputError, Unsupported
from g4spec.gguf import KV, ValueType, array, f32, string, u32
from g4spec.models.fields import Fields
from g4spec.models.spec import Checkpoint, LayerSpec

GEMMA4 = "gemma4"
SLIDING, FULL = "sliding_attention", "full_attention"
HEAD_DIM_FULL = 512
"""Default head size of full layers, if the configuration does not give one."""
PERIOD = 6
"""Default period of global layers, if the configuration does not give one."""
MAX_EXPERTS_USED = 1024
"""Maximum experts per token. Kernels have a grid row per row and expert: 65,535 at most."""


@dataclass(frozen=True, slots=True)
class Config:
    """Hyperparameters of a Gemma 4 text model.

    Attributes:
        n_ctx: trained context length.
        softcap: final logits are cap * tanh(z / cap); 0: no cap.
        own_head: whether the output projection differs from the token embedding.
    """

    n_vocab: int
    n_embd: int
    n_ctx: int
    eps: float
    softcap: float
    layers: tuple[LayerSpec, ...]
    arch: str = GEMMA4
    own_head: bool = False

    @property
    def embed_scale(self) -> float:
        return math.sqrt(self.n_embd)

    @property
    def n_ple(self) -> int:
        """Width of the per-layer embedding of one layer; 0: none."""
        return self.layers[0].n_ple

    @property
    def row_width(self) -> int:
        """Width of the widest feed-forward including experts and per-layer embeddings: the memory
        of a row during computation."""
        return len(self.layers) * self.n_ple + max(
            s.n_ff + s.n_expert_used * (s.n_ff_expert + self.n_embd) for s in self.layers
        )

    def kv_source(self, sliding: bool) -> int:
        """Return the last layer of a kind with its own KV cache, which assistants and sharing
        layers read."""
        return max(
            spec.index
            for spec in self.layers
            if spec.kv_from is None and (spec.window is not None) == sliding
        )


def parse_hf(checkpoint: Checkpoint) -> Config:
    """Parse hyperparameters from `config.json`, nested under `text_config` or flat."""
    raw = checkpoint.config
    text = Fields(raw.get("text_config") or raw, "config.json")
    text.require("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    text.require("attention_bias", (False,), False)
    text.require("use_bidirectional_attention", (None, "vision"), None)  # of images only
    n_vocab = text.positive("vocab_size")
    if text.raw.get("hidden_size_per_layer_input"):
        text.require("vocab_size_per_layer_input", (n_vocab,), n_vocab)
    return Config(
        n_vocab=n_vocab,
        n_embd=text.positive("hidden_size"),
        n_ctx=text.positive("max_position_embeddings", 131072),
        eps=text.get(float, "rms_norm_eps", 1e-6),
        softcap=text.get(float, "final_logit_softcapping", 0.0),
        layers=layers_hf(text),
        own_head=not _tied(raw, text),
    )


def _tied(raw: Mapping[str, Any], text: Fields) -> bool:
    """Return whether the output projection is the token embedding: true unless either level denies
    it."""
    outer = Fields(raw, text.where).get(bool, "tie_word_embeddings", True)
    return outer and text.get(bool, "tie_word_embeddings", True)


def layers_hf(text: Fields) -> tuple[LayerSpec, ...]:
    """Parse the per-layer properties from `global_head_dim` and its siblings, or
    `per_layer_config`."""
    # transformers still reads the old key, in place of the new one.
    text.require("rope_scaling", (None, text.raw.get("rope_parameters")), None)
    n_layer = text.layers("num_hidden_layers")
    types = text.list(str, "layer_types", _default_types(n_layer))
    if len(types) != n_layer:
        raise InputError("config.json: layer_types", expected=n_layer, found=len(types))
    types = [*types[:-1], FULL]  # as transformers does, whatever the list says
    sources = shared_kv([kind == SLIDING for kind in types], _count(text, "num_kv_shared_layers"))
    overrides = _overrides(text.sub("per_layer_config"), n_layer)
    layers = tuple(
        _layer_hf(text, i, kind, overrides[i], sources[i]) for i, kind in enumerate(types)
    )
    for kind in set(types):
        sizes = {s.head_dim for s in layers if (s.window is None) == (kind == FULL)}
        if len(sizes) > 1:
            raise Unsupported(
                f"config.json: per_layer_config: {kind} layers with heads of different sizes",
                expected="one size, as transformers requires",
                found=sorted(sizes),
            )
    return layers


def _overrides(per_layer: Fields, n_layer: int) -> list[Fields]:
    """Return the values of `per_layer_config` for each layer; unknown keys are refused."""
    out = [Fields({}, per_layer.where) for _ in range(n_layer)]
    for key in per_layer.raw:
        if not key.isdecimal() or int(key) >= n_layer:
            raise InputError(
                f"{per_layer.where}: layer {key!r}", expected=f"0 to {n_layer - 1}", found=key
            )
        out[int(key)] = per_layer.sub(key)
        out[int(key)].reject_unknown("head_dim", "num_key_value_heads")
    return out


def _default_types(n_layer: int) -> list[str]:
    return [FULL if (i + 1) % PERIOD == 0 or i == n_layer - 1 else SLIDING for i in range(n_layer)]


def _layer_hf(
    text: Fields, index: int, kind: str, override: Fields, kv_from: int | None
) -> LayerSpec:
    if kind not in (SLIDING, FULL):
        raise InputError(
            f"config.json: layer_types[{index}]", found=kind, expected=f"{SLIDING} or {FULL}"
        )
    full, shared = kind == FULL, kv_from is not None
    k_eq_v = full and text.get(bool, "attention_k_eq_v", False)
    head_dim = text.positive("head_dim", 256)
    n_kv = text.positive("num_key_value_heads")
    if full:
        default = head_dim if text.has("per_layer_config") else HEAD_DIM_FULL
        head_dim = text.positive("global_head_dim", default)
    if k_eq_v:
        n_kv = text.positive("num_global_key_value_heads", n_kv)
    base, partial = _rope(text.sub("rope_parameters"), kind)
    n_ff = text.positive("intermediate_size")
    moe = text.get(bool, "enable_moe_block", False)
    return LayerSpec(
        index=index,
        window=None if full else text.positive("sliding_window"),
        n_head=text.positive("num_attention_heads"),
        n_kv=override.positive("num_key_value_heads", n_kv),
        head_dim=override.positive("head_dim", head_dim),
        n_ff=2 * n_ff if shared and text.get(bool, "use_double_wide_mlp", False) else n_ff,
        rope_base=base,
        rope_partial=partial,
        v_from_k=k_eq_v and not shared,
        kv_from=kv_from,
        n_ple=_count(text, "hidden_size_per_layer_input"),
        n_expert=text.positive("num_experts") if moe else 0,
        n_expert_used=text.positive("top_k_experts", most=MAX_EXPERTS_USED) if moe else 0,
        n_ff_expert=text.positive("moe_intermediate_size") if moe else 0,
    )


def shared_kv(sliding: Sequence[bool], n_shared: int) -> list[int | None]:
    """Return for each layer the one whose KV cache it reads, None for its own. The last `n_shared`
    layers read the last earlier layer of their kind."""
    n_own = len(sliding) - n_shared
    own = list(sliding[: max(n_own, 0)])
    if n_shared and set(own) != set(sliding):
        raise InputError(
            "shared KV layers need an earlier layer of each kind to read from",
            expected=f"fewer than {n_shared} of {len(sliding)} layers",
            found=n_shared,
        )
    last = {kind: n_own - 1 - own[::-1].index(kind) for kind in set(own)}
    return [None if i < n_own else last[kind] for i, kind in enumerate(sliding)]


def _count(f: Fields, key: str) -> int:
    """Return a count that may be missing, null or 0."""
    value = f.get(int, key, 0)
    if value < 0:
        raise InputError(f"{f.where}: {f.prefix + key}", expected=">= 0", found=value)
    return value


def _rope(rope: Fields, kind: str) -> tuple[float, float]:
    """Parse RoPE base and rotated fraction of a kind of layer. Defaults apply only if
    `rope_parameters` is missing, as in transformers; unknown keys are refused."""
    full = kind == FULL
    if not rope.raw:
        return (1e6, 0.25) if full else (1e4, 1.0)
    rope.reject_unknown(SLIDING, FULL)
    f = rope.sub(kind)
    f.reject_unknown("rope_type", "rope_theta", "partial_rotary_factor", "factor")
    f.require("factor", (None, 1, 1.0), None)
    if not full:
        f.require("partial_rotary_factor", (None, 1, 1.0), None)
    rope_type = f.raw.get("rope_type", "proportional" if full else "default")
    if rope_type != ("proportional" if full else "default"):
        raise Unsupported(
            f"config.json: rope_type {rope_type!r} on {'full' if full else 'sliding'} layers"
        )
    return f.get(float, "rope_theta"), f.get(float, "partial_rotary_factor", 1.0)


def parse_gguf(
    kv: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], arch: str = GEMMA4
) -> Config:
    """Parse hyperparameters from GGUF metadata and tensor shapes (PyTorch order)."""
    f = Fields(kv, "GGUF metadata", f"{arch}.")
    f.require_plain_positions()
    n_layer = f.layers("block_count")
    sliding = f.list(bool, "attention.sliding_window_pattern")
    if len(sliding) != n_layer:
        raise InputError(
            f"GGUF metadata: {arch}.attention.sliding_window_pattern",
            expected=f"{n_layer} entries",
            found=len(sliding),
        )
    if fused := [name for name in tensors if ".attn_qkv." in name]:
        raise Unsupported(
            f"tensor {fused[0]} cannot be divided into queries, keys and values",
            expected="a matrix of them, beside `attn_output` and without one of its parts",
            fix="convert the checkpoint again with a tensor for each",
        )
    # An assistant's layers all share: with its target, and not with each other.
    n_shared = _count(f, "attention.shared_kv_layers") if arch == GEMMA4 else 0
    sources = shared_kv(sliding, n_shared)
    # One choice for all full layers, as in the configuration; sliding layers have values of their
    # own. So a layer that lacks them among others that have them is a file that lacks a tensor.
    k_eq_v = arch == GEMMA4 and not any(
        f"blk.{i}.attn_v.weight" in tensors for i, s in enumerate(sliding) if not s
    )
    return Config(
        n_vocab=(tensors.get("token_embd.weight") or (0,))[0],
        n_embd=f.positive("embedding_length"),
        n_ctx=f.positive("context_length"),
        eps=f.get(float, "attention.layer_norm_rms_epsilon"),
        softcap=f.get(float, "final_logit_softcapping", 0.0),
        layers=tuple(
            _layer_gguf(f, tensors, i, s, sources[i], k_eq_v and not s)
            for i, s in enumerate(sliding)
        ),
        arch=arch,
        own_head=arch == GEMMA4 and "output.weight" in tensors,
    )


def _layer_gguf(
    f: Fields, tensors: Mapping[str, Any], i: int, sliding: bool, kv_from: int | None, k_eq_v: bool
) -> LayerSpec:
    b, swa = f"blk.{i}.", "_swa" if sliding else ""
    moe = _count(f, "expert_count") > 0
    return LayerSpec(
        index=i,
        window=f.positive("attention.sliding_window") if sliding else None,
        n_head=f.positive("attention.head_count"),
        n_kv=_per_layer(f, "attention.head_count_kv", i),
        head_dim=f.positive(f"attention.key_length{swa}"),
        n_ff=_per_layer(f, "feed_forward_length", i),
        rope_base=f.get(float, "rope.freq_base_swa", 1e4)
        if sliding
        else f.get(float, "rope.freq_base"),
        rope_partial=1.0
        if sliding
        else Fields(f.raw, f.where, "g4spec.").get(float, "rope_partial", 0.25),
        v_from_k=k_eq_v and kv_from is None,
        kv_from=kv_from,
        n_ple=_count(f, "embedding_length_per_layer_input"),
        n_expert=f.positive("expert_count") if moe else 0,
        n_expert_used=f.positive("expert_used_count", most=MAX_EXPERTS_USED) if moe else 0,
        n_ff_expert=f.positive("expert_feed_forward_length") if moe else 0,
        split_experts=moe and f"{b}ffn_gate_up_exps.weight" not in tensors,
    )


def _per_layer(f: Fields, key: str, index: int) -> int:
    if not isinstance(f.raw.get(f.prefix + key), list):
        return f.positive(key)
    values, n_layer = f.list(int, key), f.positive("block_count")
    if len(values) != n_layer:
        raise InputError(
            f"{f.where}: {f.prefix + key}", expected=f"{n_layer} entries", found=len(values)
        )
    return Fields({key: values[index]}, f.where).positive(key)


def samples(config: Config) -> tuple[LayerSpec, LayerSpec]:
    """Return a global and a sliding layer, which represent all layers of their kind."""
    full = next((s for s in config.layers if s.window is None), None)
    swa = next((s for s in config.layers if s.window is not None), None)
    if full is None or swa is None:
        raise Unsupported("a Gemma 4 model needs sliding and full attention layers")
    return full, swa


def metadata(config: Config) -> KV:
    """Return the keys that upstream's converter writes for this architecture, with its value
    types."""
    a, layers = f"{config.arch}.", config.layers
    full, swa = samples(config)
    widths = [s.n_ff for s in layers]
    kv: KV = {
        f"{a}context_length": u32(config.n_ctx),
        f"{a}embedding_length": u32(config.n_embd),
        f"{a}block_count": u32(len(layers)),
        f"{a}feed_forward_length": array(ValueType.I32, widths)
        if len(set(widths)) > 1
        else u32(widths[0]),
        f"{a}attention.head_count": u32(layers[0].n_head),
        f"{a}attention.head_count_kv": array(ValueType.I32, [s.n_kv for s in layers]),
        f"{a}attention.layer_norm_rms_epsilon": f32(config.eps),
        f"{a}attention.key_length": u32(full.head_dim),
        f"{a}attention.value_length": u32(full.head_dim),
        f"{a}attention.key_length_swa": u32(swa.head_dim),
        f"{a}attention.value_length_swa": u32(swa.head_dim),
        f"{a}attention.sliding_window": u32(swa.window or 0),
        f"{a}attention.sliding_window_pattern": array(
            ValueType.BOOL, [s.window is not None for s in layers]
        ),
        f"{a}attention.shared_kv_layers": u32(sum(s.kv_from is not None for s in layers)),
        f"{a}embedding_length_per_layer_input": u32(config.n_ple),
        f"{a}rope.freq_base": f32(full.rope_base),
        f"{a}rope.freq_base_swa": f32(swa.rope_base),
        f"{a}rope.dimension_count": u32(full.head_dim),
        f"{a}rope.dimension_count_swa": u32(swa.head_dim),
    }
    if layers[0].n_expert:
        kv[f"{a}expert_count"] = u32(layers[0].n_expert)
        kv[f"{a}expert_used_count"] = u32(layers[0].n_expert_used)
        kv[f"{a}expert_feed_forward_length"] = u32(layers[0].n_ff_expert)
    if config.arch == GEMMA4:  # upstream caps at 30 where the key is missing
        kv[f"{a}final_logit_softcapping"] = f32(config.softcap)
    if full.rope_partial != 0.25:
        kv["g4spec.rope_partial"] = f32(full.rope_partial)
    return {"general.architecture": string(config.arch), **kv}
