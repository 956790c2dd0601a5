"""Queries g4spec's own runtime: which files it can run, and how much GPU memory they take."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from g4spec import models
from g4spec.advisor.schema import SizeFact
from g4spec.convert import sources
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF
from g4spec.gguf.header import TensorInfo
from g4spec.models import gemma4, ngram, ollama
from g4spec.models.spec import Checkpoint
from g4spec.models.upstream import REFUSED_SUFFIX
from g4spec.quant import get, policy, readable
from g4spec.runtime.cuda.cache.cache_types import KINDS
from g4spec.runtime.cuda.weights.held_size import block_bytes, tensor_bytes, unpackable

VOCABULARY = 262144
"""Tokens of every Gemma 4."""

OTHER_MIXES = {"iq2_m": "iq2_s", "iq3_xs": "iq3_s", "iq3_m": "iq3_s", "q8_k": "q8_0"}
"""Names of published mixes that `quantize` does not write and whose name is not that of a type ->
the type of most of their matrices. Three are llama.cpp's; unsloth's Q8_K_XL is mostly Q8_0."""


def refusal(file: GGUF, kind: ModuleType) -> str:
    """Return why the runtime cannot run a GGUF of this kind, or "": a tensor type without a
    decoder, or metadata that its parser does not support. `g4spec validate` finds other damage."""
    forms = {t.format for t in file.tensors.values()}
    unread = sorted(f.name.upper() for f in forms if f.decode is None and f.stored is None)
    if unread:
        return f"it has no code for tensors in {', '.join(unread)}"
    try:
        kind.parse_gguf(file.kv, file.shapes())
    except Unsupported as problem:
        return str(problem)
    except InputError:
        return ""
    return ""


def target_config(size: SizeFact) -> gemma4.Config:
    """Return the configuration of a target of a published size."""
    n = size.sliding + size.full
    every = n // size.full
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_hidden_layers": n,
        "num_key_value_heads": size.kv_sliding,
        "num_global_key_value_heads": size.kv_full,
        # Global layers with heads of their own have values equal to their keys.
        "attention_k_eq_v": size.kv_full != size.kv_sliding,
        "global_head_dim": 512,
        "layer_types": [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(n)
        ],
        "sliding_window": size.window,
        "intermediate_size": size.ff,
        "use_double_wide_mlp": size.double_wide,
        "enable_moe_block": size.moe,
        "num_kv_shared_layers": n - size.own_sliding - size.own_full,
        "hidden_size_per_layer_input": 256 if size.own_sliding < size.sliding else 0,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    if size.moe:
        config |= {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    return gemma4.parse_hf(Checkpoint(config, {}))


def file_bytes(size: SizeFact, type: str) -> int:
    """Return the bytes of the tensors that `g4spec quantize` writes for a published size and a
    `--type`; 0 for a size that the runtime does not support."""
    with suppress(InputError, Unsupported):
        specs = list(gemma4.tensors(target_config(size)))
        chooser = policy.Policy(policy.parse_type(type), {t.name: t.shape for t in specs})
        forms = [chooser.choose(t.name, t.shape, t.role)[0] for t in specs]
        return sum(
            math.prod(t.shape) * f.block_bytes // f.block for t, f in zip(specs, forms, strict=True)
        )
    return 0


def refused_upstream(folder: Path, target: Path | SizeFact) -> bool:
    """Return True if a checkpoint of a draft converts to a file that llama.cpp must refuse.

    Args:
        target: its target: a local file or folder, or a published size.
    """
    with suppress(InputError):
        found = sources.detect(folder)
        if isinstance(found.source, sources.CheckpointFolder):
            whose = target_config(target) if isinstance(target, SizeFact) else _local_config(target)
            config = found.kind.parse_hf(found.source.checkpoint, whose)
            return str(config.arch).endswith(REFUSED_SUFFIX)
    return False


def _local_config(path: Path) -> Any:
    """Return the configuration of a local target."""
    found = sources.detect(path, weights=False)
    if isinstance(found.source, GGUF):
        with found.source as file:
            return found.kind.parse_gguf(file.kv, file.shapes())
    return found.kind.parse_hf(found.source.checkpoint)


def draft_kinds() -> tuple[str, ...]:
    """Return the kinds of drafts that this version runs, by their names in the facts."""
    kinds = ["mtp" if name == "gemma4-assistant" else name for name in models.drafts()]
    return (*kinds, ngram.Drafter.name)


def cache_types() -> tuple[str, ...]:
    """Return the cache types that the GPU runtime supports."""
    return tuple(KINDS)


def weight_bytes(file: GGUF) -> int:
    """Return the bytes that the weights of a file take in GPU memory."""
    return sum(map(tensor_bytes, ollama.text_tensors(file).values()))


def repacked_note(file: GGUF) -> str:
    """Describe the quantized matrices whose size in GPU memory differs from that in the file, or
    return ""."""
    tensors = ollama.text_tensors(file).values()
    matrices = [t for t in tensors if t.format.quantized and len(t.shape) > 1]
    other = [t for t in matrices if tensor_bytes(t) != t.nbytes]
    floats = [t for t in other if unpackable(t.format.name, t.shape[-1], t.shape[-2], False)]
    rewritten = [t for t in other if t not in floats]
    parts = [
        _sizes_text(rewritten, "codes of 3 or 4 bits, the same values"),
        _sizes_text(floats, "float32, because no CUDA kernel reads this type or width"),
    ]
    return "; ".join(p for p in parts if p)


def _sizes_text(tensors: list[TensorInfo], how: str) -> str:
    """Describe the size of some tensors in GPU memory and in the file; "" without tensors."""
    if not tensors:
        return ""
    types = ", ".join(sorted({t.format.name.upper() for t in tensors}))
    held, stored = sum(map(tensor_bytes, tensors)) / 1e9, sum(t.nbytes for t in tensors) / 1e9
    return f"on a GPU g4spec holds {types} tensors in {held:.2f} GB instead of {stored:.2f}: {how}"


def base_type(name: str) -> str:
    """Return the type of most matrices in files with a name: that of `Q4_K_XL` is q4_k, that of
    `IQ3_M` iq3_s; "" for an unknown name."""
    low = name.lower()
    for part in (low, low.rsplit("_", 1)[0]):
        if (type := OTHER_MIXES.get(part, part)) in readable():
            return type
    return ""


def gpu_bytes(type: str, nbytes: int) -> int:
    """Convert bytes in a file of a weight format (`IQ3_S`, `Q3_K_M`) to bytes in GPU memory."""
    name = base_type(type.rsplit("-", 1)[-1])
    return nbytes * block_bytes(name) // get(name).block_bytes if name else nbytes


def mix_note(file: GGUF) -> str:
    """Describe a mix of types, as `12.3 GB Q4_K, 2.1 GB Q6_K`; "" for a single type."""
    held: dict[str, int] = {}
    for t in ollama.text_tensors(file).values():
        held[t.format.name.upper()] = held.get(t.format.name.upper(), 0) + t.nbytes
    large = [(n, name) for name, n in held.items() if n > max(held.values()) / 100]
    if len(large) < 2:
        return ""
    return "it holds " + ", ".join(f"{n / 1e9:.2f} GB {name}" for n, name in sorted(large)[::-1])
