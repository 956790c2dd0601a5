"""Make checkpoints of the published sizes without real contents, to measure time and memory.

Used by `conversion.py`, `opening.py` and `huge.py`. The tokenizer has Gemma's 262,144 tokens and
514,906 merges, built from a small alphabet.
"""

import itertools
import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import tiny
from tests.support.tiny_tokenizer import dump, tokenizer

VOCAB, MERGES = 262_144, 514_906
HIDDEN, LAYERS, TAPS = 5376, 60, [1, 12, 23, 35, 46, 57]
DRAFT_BYTES = 3_071_941_240  # model.safetensors of z-lab/gemma-4-31B-it-DFlash
Shapes = dict[str, tuple[int, ...]]


def vocabulary(folder: Path) -> None:
    """Write a tokenizer of Gemma's size: all pairs and most triples of 64 letters, each
    triple merged in both ways."""
    tokenizer(folder, VOCAB)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    model = content["model"]
    letters = [chr(0x4E00 + i) for i in range(64)]
    pairs = [a + b for a, b in itertools.product(letters, repeat=2)]
    triples = ["".join(t) for t in itertools.product(letters, repeat=3)]
    merges = [*model["merges"], *map(list, pairs)]
    for t in triples:
        merges += [[t[:2], t[2]], [t[0], t[1:]]]
    model["merges"] = merges[:MERGES]
    made = {a + b for a, b in model["merges"]}
    words = [*letters, *pairs, *(t for t in triples if t in made)]
    free = range(tiny.VOCAB, VOCAB)
    names = {i: text for text, i in model["vocab"].items()} | dict(zip(free, words, strict=False))
    model["vocab"] = {text: i for i, text in names.items()}
    dump(path, content)


def target_config(folder: Path, layers: int = LAYERS) -> dict[str, Any]:
    """Write config.json and tokenizer of the 31B target, or of one with fewer layers. Return its
    `text_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = tiny._gemma_config(
        layers=layers,
        hidden=HIDDEN,
        inter=21504,
        heads=32,
        kv=16,
        global_kv=4,
        head_dim=256,
        global_head_dim=512,
        window=1024,
        softcap=30.0,
        vocab=VOCAB,
        per_layer=False,
        k_eq_v=True,
        n_ctx=262144,
        period=6,
    )
    dump(
        folder / "config.json",
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "text_config": inner,
            "eos_token_id": [1, 106],
            "tie_word_embeddings": True,
            "vision_config": None,
            "audio_config": None,
            "dtype": "bfloat16",
        },
    )
    vocabulary(folder)
    return inner


def target_shapes(config: dict[str, Any]) -> Shapes:
    """Return the shapes of all text tensors of such a target."""
    e, ff, heads = (config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads"))
    out: Shapes = {"embed_tokens.weight": (VOCAB, e), "norm.weight": (e,)}
    for i, kind in enumerate(config["layer_types"]):
        p, full = f"layers.{i}.", kind == "full_attention"
        hd = config["global_head_dim" if full else "head_dim"]
        kv = config["num_global_key_value_heads" if full else "num_key_value_heads"] * hd
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            out[f"{p}{name}_layernorm.weight"] = (e,)
        out |= {
            f"{p}self_attn.q_proj.weight": (heads * hd, e),
            f"{p}self_attn.k_proj.weight": (kv, e),
            f"{p}self_attn.o_proj.weight": (e, heads * hd),
            f"{p}self_attn.q_norm.weight": (hd,),
            f"{p}self_attn.k_norm.weight": (hd,),
            f"{p}mlp.gate_proj.weight": (ff, e),
            f"{p}mlp.up_proj.weight": (ff, e),
            f"{p}mlp.down_proj.weight": (e, ff),
            f"{p}layer_scalar": (1,),
        }
        if not full:
            out[f"{p}self_attn.v_proj.weight"] = (kv, e)
    return {f"model.language_model.{name}": shape for name, shape in out.items()}


def header(shapes: Shapes, length: int | None = None) -> tuple[bytes, int]:
    """Return the header of a safetensors file of bf16 tensors, and its data's size."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        span = [at, at + 2 * prod(shape)]
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": span}
        at = span[1]
    head = json.dumps(entries, separators=(",", ":")).encode()
    size = length - 8 if length else len(head) + -len(head) % 8
    if len(head) > size:
        raise ValueError(f"the header has {len(head)} bytes, more than the {size} available")
    return size.to_bytes(8, "little") + head.ljust(size), at


def sparse_target(folder: Path, layers: int, shard: int = 5 << 30) -> int:
    """Write a target of zeros in sparse shards. Return their total size in bytes."""
    parts: list[Shapes] = [{}]
    for name, shape in target_shapes(target_config(folder, layers)).items():
        if sum(2 * prod(s) for s in parts[-1].values()) + 2 * prod(shape) > shard:
            parts.append({})
        parts[-1][name] = shape
    weight_map, total = {}, 0
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        head, size = header(part)
        with open(folder / name, "wb") as f:
            f.write(head)
            f.truncate(len(head) + size)
        weight_map.update(dict.fromkeys(part, name))
        total += len(head) + size
    dump(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return total


def draft(folder: Path) -> Path:
    """Write the z-lab DFlash draft of the 31B with random bf16 weights and the size of the
    published file."""
    folder.mkdir(parents=True, exist_ok=True)
    dump(
        folder / "config.json",
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": HIDDEN,
            "intermediate_size": 10752,
            "num_hidden_layers": 5,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "block_size": 16,
            "dflash_config": {"mask_token_id": 4, "target_layer_ids": TAPS},
            "num_target_layers": LAYERS,
            "use_sliding_window": True,
            "sliding_window": 2048,
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
            "final_logit_softcapping": 30.0,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_scaling": None,
            "max_position_embeddings": 262144,
            "attention_bias": False,
            "vocab_size": VOCAB,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    )
    shapes: Shapes = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    inner = {
        "q_proj": (8192, HIDDEN),
        "k_proj": (1024, HIDDEN),
        "v_proj": (1024, HIDDEN),
        "o_proj": (HIDDEN, 8192),
        "q_norm": (128,),
        "k_norm": (128,),
    }
    outer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (10752, HIDDEN),
        "mlp.up_proj": (10752, HIDDEN),
        "mlp.down_proj": (HIDDEN, 10752),
    }
    for i in range(5):
        named = {f"self_attn.{k}": v for k, v in inner.items()} | outer
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in named.items()}
    data = sum(2 * prod(s) for s in shapes.values())
    head, _ = header(shapes, DRAFT_BYTES - data)
    rng = np.random.Generator(np.random.SFC64(0))
    with open(folder / "model.safetensors", "wb") as f:
        f.write(head)
        for shape in shapes.values():
            centre, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, 0.02)
            for start in range(0, prod(shape), 1 << 22):
                x = rng.standard_normal(min(1 << 22, prod(shape) - start), np.float32)
                f.write(tiny.store(x * np.float32(spread) + np.float32(centre), "BF16"))
    return folder
