"""A miniature of Gemma's tokenizer, and small GGUF files that contain it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from g4spec.gguf import KV, TensorData, ValueType, array, boolean, string, u32, write
from g4spec.models import dflash, gemma4
from g4spec.models.spec import TensorSpec
from tests.support import memory_models

NAMED = {
    0: "<pad>",
    1: "<eos>",
    2: "<bos>",
    3: "<unk>",
    4: "<mask>",
    46: "<|tool>",
    47: "<tool|>",
    98: "<|think|>",
    105: "<|turn>",
    106: "<turn|>",
}
USER = {
    48: "<|tool_call>",
    49: "<tool_call|>",
    50: "<|tool_response>",
    52: '<|"|>',
    100: "<|channel>",
    101: "<channel|>",
}
WORDS = ["▁hello", "▁world", "def", "▁return", "▁▁▁▁", "the", "▁é", "日本", "▁🙂", "'s", "100"]
MERGES_OF_NEWLINES = ["\n \n", "\n\n \n\n", "\n\n \n"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn>' + m['role'] + '\\n' + m['content'] | trim "
    "+ '<turn|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Return tokens, their GGUF types and merges."""
    tokens = [NAMED.get(i) or USER.get(i) or f"<unused{i}>" for i in range(107)]
    types = [3 if i in NAMED else 4 if i in USER else 1 for i in range(107)]
    tokens += ["\n", "\n\n", "\n\n\n", "\n\n\n\n"]
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    types += [1] * 4 + [6] * 256
    tokens += [chr(c) for c in range(33, 127)] + list("▁éüñ日本語🙂")
    merges = list(MERGES_OF_NEWLINES)
    for word in WORDS:
        for i in range(1, len(word)):
            merges.append(f"{word[:i]} {word[i]}")
            if word[: i + 1] not in tokens:
                tokens.append(word[: i + 1])
    types += [1] * (len(tokens) - len(types))
    return tokens, types, list(dict.fromkeys(merges))


def keys(**changed: Any) -> KV:
    """Return the tokenizer's metadata. A keyword changes `tokenizer.ggml.<name>`; None removes
    it."""
    tokens, types, merges = vocabulary()
    kv: KV = {
        "tokenizer.ggml.model": string("gemma4"),
        "tokenizer.ggml.tokens": array(ValueType.STRING, tokens),
        "tokenizer.ggml.scores": array(ValueType.F32, [-1000.0] * len(tokens)),
        "tokenizer.ggml.token_type": array(ValueType.I32, types),
        "tokenizer.ggml.merges": array(ValueType.STRING, merges),
        "tokenizer.ggml.bos_token_id": u32(2),
        "tokenizer.ggml.eos_token_id": u32(1),
        "tokenizer.ggml.unknown_token_id": u32(3),
        "tokenizer.ggml.padding_token_id": u32(0),
        "tokenizer.ggml.mask_token_id": u32(4),
        "tokenizer.ggml.add_bos_token": boolean(True),
        "tokenizer.ggml.add_space_prefix": boolean(False),
        "tokenizer.chat_template": string(TEMPLATE),
    }
    for name, value in changed.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        kv.pop(key, None)
        if value is not None:
            kv[key] = value
    return kv


def ollama_keys() -> KV:
    """Return the tokenizer's metadata as Ollama writes it."""
    tokens, types, _ = vocabulary()
    kinds = [3 if i in USER else 1 if kind == 6 else kind for i, kind in enumerate(types)]
    return keys(
        model=string("llama"),
        pre=string("gemma4"),
        token_type=array(ValueType.I32, kinds),
        scores=array(ValueType.F32, list(range(len(tokens)))),
        add_bos_token=boolean(False),
        eos_token_ids=array(ValueType.I32, [1, 106, 50]),
    )


def vocabulary_file(path: Path, **changed: Any) -> Path:
    """Write a GGUF file of metadata only."""
    write(path, {"general.architecture": string("gemma4"), **keys(**changed)}, [])
    return path


def _write(path: Path, kv: KV, specs: list[TensorSpec], weights: dict[str, torch.Tensor]) -> Path:
    rows = []
    for spec in specs:
        if spec.name in weights:
            data = np.ascontiguousarray(weights[spec.name].float().numpy())
            rows.append(TensorData(spec.name, tuple(data.shape), 0, [data]))
    write(path, kv, rows)
    return path


def target_file(path: Path, seed: int = 0, **changed: Any) -> Path:
    """Write a random target with this tokenizer."""
    config = replace(memory_models.target_config(), n_vocab=len(vocabulary()[0]))
    kv = {"general.architecture": string("gemma4"), **gemma4.metadata(config), **keys(**changed)}
    specs = gemma4.tensors(config)
    return _write(path, kv, specs, memory_models.weights(specs, seed, 0.3))


def draft_file(path: Path, seed: int = 1) -> Path:
    """Write a random DFlash draft for any `target_file`."""
    config = memory_models.dflash_config(n_vocab=len(vocabulary()[0]))
    specs = dflash.tensors(config)
    kv = {**dflash.metadata(config), **keys()}
    return _write(path, kv, specs, memory_models.weights(specs, seed, 0.3))
