"""Reads sizes and shapes of targets and drafts from checkpoint folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from g4spec import models
from g4spec.advisor import named_models, runtime_support
from g4spec.advisor.facts import Facts
from g4spec.advisor.like_published import (
    EAGLE3_LENGTH,
    SHORT,
    check_sizes,
    new_draft,
    published_draft,
    size_like,
    with_row,
)
from g4spec.advisor.named_models import DraftModel, TargetModel, WeightFormat
from g4spec.advisor.schema import SizeFact
from g4spec.convert import quant_methods
from g4spec.core import CacheShape
from g4spec.errors import InputError
from g4spec.gguf import folder_hint, parts, regular_files
from g4spec.models import pairing
from g4spec.models.dflash_backbone import FROM_ANCHOR
from g4spec.models.fields import MAX_LAYERS
from g4spec.models.spec import Checkpoint

ENGINES = ("vllm", "sglang")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(regular_files.read_regular(path))
    except FileNotFoundError:
        raise InputError(
            f"{folder}: not a checkpoint",
            expected="a config.json in it",
            fix=folder_hint(folder),
        ) from None
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{path}: not JSON ({problem})") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: not a JSON object")
    return raw


def _weights(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def _integer(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = text.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"config.json: {key}", expected="a number", found=value)
    return value


def folder_caches(text: Mapping[str, Any]) -> tuple[CacheShape, ...]:
    """Return the cache shapes of a Gemma 4 text configuration."""
    types = text.get("layer_types")
    if not isinstance(types, list):
        raise InputError("config.json: layer_types", expected="a list", found=types)
    shared = text.get("num_kv_shared_layers") or 0
    heads = _integer(text, "num_key_value_heads")
    full_heads = (text.get("attention_k_eq_v") and text.get("num_global_key_value_heads")) or heads
    head = _integer(text, "head_dim", named_models.HEAD_SLIDING)
    full_head = text.get("global_head_dim") or named_models.HEAD_FULL
    window = _integer(text, "sliding_window", 1024)
    # transformers writes what differs from layer to layer under per_layer_config when it saves.
    per_layer = {int(k): v for k, v in (text.get("per_layer_config") or {}).items()}
    out = []
    for i, kind in enumerate(types[: len(types) - int(shared)]):
        full, mine = kind == "full_attention", per_layer.get(i, {})
        n = mine.get("num_key_value_heads", full_heads if full else heads)
        size = mine.get("head_dim", full_head if full else head)
        out.append(CacheShape(int(n), int(size), None if full else window))
    return tuple(out)


def _folder_format(raw: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the name of the weight format, and notes about it."""
    quant = raw.get("quantization_config")
    if not isinstance(quant, dict):
        return str(raw.get("dtype") or raw.get("torch_dtype") or "BF16").upper(), ()
    keys = ("quant_method", "format", "quant_algo", "bits")
    name = " ".join(str(quant[key]) for key in keys if quant.get(key))
    notes: tuple[str, ...] = ()
    if quant.get("kv_cache_scheme"):
        notes = (
            "its configuration asks for an fp8 cache (kv_cache_scheme), which crashes a "
            "DFlash draft on capability 8.9: pass --kv-cache-dtype bfloat16",
        )
    return name or "quantized", notes


def _is_target(architecture: str) -> bool:
    return "Gemma4For" in architecture


def folder_target(facts: Facts, folder: Path, given: str) -> TargetModel:
    """Read a target from a checkpoint folder."""
    raw = _config(folder)
    text = raw.get("text_config") or raw
    if not any(_is_target(str(a)) for a in raw.get("architectures") or ()):
        raise InputError(
            f"{folder}: not a Gemma 4 target",
            expected="Gemma4ForConditionalGeneration",
            found=raw.get("architectures"),
            fix="give a draft with -md, and its target with -m",
        )
    hidden = _integer(text, "hidden_size")
    size = size_like(facts, hidden, len(text.get("layer_types") or ()))
    name, notes = _folder_format(quant_methods.with_own_file(folder, raw))
    return TargetModel(
        title=f"{folder.name} (Gemma 4 {size.name if size else 'of another size'})",
        size=size.id if size else "other",
        given=given,
        formats=(WeightFormat(name, _weights(folder), ENGINES),),
        caches=folder_caches(text),
        context=_integer(text, "max_position_embeddings", 131072),
        hub=size.hub if size else "",
        active=size.active / size.params if size else 1.0,
        moe=bool(text.get("enable_moe_block")),
        is_local=True,
        notes=notes,
    )


def folder_draft(facts: Facts, folder: Path, given: str, of: TargetModel) -> DraftModel:
    """Read a draft of target `of` from a checkpoint folder."""
    raw = _config(folder)
    draft = new_draft(folder, given, of, _weights(folder), gguf=False)
    ggufs = sorted(folder.glob(parts.FILES))
    if ggufs and draft.nbytes:
        draft = replace(
            draft,
            gguf_bytes=ggufs[0].stat().st_size,
            notes=(
                f"{folder.name} holds {ggufs[0].name} and safetensors of "
                f"{draft.nbytes / 1e9:.2f} GB: name the file that you mean, loaders may take the "
                "larger one",
            ),
        )
    claimed = [name for name, m in models.kinds().items() if m.claims(Checkpoint(raw, {}))]
    if "gemma4" in claimed:
        raise models.wrong_role(folder, models.kinds()["gemma4"])
    if not claimed:
        found = raw.get("speculators_model_type") or raw.get("architectures")
        raise InputError(
            f"{folder}: not a draft that g4spec knows",
            found=found,
            expected=", ".join(kind.TITLE for kind in models.drafts().values()),
        )
    check_sizes(facts, folder, pairing.checkpoint_sizes(raw), of, trained=True)
    if "gemma4-assistant" in claimed:
        return with_row(
            replace(draft, kind="mtp", head=512), published_draft(facts, "mtp", "google", of.size)
        )
    kind, nested = claimed[0], "speculators_model_type" in raw
    inner = {} if nested else raw.get("dflash_config") or {}
    block = int(inner.get("block_size") or raw.get("block_size") or (16 if inner else 0))
    whole = kind == "dspark" and raw.get(FROM_ANCHOR, True)  # llama.cpp and vLLM
    n = max(block - (not whole), 0)
    draft = replace(draft, llamacpp_n=EAGLE3_LENGTH if kind == "eagle3" else n)
    if nested:
        methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
        n = int(methods[0].get("speculative_tokens") or 0)
    layer = (raw.get("transformer_layer_config") or {}) if nested else raw
    window = 0
    if inner.get("use_swa"):  # a window for all layers
        window = int(inner.get("swa_window_size") or raw.get("sliding_window") or 0)
    draft = _block_draft(draft, layer, block, n, window)
    layout = "speculators" if nested else "own"
    draft = replace(draft, kind=kind, causal=kind == "eagle3", layout=layout)
    target = Path(of.given) if of.is_local else facts.find(SizeFact, of.size)
    if target is not None and runtime_support.refused_upstream(folder, target):
        draft = replace(draft, engines=("vllm", "sglang", "g4spec"))
    return with_row(draft, published_draft(facts, kind, "redhat" if nested else "zlab", of.size))


def _block_draft(
    draft: DraftModel, layer: Mapping[str, Any], block: int, n: int, window: int
) -> DraftModel:
    """Fill in draft lengths and cache sizes from the draft's own layer configuration. `window`:
    that of all layers; 0: each layer's own."""
    if "global_head_dim" in layer:
        shapes = folder_caches(layer)
    else:
        heads = int(layer.get("num_key_value_heads") or layer.get("num_attention_heads") or 0)
        head = int(layer.get("head_dim") or 128)
        own = layer.get("sliding_window") if layer.get("use_sliding_window") else None
        count = int(layer.get("num_hidden_layers") or 0)
        if not 0 <= count <= MAX_LAYERS:
            raise InputError("config.json: layers", expected=f"0 to {MAX_LAYERS}", found=count)
        types = [*(layer.get("layer_types") or []), *[None] * count][:count]
        slides = (own if t == "sliding_attention" else None for t in types)
        shapes = tuple(CacheShape(heads, head, w or None) for w in slides)
    rows = [(window or c.window, 2 * SHORT * c.n_kv * c.head_dim) for c in shapes]
    return replace(
        draft,
        block=block,
        head=max((c.head_dim for c in shapes), default=0),
        vllm_n=n,
        sglang_n=block,
        kv_token=sum(size for w, size in rows if w is None),
        kv_fixed=sum(size * w for w, size in rows if w is not None),
    )
