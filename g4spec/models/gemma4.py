"""Gemma 4 dense text targets, GGUF architecture `gemma4`.

Sources: transformers `models/gemma4` (configuration, forward), llama.cpp `conversion/gemma.py` and
`src/models/gemma4.cpp` (names and keys).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from g4spec.errors import InputError, Unsupported
from g4spec.gguf import KV, array, f32, string, u32
from g4spec.gguf import T as GT
from g4spec.models.fields import Fields
from g4spec.models.spec import CacheShape, Checkpoint, Drop, LayerSpec, TensorSpec

if TYPE_CHECKING:
    import torch

    from g4spec.runtime.kv import LayerKV
    from g4spec.runtime.ops import Ops

ARCH = "gemma4"
TITLE = "Gemma 4 target"
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
ARCHITECTURES = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")

DROPS = (
    Drop(r"(.*\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
         "vision and audio are not part of a text GGUF"),
    Drop(r"(model\.)?lm_head\.weight", "tied to the token table", "embed_tokens.weight"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    """Hyperparameters of a dense Gemma 4 text model.

    Attributes:
        n_ctx: trained positions. `softcap`: final logits are cap * tanh(z / cap); 0 is none.
        shared_kv: trailing layers that reuse an earlier layer's keys and values.
    """

    n_vocab: int
    n_embd: int
    n_ctx: int
    eps: float
    softcap: float
    layers: tuple[LayerSpec, ...]
    arch: str = ARCH

    @property
    def embed_scale(self) -> float:
        return math.sqrt(self.n_embd)

    def donor(self, sliding: bool) -> int:
        """Index of the last layer of a kind: whose keys and values an assistant reads."""
        return max(i for i, spec in enumerate(self.layers) if (spec.window is not None) == sliding)


def claims(checkpoint: Checkpoint) -> bool:
    """Whether the folder holds a Gemma 4 target, judged by its configuration."""
    return any(a in ARCHITECTURES for a in checkpoint.config.get("architectures") or ())


def parse_hf(checkpoint: Checkpoint) -> Config:
    """Hyperparameters from `config.json`, nested under `text_config` or flat."""
    raw = checkpoint.config
    text = Fields(raw.get("text_config") or raw, "config.json")
    _refuse_unsupported(text)
    return Config(
        n_vocab=text.positive("vocab_size"),
        n_embd=text.positive("hidden_size"),
        n_ctx=text.positive("max_position_embeddings", 131072),
        eps=text.get(float, "rms_norm_eps", 1e-6),
        softcap=text.get(float, "final_logit_softcapping", 0.0),
        layers=layers_hf(text),
    )


def _refuse_unsupported(text: Fields) -> None:
    text.require("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    text.require("attention_bias", (False,), False)
    for key, name in (
        ("enable_moe_block", "mixture of experts"),
        ("hidden_size_per_layer_input", "per-layer embeddings"),
        ("num_kv_shared_layers", "shared KV layers"),
    ):
        if text.raw.get(key):
            raise Unsupported(f"{text.where}: {name} ({key}={text.raw[key]}) is not supported yet")


def layers_hf(text: Fields) -> tuple[LayerSpec, ...]:
    """Per-layer facts; takes `global_head_dim` and friends or `per_layer_config`."""
    n_layer = text.layers("num_hidden_layers")
    types = text.list(str, "layer_types")
    if len(types) != n_layer:
        raise InputError("config.json: layer_types", expected=n_layer, found=len(types))
    overrides = {int(k): v for k, v in text.get(dict, "per_layer_config", {}).items()}
    rope = text.get(dict, "rope_parameters", {})
    n_kv = text.positive("num_key_value_heads")
    out = []
    for i, kind in enumerate(types):
        if kind not in ("sliding_attention", "full_attention"):
            raise InputError(f"config.json: layer_types[{i}]", found=kind,
                             expected="sliding_attention or full_attention")  # fmt: skip
        full = kind == "full_attention"
        k_eq_v = full and text.get(bool, "attention_k_eq_v", False)
        head_dim, kv_heads = text.positive("head_dim", 256), n_kv
        if full:
            head_dim = text.positive("global_head_dim", head_dim)
            if k_eq_v:
                kv_heads = text.positive("num_global_key_value_heads", n_kv)
        head_dim = int(overrides.get(i, {}).get("head_dim", head_dim))
        kv_heads = int(overrides.get(i, {}).get("num_key_value_heads", kv_heads))
        base, partial = _rope(rope.get(kind) or {}, full)
        out.append(
            LayerSpec(
                index=i,
                window=None if full else text.positive("sliding_window"),
                n_head=text.positive("num_attention_heads"),
                n_kv=kv_heads,
                head_dim=head_dim,
                n_ff=text.positive("intermediate_size"),
                rope_base=base,
                rope_partial=partial,
                v_from_k=k_eq_v,
            )
        )
    return tuple(out)


def _rope(raw: Mapping[str, Any], full: bool) -> tuple[float, float]:
    kind = raw.get("rope_type", "proportional" if full else "default")
    if kind != ("proportional" if full else "default"):
        raise Unsupported(
            f"config.json: rope_type {kind!r} on {'full' if full else 'sliding'} layers"
        )
    partial = float(raw.get("partial_rotary_factor", 0.25)) if full else 1.0
    return float(raw.get("rope_theta", 1e6 if full else 1e4)), partial


def parse_gguf(
    kv: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], arch: str = ARCH
) -> Config:
    """Hyperparameters from GGUF metadata and tensor shapes (PyTorch order)."""
    f = Fields(kv, "GGUF metadata", f"{arch}.")
    n_layer = f.layers("block_count")
    sliding = f.list(bool, "attention.sliding_window_pattern")
    if len(sliding) != n_layer:
        raise InputError(f"GGUF metadata: {arch}.attention.sliding_window_pattern",
                         expected=f"{n_layer} entries", found=len(sliding))  # fmt: skip
    if f.get(int, "embedding_length_per_layer_input", 0):
        raise Unsupported("per-layer embeddings (Gemma 4 E2B, E4B) are not supported yet")
    if any(".ffn_gate_inp." in name for name in tensors):
        raise Unsupported("mixture of experts (Gemma 4 26B-A4B) is not supported yet")
    if arch == ARCH and f.get(int, "attention.shared_kv_layers", 0):
        raise Unsupported("shared KV layers (Gemma 4 E2B, E4B) are not supported yet")
    n_head = f.positive("attention.head_count")
    partial = f.raw.get("g4spec.rope_partial", 0.25)
    layers = tuple(
        LayerSpec(
            index=i,
            window=f.positive("attention.sliding_window") if s else None,
            n_head=n_head,
            n_kv=_per_layer(f, "attention.head_count_kv", i, n_layer),
            head_dim=f.positive("attention.key_length_swa" if s else "attention.key_length"),
            n_ff=_per_layer(f, "feed_forward_length", i, n_layer),
            rope_base=f.get(float, "rope.freq_base_swa" if s else "rope.freq_base",
                            1e4 if s else 1e6),
            rope_partial=1.0 if s else float(partial),
            v_from_k=arch == ARCH and f"blk.{i}.attn_v.weight" not in tensors,
        )
        for i, s in enumerate(sliding)
    )  # fmt: skip
    table = tensors.get("token_embd.weight", (0, 0))
    return Config(
        n_vocab=table[0],
        n_embd=f.positive("embedding_length"),
        n_ctx=f.positive("context_length"),
        eps=f.get(float, "attention.layer_norm_rms_epsilon"),
        softcap=f.get(float, "final_logit_softcapping", 0.0),
        layers=layers,
        arch=arch,
    )


def _per_layer(f: Fields, key: str, index: int, n_layer: int) -> int:
    value = f.raw.get(f.prefix + key)
    if isinstance(value, list):
        if len(value) != n_layer:
            raise InputError(f"{f.where}: {f.prefix + key}", expected=f"{n_layer} entries",
                             found=len(value))  # fmt: skip
        return int(value[index])
    return f.positive(key)


def _samples(config: Config) -> tuple[LayerSpec, LayerSpec]:
    """A full and a sliding layer: layers of one kind differ in nothing but their index."""
    full = next((s for s in config.layers if s.window is None), None)
    swa = next((s for s in config.layers if s.window is not None), None)
    if full is None or swa is None:
        raise Unsupported("a Gemma 4 model needs sliding and full attention layers")
    return full, swa


def metadata(config: Config) -> KV:
    """The keys that upstream's converter writes for this architecture, with its value types."""
    a, layers = f"{config.arch}.", config.layers
    full, swa = _samples(config)
    kv: KV = {
        f"{a}context_length": u32(config.n_ctx),
        f"{a}embedding_length": u32(config.n_embd),
        f"{a}block_count": u32(len(layers)),
        f"{a}feed_forward_length": u32(layers[0].n_ff),
        f"{a}attention.head_count": u32(layers[0].n_head),
        f"{a}attention.head_count_kv": array(GT.I32, [s.n_kv for s in layers]),
        f"{a}attention.layer_norm_rms_epsilon": f32(config.eps),
        f"{a}attention.key_length": u32(full.head_dim),
        f"{a}attention.value_length": u32(full.head_dim),
        f"{a}attention.key_length_swa": u32(swa.head_dim),
        f"{a}attention.value_length_swa": u32(swa.head_dim),
        f"{a}attention.sliding_window": u32(swa.window or 0),
        f"{a}attention.sliding_window_pattern": array(
            GT.BOOL, [s.window is not None for s in layers]
        ),
        f"{a}attention.shared_kv_layers": u32(0),
        f"{a}embedding_length_per_layer_input": u32(0),
        f"{a}rope.freq_base": f32(full.rope_base),
        f"{a}rope.freq_base_swa": f32(swa.rope_base),
        f"{a}rope.dimension_count": u32(full.head_dim),
        f"{a}rope.dimension_count_swa": u32(swa.head_dim),
    }
    if config.softcap:
        kv[f"{a}final_logit_softcapping"] = f32(config.softcap)
    if full.rope_partial != 0.25:
        kv["g4spec.rope_partial"] = f32(full.rope_partial)
    return {"general.architecture": string(config.arch), **kv}


def layer_tensors(spec: LayerSpec, n_embd: int, own_kv: bool = True) -> list[TensorSpec]:
    """One layer, in file order. `own_kv` is false in assistants, which have no K and V."""
    i, hd, e = spec.index, spec.head_dim, n_embd
    q, k = spec.n_head * hd, spec.n_kv * hd

    def t(name: str, shape: tuple[int, ...], source: str, vector: bool = False) -> TensorSpec:
        return TensorSpec(f"blk.{i}.{name}.weight", shape, "vector" if vector else "matrix",
                          f"layers.{i}.{source}")  # fmt: skip

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
        t("layer_output_scale", (1,), "layer_scalar", True),
    ]
    if own_kv:
        out[2:2] = [t("attn_k", (k, e), "self_attn.k_proj.weight")]
        out[4:4] = [t("attn_k_norm", (hd,), "self_attn.k_norm.weight", True)]
        if not spec.v_from_k:
            out[3:3] = [t("attn_v", (k, e), "self_attn.v_proj.weight")]
    return out


def rope_tensor(config: Config) -> TensorSpec:
    """Divisors of the global layers' rotation: ones, then 1e30 for pairs that stay."""
    full, _ = _samples(config)
    return TensorSpec("rope_freqs.weight", (full.head_dim // 2,), "vector", None, "rope_freqs")


def tensors(config: Config) -> list[TensorSpec]:
    """Every tensor of the GGUF file, in order."""
    out = [
        TensorSpec("token_embd.weight", (config.n_vocab, config.n_embd), "embed",
                   "embed_tokens.weight"),
        rope_tensor(config),
    ]  # fmt: skip
    for spec in config.layers:
        out += layer_tensors(spec, config.n_embd)
    out.append(TensorSpec("output_norm.weight", (config.n_embd,), "vector", "norm.weight"))
    return out


def caches(config: Config) -> list[CacheShape]:
    """What each layer's cache holds."""
    return [CacheShape(s.n_kv, s.head_dim, s.window) for s in config.layers]


class Model:
    """The forward pass. Weights are whatever `ops.load` returns, by GGUF name."""

    def __init__(self, config: Config, weights: Mapping[str, Any], ops: Ops) -> None:
        self.config, self.w, self.ops = config, weights, ops
        divisors = weights["rope_freqs.weight"]
        self._freqs = [
            ops.rope_freqs(s.rope_base, s.head_dim, divisors if s.window is None else None)
            for s in config.layers
        ]

    def embed(self, ids: torch.Tensor, *, scaled: bool) -> torch.Tensor:
        """Token rows [T] -> [T, H], times sqrt(H) if `scaled`."""
        scale = self.config.embed_scale if scaled else 1.0
        return self.ops.embed(self.w["token_embd.weight"], ids, scale)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        kv: list[LayerKV],
        taps: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run tokens `ids` [T] at consecutive `positions` [T], appending to `kv`.

        Returns:
            The final-norm output [T, H], and the residual entering each layer of `taps`, [T, H]
            (index n_layer is what leaves the last layer, before the final norm).
        """
        x = self.embed(ids, scaled=True)
        tapped = {}
        for spec in self.config.layers:
            if spec.index in taps:
                tapped[spec.index] = x
            x = self._layer(spec, x, positions, kv[spec.index])
        if len(self.config.layers) in taps:
            tapped[len(self.config.layers)] = x
        return self.ops.rms_norm(x, self.w["output_norm.weight"], self.config.eps), tapped

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [T, H] after the final norm -> raw logits [T, V]."""
        return self.ops.linear(hidden, self.w.get("output.weight", self.w["token_embd.weight"]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`head` with the final softcap."""
        z = self.head(hidden)
        return self.ops.softcap(z, self.config.softcap) if self.config.softcap else z

    def _layer(
        self, spec: LayerSpec, x: torch.Tensor, positions: torch.Tensor, kv: LayerKV
    ) -> torch.Tensor:
        ops, eps, b = self.ops, self.config.eps, f"blk.{spec.index}."
        w = self.w
        h = ops.rms_norm(x, w[b + "attn_norm.weight"], eps)
        self._append(spec, h, positions, kv)
        q = ops.heads(h, w[b + "attn_q.weight"], w[b + "attn_q_norm.weight"], spec.head_dim, eps)
        q = ops.rope(q, positions, self._freqs[spec.index])
        first = positions * 0 if spec.window is None else (positions - spec.window + 1).clamp(min=0)
        h = ops.linear(ops.attend(q, kv, first, positions, 1.0), w[b + "attn_output.weight"])
        return sandwich(ops, w, b, x, h, eps)

    def _append(
        self, spec: LayerSpec, h: torch.Tensor, positions: torch.Tensor, kv: LayerKV
    ) -> None:
        ops, eps, b, w = self.ops, self.config.eps, f"blk.{spec.index}.", self.w
        k = ops.linear(h, w[b + "attn_k.weight"]).view(len(h), spec.n_kv, spec.head_dim)
        v = k
        if not spec.v_from_k:
            v = ops.linear(h, w[b + "attn_v.weight"]).view(len(h), spec.n_kv, spec.head_dim)
        k = ops.rope(ops.rms_norm(k, w[b + "attn_k_norm.weight"], eps), positions,
                     self._freqs[spec.index])  # fmt: skip
        kv.append(int(positions[0]), k, ops.rms_norm(v, None, eps))


def sandwich(
    ops: Ops, w: Mapping[str, Any], b: str, x: torch.Tensor, h: torch.Tensor, eps: float
) -> torch.Tensor:
    """The rest of a Gemma 4 layer after attention `h` [T, H] on residual `x` [T, H]."""
    x = ops.norm_residual(h, x, w[b + "post_attention_norm.weight"], eps)
    h = ops.rms_norm(x, w[b + "ffn_norm.weight"], eps)
    h = ops.gated(h, w[b + "ffn_gate.weight"], w[b + "ffn_up.weight"], w[b + "ffn_down.weight"],
                  ops.gelu_tanh)  # fmt: skip
    x = ops.norm_residual(h, x, w[b + "post_ffw_norm.weight"], eps)
    scale = w.get(b + "layer_output_scale.weight")
    return x if scale is None else x * scale
