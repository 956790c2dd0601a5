"""The family's tokenizer: byte-fallback BPE with 4,096 entries in Gemma's order.

Ids 0..106 are Gemma's special tokens and fillers, 107..114 runs of one to eight newlines, 115..370
the 256 bytes, the rest characters and merges. Spaces become U+2581; no merge crosses a word or a
line.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB = 4096
PAD, EOS, BOS, UNK, MASK, TURN, END_TURN, NEWLINE = 0, 1, 2, 3, 4, 105, 106, 107
SPECIAL = {
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
ROLES = {
    "bos_token": 2,
    "eos_token": 1,
    "pad_token": 0,
    "unk_token": 3,
    "mask_token": 4,
    "std_token": 46,
    "etd_token": 47,
    "stc_token": 48,
    "etc_token": 49,
    "str_token": 50,
    "etr_token": 51,
    "escape_token": 52,
    "think_token": 98,
    "soc_token": 100,
    "eoc_token": 101,
    "sot_token": 105,
    "eot_token": 106,
}
NEWLINE_MERGES = [
    (1, 1),
    (2, 2),
    (4, 4),
    (4, 2),
    (6, 1),
    (4, 1),
    (2, 1),
]  # greedy by rank: any run up to 8
WORDS = "\n+|▁{2,}|▁?\\p{L}+|\\p{N}|▁?[^\\s▁\\p{L}\\p{N}]+|▁"

CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<|turn>' + role + '\\n' + message['content'] | trim + '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|turn>model\\n' }}
{%- endif -%}
"""


def reserved() -> list[str]:
    """Return the 371 entries with fixed ids."""
    unused = iter(range(107))
    first = [SPECIAL[i] if i in SPECIAL else f"<unused{next(unused)}>" for i in range(107)]
    return first + ["\n" * n for n in range(1, 9)] + [f"<0x{b:02X}>" for b in range(256)]


def train(texts: list[str]) -> Tokenizer:
    """Learn the merges from `texts` and assemble the tokenizer."""
    learner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    alphabet = [chr(c) for c in range(33, 127)] + ["▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=reserved(),
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        min_frequency=2,
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    return assemble(json.loads(learner.to_str())["model"])


def assemble(model: dict) -> Tokenizer:
    """Build Gemma's tokenizer pipeline from a learned vocabulary; newline merges come first."""
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    merges = [m for m in merges if "\n" not in "".join(m)]
    runs = [("\n" * a, "\n" * b) for a, b in NEWLINE_MERGES]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=runs + merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    for i, text in enumerate(reserved()):
        assert tokenizer.token_to_id(text) == i, (i, text)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {role: SPECIAL[i] for role, i in ROLES.items()}
    config |= {
        "backend": "tokenizers",
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": False,
        "model_max_length": 1000000000000000019884624838656,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def load(folder: Path) -> Tokenizer:
    """Load the tokenizer of `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
