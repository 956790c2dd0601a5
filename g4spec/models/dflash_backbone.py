"""GGUF metadata and tensors shared by DFlash, DSpark and DFlash2 drafts.

Layers are Qwen 3's (two norms, SiLU, 1/sqrt(d)) or, in DeepSpec's checkpoints, Gemma 4's (four
norms, output scale, GELU, attention scale 1, values from keys).

Sources: llama.cpp `conversion/qwen.py`, `conversion/gemma.py` (Gemma4DSparkModel) and
`src/models/dflash.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from g4spec.core import MAX_DRAFT, MAX_STEP_ROWS, CacheShape
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF, KV, ValueType, array, boolean, f32, string, u32
from g4spec.models import gemma4
from g4spec.models.fields import Fields
from g4spec.models.spec import QUANTIZED_ACTIVATIONS, Drop, LayerSpec, TensorSpec
from g4spec.models.upstream import REFUSED_SUFFIX, Limit

ARCH = "dflash"
ARCHS = (ARCH, ARCH + REFUSED_SUFFIX)
PREFIXES = ("model.", "")
DROPS = (
    QUANTIZED_ACTIVATIONS,
    Drop(r"t2d", "a mask with the same information as d2t; its digest is kept"),
    Drop(r"verifier_(norm|lm_head)\..*", "a copy of the target's own tensor"),
    Drop(r"embed_tokens\.weight", "not used, by has_embed_tokens: the target's is"),
)
ROPE_PARTIAL = "g4spec.rope_partial"
FROM_ANCHOR = "sample_from_anchor"
FULL_CAUSAL = "g4spec.dflash.full_layers_causal"
"""Key that records that full layers are causal on purpose, as with JetSpec's head."""
OTHER_SCALE = "g4spec.dflash.embedding_scale"
"""Key that records an embedding scale other than the usual one of the draft's layout."""
SCALE_TOLERANCE = 0.005
"""Relative difference of an embedding scale that rounding to bfloat16 explains."""
GEMMA_MARK = "blk.0.post_attention_norm.weight"


@dataclass(frozen=True, slots=True)
class Config:
    """Hyperparameters of the backbone.

    Attributes:
        target_layers: target layers whose *input* is read, in the order of the columns of `fc`.
        block_size: rows of one pass, including the anchor.
        embed_scale: factor on token rows: sqrt(H) for drafts trained on Gemma's scaled embedding
            (z-lab, DeepSpec), 1 for those trained on the raw table (speculators).
        own_embed, own_head: whether the file has its own token table and output projection;
            otherwise those of the target are used.
        n_draft: number of rows of a head with a reduced vocabulary (`d2t`), or None.
        window_from_anchor: whether the window of a sliding layer is counted from the anchor
            (speculators: W context rows for every row of the block) or from each row (z-lab).
        from_anchor: whether row j of the block predicts the token after its position, so that the
            anchor's row predicts too; otherwise mask rows predict the token at their position.
        gemma: whether layers are Gemma 4's instead of Qwen 3's.
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
    from_anchor: bool = False
    gemma: bool = False
    arch: str = ARCH

    @property
    def n_drafted(self) -> int:
        """Maximum number of tokens of a proposal."""
        return min(self.block_size - (not self.from_anchor), MAX_DRAFT)


C = TypeVar("C", bound=Config)


def shared_causality(layers: Sequence[bool]) -> bool:
    """Return the causality of most layers (causal on a tie), for upstream, which has only one flag.

    A layer made causal only stops attending to later rows. A causal layer made non-causal attends
    to mask tokens that it never saw in training, which costs most of the acceptance. A draft
    trained with two causal layers and a full one gave 3.9 tokens per step at 15 drafted, 3.9 with
    all layers causal, and 2.1 with none (`benchmarks/LOG.md`).
    """
    return 2 * sum(layers) >= len(layers)


LIMITS = (
    Limit(
        "differs",
        "causal and non-causal layers",
        "uses the causality of most layers for all",
        lambda c: len({s.causal for s in c.layers}) > 1,
    ),
    Limit(
        "differs",
        "a window counted from the anchor",
        "counts it from each row of the block",
        lambda c: c.window_from_anchor and any(s.window for s in c.layers),
    ),
)
"""Limits of every draft with this backbone."""


def extended(kind: type[C], base: Config, **more: Any) -> C:
    """Return a `kind` with the fields of `base` and `more`."""
    return kind(**({f.name: getattr(base, f.name) for f in fields(base)} | more))


def check_pair(config: Config, target: Any) -> None:
    """Raise unless the draft's shapes and layer ids match this target (its gemma4.Config)."""
    check_target("hidden size", config.n_embd, config, target)
    if config.n_drafted < 1:
        raise InputError(
            "block_size of the draft, the anchor included",
            expected="2 or more",
            found=config.block_size,
        )
    if config.block_size > MAX_STEP_ROWS:
        raise Unsupported(
            f"a block of {config.block_size} rows: a step has at most {MAX_DRAFT} drafted tokens"
        )


def require_head(tensors: Container[str]) -> None:
    """Raise InputError if the file has a map of a reduced head (d2t) but not the head."""
    if "d2t" in tensors and "output.weight" not in tensors:
        raise InputError(
            "tensor output.weight is missing, but d2t maps its rows to tokens",
            fix="convert the draft again",
        )


def token_ids(config: Config, file: GGUF) -> dict[str, Any]:
    """Return metadata key -> token ids stored in metadata."""
    return {"tokenizer.ggml.mask_token_id": [config.mask_token]}


def check_target(what: str, n_embd: int, config: Any, target: Any) -> None:
    """Raise InputError unless the target has the hidden size `n_embd`, which an error calls `what`,
    and the vocabulary and the layers that the draft's `config` asks for."""
    fix = "pass the target this draft was trained for"
    for name, found, expected in (
        (what, n_embd, target.n_embd),
        ("vocabulary", config.n_vocab, target.n_vocab),
    ):
        if found != expected:
            raise InputError(
                f"the draft's {name} must equal its target's",
                expected=expected,
                found=found,
                fix=fix,
            )
    n_layer = len(target.layers)
    if not all(1 <= i <= n_layer for i in config.target_layers):
        raise InputError(
            "the draft reads target layers that do not exist",
            expected=f"layer inputs 1..{n_layer}",
            found=list(config.target_layers),
            fix=fix,
        )


def parse_gguf(kv: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Config:
    """Parse GGUF metadata and tensor shapes (PyTorch order)."""
    arch = str(kv.get("general.architecture", ARCH))
    f = Fields(kv, "GGUF metadata", f"{arch}.")
    own = Fields(kv, "GGUF metadata", "g4spec.dflash.")
    d2t = tensors.get("d2t")
    require_head(tensors)
    f.require_plain_positions()
    _require_layers(f, gemma=GEMMA_MARK in tensors)
    return Config(
        n_vocab=f.vocabulary(),
        n_embd=f.positive("embedding_length"),
        n_ctx=f.positive("context_length"),
        eps=f.get(float, "attention.layer_norm_rms_epsilon"),
        softcap=f.get(float, "final_logit_softcapping", 0.0),
        layers=_layers(f, own, tensors),
        target_layers=tuple(f.list(int, "target_layers")),
        block_size=f.positive("block_size", 16),
        mask_token=Fields(kv, "GGUF metadata").get(int, "tokenizer.ggml.mask_token_id"),
        embed_scale=f.get(float, "embedding_scale", 1.0),
        own_embed="token_embd.weight" in tensors,
        own_head="output.weight" in tensors,
        n_draft=d2t[0] if d2t else None,
        window_from_anchor=own.get(bool, "window_from_anchor", False),
        from_anchor=f.get(bool, FROM_ANCHOR, False),
        gemma=GEMMA_MARK in tensors,
        arch=arch,
    )


def _require_layers(f: Fields, *, gemma: bool) -> None:
    """Raise InputError if llama.cpp, by its keys, computes the layers of a file differently."""
    head_dim = f.positive("attention.key_length")
    f.require("attention.value_scale", (None, 0, 1), None)
    f.require("rope.dimension_count", (None, head_dim), None)
    activations = ("gelu_pytorch_tanh", "gelu") if gemma else ("silu",)  # the first two are one
    f.require("hidden_activation", (None, *activations), None)
    scale = 1.0 if gemma else head_dim**-0.5
    found = f.get(float, "attention.scale", scale)
    if not math.isclose(found, scale, rel_tol=1e-6) and (found or gemma):  # 0 is the default
        raise InputError(f"{f.where}: {f.prefix}attention.scale", expected=scale, found=found)


def file_notes(file: GGUF) -> list[str]:
    """Return a remark about a z-lab draft that llama.cpp's converter wrote: it has no keys for two
    settings of theirs."""
    told = (".embedding_scale", f".{FROM_ANCHOR}", ".layer_causal")
    if any(name in file.tensors for name in ("token_embd.weight", "d2t")) or any(
        key.endswith(told) for key in file
    ):
        return []
    return [
        "the draft's file has neither an embedding scale nor the causality of its layers, as "
        "z-lab's drafts that llama.cpp converted: probably fewer tokens are accepted than from "
        "its checkpoint, which `g4spec convert` converts with both"
    ]


def _layers(
    f: Fields, own: Fields, tensors: Mapping[str, tuple[int, ...]]
) -> tuple[LayerSpec, ...]:
    n_layer = f.layers("block_count")
    window = f.get(int, "attention.sliding_window", 0)
    sliding = f.list(bool, "attention.sliding_window_pattern", [False] * n_layer)
    every = f.get(bool, "attention.causal", False)
    causal = own.list(bool, "layer_causal", [every] * n_layer)
    if len(sliding) != n_layer or len(causal) != n_layer:
        raise InputError(
            "GGUF metadata: per-layer arrays must have one entry per layer",
            expected=n_layer,
            found=(len(sliding), len(causal)),
        )
    gemma, partial = GEMMA_MARK in tensors, 1.0
    if "rope_freqs.weight" in tensors:
        partial = Fields(f.raw, f.where).get(float, ROPE_PARTIAL, 0.25)
    return tuple(
        LayerSpec(
            index=i,
            window=window if sliding[i] and window else None,
            n_head=f.positive("attention.head_count"),
            n_kv=f.positive("attention.head_count_kv"),
            head_dim=f.positive("attention.key_length"),
            n_ff=f.positive("feed_forward_length"),
            rope_base=f.get(float, "rope.freq_base", 10000.0),
            rope_partial=partial,
            v_from_k=gemma and f"blk.{i}.attn_v.weight" not in tensors,
            causal=causal[i],
        )
        for i in range(n_layer)
    )


def metadata(config: Config) -> KV:
    """Return upstream's keys, and `g4spec.` keys where upstream has none."""
    layer, a = config.layers[0], f"{config.arch}."
    causal = [s.causal for s in config.layers]
    kv: KV = {
        "general.architecture": string(config.arch),
        **size_keys(config),
        f"{a}block_size": u32(config.block_size),
        f"{a}target_layers": array(ValueType.I32, list(config.target_layers)),
        f"{a}attention.causal": boolean(shared_causality(causal)),
        "tokenizer.ggml.mask_token_id": u32(config.mask_token),
        "g4spec.dflash.layer_causal": array(ValueType.BOOL, causal),
        "g4spec.dflash.window_from_anchor": boolean(config.window_from_anchor),
        **window_keys(config),
    }
    if config.embed_scale != 1.0:
        kv[f"{a}embedding_scale"] = f32(config.embed_scale)
    usual = 1.0 if config.window_from_anchor else math.sqrt(config.n_embd)
    if not math.isclose(config.embed_scale, usual, rel_tol=SCALE_TOLERANCE):
        kv[OTHER_SCALE] = f32(config.embed_scale)
    if any(s.causal and s.window is None for s in config.layers):
        kv[FULL_CAUSAL] = boolean(True)
    if config.softcap:
        kv[f"{a}final_logit_softcapping"] = f32(config.softcap)
    if config.from_anchor:
        kv[a + FROM_ANCHOR] = boolean(True)
    if config.gemma:
        kv[f"{a}attention.scale"] = f32(1.0)
        kv[f"{a}hidden_activation"] = string("gelu_pytorch_tanh")
        if layer.rope_partial not in (0.25, 1.0):
            kv[ROPE_PARTIAL] = f32(layer.rope_partial)
    return kv


def size_keys(config: Any) -> KV:
    """Return the keys with the sizes of a draft whose layers have the same."""
    layer, a = config.layers[0], f"{config.arch}."
    return {
        f"{a}context_length": u32(config.n_ctx),
        f"{a}embedding_length": u32(config.n_embd),
        f"{a}block_count": u32(len(config.layers)),
        f"{a}feed_forward_length": u32(layer.n_ff),
        f"{a}attention.head_count": u32(layer.n_head),
        f"{a}attention.head_count_kv": u32(layer.n_kv),
        f"{a}attention.key_length": u32(layer.head_dim),
        f"{a}attention.value_length": u32(layer.head_dim),
        f"{a}attention.layer_norm_rms_epsilon": f32(config.eps),
        f"{a}rope.freq_base": f32(layer.rope_base),
        f"{a}rope.dimension_count": u32(layer.head_dim),
    }


def window_keys(config: Any) -> KV:
    """Return the keys of sliding windows, if a layer has one."""
    window = next((s.window for s in config.layers if s.window), None)
    if not window:
        return {}
    pattern = array(ValueType.BOOL, [s.window is not None for s in config.layers])
    a = f"{config.arch}.attention."
    return {f"{a}sliding_window": u32(window), f"{a}sliding_window_pattern": pattern}


def tensors(config: Config) -> list[TensorSpec]:
    """Return the tensors of the backbone, in order."""
    e = config.n_embd
    out = [
        TensorSpec("fc.weight", (e, len(config.target_layers) * e), "matrix", "fc.weight"),
        TensorSpec("enc.output_norm.weight", (e,), "vector", "hidden_norm.weight"),
        TensorSpec("output_norm.weight", (e,), "vector", "norm.weight"),
        *tables(config.n_vocab, e, config.own_embed, config.own_head, config.n_draft),
    ]
    layer = config.layers[0]
    if layer.rope_partial != 1.0:
        out.append(
            TensorSpec("rope_freqs.weight", (layer.head_dim // 2,), "vector", None, "rope_freqs")
        )
    for spec in config.layers:
        out += gemma4.layer_tensors(spec, e) if config.gemma else _layer_tensors(spec, e)
    return out


def tables(
    n_vocab: int, n_embd: int, own_embed: bool, own_head: bool, n_draft: int | None
) -> list[TensorSpec]:
    """Return the draft's own token table, head and map of a reduced vocabulary, if it has them."""
    out = []
    if own_embed:
        out.append(
            TensorSpec("token_embd.weight", (n_vocab, n_embd), "embed", "embed_tokens.weight")
        )
    if own_head:
        out.append(
            TensorSpec("output.weight", (n_draft or n_vocab, n_embd), "output", "lm_head.weight")
        )
    if n_draft:
        out.append(TensorSpec("d2t", (n_draft,), "index", "d2t", "absolute_d2t"))
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
        TensorSpec(
            f"blk.{i}.{name}.weight",
            shape,
            "vector" if len(shape) == 1 else "matrix",
            f"layers.{i}.{source}.weight",
        )
        for name, shape, source in rows
    ]


def caches(config: Config, window: int | None) -> list[CacheShape]:
    """Return the cache shape of each layer; `window` bounds layers with full attention."""
    return [CacheShape(s.n_kv, s.head_dim, s.window or window) for s in config.layers]
