"""A tiny byte-fallback BPE tokenizer in Gemma's form, special tokens at their real ids."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

VOCAB = 512
SPECIALS = {
    0: "<pad>",
    1: "<eos>",
    2: "<bos>",
    3: "<unk>",
    4: "<mask>",
    46: "<|tool>",
    47: "<tool|>",
    48: "<|tool_call>",
    49: "<tool_call|>",
    50: "<|tool_response>",
    51: "<tool_response|>",
    52: '<|"|>',
    98: "<|think|>",
    100: "<|channel>",
    101: "<channel|>",
    105: "<|turn>",
    106: "<turn|>",
}
NEWLINE, FIRST_BYTE, FIRST_CHAR = 107, 108, 364
TEXT = (
    "the quick brown fox jumps over the lazy dog and then the dog thinks that the other fox "
    "is there in this or that thing for the and of to in is it that was with as his on be at "
    "return self def function class import from not none true false"
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m['role'] == 'assistant' else "
    "m['role'] }}\n{{ m['content'] | trim }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)


def dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def merges(count: int) -> list[list[str]]:
    """Return the first `count` byte-pair merges of TEXT; ties go to the pair seen first."""
    words = [["▁", *w] for w in TEXT.split()]
    found: list[list[str]] = []
    while len(found) < count:
        pairs = Counter(p for w in words for p in pairwise(w))
        if not pairs:
            break
        a, b = max(pairs, key=pairs.__getitem__)
        found.append([a, b])
        for w in words:
            i = 0
            while i < len(w) - 1:
                if (w[i], w[i + 1]) == (a, b):
                    w[i : i + 2] = [a + b]
                i += 1
    return found


def tokenizer(folder: Path, tokens: int = VOCAB) -> None:
    """Return a byte-fallback BPE tokenizer in Gemma's form with `tokens` (>= 512) entries."""
    names = {i: f"<unused{i}>" for i in range(NEWLINE)} | SPECIALS | {NEWLINE: "\n"}
    names |= {FIRST_BYTE + b: f"<0x{b:02X}>" for b in range(256)}
    chars = ["▁", *(chr(c) for c in range(33, 127))]
    names |= {FIRST_CHAR + i: c for i, c in enumerate(chars)}
    pairs = merges(VOCAB - FIRST_CHAR - len(chars))
    names |= {FIRST_CHAR + len(chars) + i: a + b for i, (a, b) in enumerate(pairs)}
    names |= {i: f"<unused{i}>" for i in range(tokens) if i not in names}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {names[i]: i for i in sorted(names)},
        "merges": pairs,
    }
    dump(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": s, **flags, "special": True} for i, s in SPECIALS.items()
            ],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "post_processor": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            "model": model,
        },
    )
    dump(
        folder / "tokenizer_config.json",
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "mask_token": "<mask>",
            "sot_token": "<|turn>",
            "eot_token": "<turn|>",
            "soc_token": "<|channel>",
            "eoc_token": "<channel|>",
            "stc_token": "<|tool_call>",
            "etc_token": "<tool_call|>",
            "std_token": "<|tool>",
            "etd_token": "<tool|>",
            "str_token": "<|tool_response>",
            "etr_token": "<tool_response|>",
            "escape_token": '<|"|>',
            "think_token": "<|think|>",
            "tokenizer_class": "GemmaTokenizer",
            "padding_side": "left",
            "model_max_length": 10**30,
        },
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    dump(
        folder / "generation_config.json",
        {
            "bos_token_id": 2,
            "eos_token_id": [1, 106, 50],
            "pad_token_id": 0,
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 64,
            "top_p": 0.95,
        },
    )
