"""GGUF dialects of other programs' drafts, as data for `rewrite.py`.

A dialect is recognized by its architecture string and by keys and tensors that only it has. The
name of a key determines its meaning (`target_layer_ids` always counts layer outputs,
`target_layers` inputs), so all dialects of a kind share one table of names.

Sources: loaders and converters of lucebox, dusterbloom's fork, ik_llama.cpp, beellama.cpp, buun,
AtomicChat, and of the upstream pull requests 22105 (DFlash) and 22738 (assistants).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass

MASK = "tokenizer.ggml.mask_token_id"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One program's way of writing a kind of draft.

    Attributes:
        title: name of the program.
        kind: the architecture that it is rewritten to.
        archs: its values of `general.architecture`.
        markers: patterns of keys (without the architecture) and tensor names, of which the file
            must have one; empty if the architecture is enough.
    """

    title: str
    kind: str
    archs: tuple[str, ...]
    markers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DialectFamily:
    """Names that all dialects of one kind use.

    Attributes:
        kept_keys: keys (without the architecture) that have the same name and meaning now.
        renamed_keys: key -> current key; the latter with prefix if it begins with `tokenizer.`.
        ignored_keys: patterns of keys that are not needed.
        tensor_names: (pattern, current name) pairs.
        unsupported: (pattern, feature) pairs: a key with a true value or a tensor that matches the
            pattern uses the feature, which has no code here.
    """

    kept_keys: tuple[str, ...]
    renamed_keys: dict[str, str]
    ignored_keys: tuple[str, ...]
    tensor_names: tuple[tuple[str, str], ...]
    unsupported: tuple[tuple[str, str], ...]


OUTPUT_LAYER_IDS = "dflash.target_layer_ids"
"""Key that lists layers whose output is read; the current key lists layers whose input is read."""

DIALECTS = (
    Dialect(
        "dusterbloom's fork",
        "dflash",
        ("gemma4-dflash-draft",),
        (r"dflash\.target_hidden", r"dflash\.sliding_window", r"dflash\.logit_softcap"),
    ),
    Dialect(
        "ik_llama.cpp, beellama or buun",
        "dflash",
        ("dflash-draft", "gemma4-dflash-draft"),
        (r"dflash_fc\.weight",),
    ),
    Dialect("lucebox", "dflash", ("gemma4-dflash-draft", "dflash-draft", "qwen35-dflash-draft")),
    Dialect(
        "an early llama.cpp branch",
        "dflash",
        ("dflash",),
        (r"(dflash\.)?target_layer_ids", r"dflash[._]fc\.weight"),
    ),
    Dialect("AtomicChat", "gemma4-assistant", ("gemma4_assistant",)),
    Dialect("ik_llama.cpp", "gemma4-assistant", ("gemma4_mtp",)),
    Dialect(
        "an early llama.cpp branch",
        "gemma4-assistant",
        ("gemma4-assistant",),
        (r"masked_embd_(centroids\.weight|ordering(\.weight)?)",),
    ),
    Dialect(
        "ik_llama.cpp's newer form",
        "gemma4-assistant",
        ("gemma4-assistant",),
        (r"mtp\.(centroids|token_ordering)\.weight", r"n_centroids"),
    ),
)
"""All dialects in the order in which they are tried: those with markers come first."""

_GEMMA = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base",
)

FAMILIES = {
    "dflash": DialectFamily(
        kept_keys=(
            *_GEMMA,
            "rope.dimension_count",
            "block_size",
            "target_layers",
            "embedding_scale",
            "vocab_size",
            "final_logit_softcapping",
            "hidden_activation",
        ),
        renamed_keys={
            "dflash.block_size": "block_size",
            "dflash.mask_token_id": MASK,
            OUTPUT_LAYER_IDS: "target_layers",
            "target_layer_ids": "target_layers",
            "dflash.target_layers": "target_layers",
            "dflash.sliding_window": "attention.sliding_window",
            "dflash.sliding_window_pattern": "attention.sliding_window_pattern",
            "sliding_window_pattern": "attention.sliding_window_pattern",
            "dflash.logit_softcap": "final_logit_softcapping",
        },
        ignored_keys=(
            r"dflash\.n_target_(layers|features)",
            r"dflash\.target_hidden",  # repeat fc's shape
            r"tie_word_embeddings",
            r"attention\.causal",  # constant in all files of a fork
            r"attention\.value_length",
            r"dflash\.(laguna|context_kv_layer_norm|dspark\..*)",  # false, see `unsupported`
        ),
        tensor_names=(
            (r"dflash[._]fc\.weight", "fc.weight"),
            (r"dflash[._]hidden_norm\.weight", "enc.output_norm.weight"),
            (r"(blk\.\d+\.)post_attention_norm\.weight", r"\1ffn_norm.weight"),
        ),
        unsupported=(
            (r"blk\.\d+\.attn_gate\.weight|dflash\.laguna", "gated attention (Laguna)"),
            (r"dflash[._]aux_hidden_norm.*", "norms on single target features (Laguna)"),
            (r"dflash[._]domino\..*", "a Domino head"),
            (
                r"dflash\.dspark\.(markov|confidence)\..*|markov_w[12]\.weight|conf_proj\..*"
                r"|dflash\.dspark\.enabled",
                "a DSpark head in a fork's dialect",
            ),
            (r"selector_\w+\.weight|blk\.\d+\.\w+_conv_\w+.*", "DFlash2 in a fork's dialect"),
            (r"dflash\.context_kv_layer_norm", "a norm on context keys and values"),
            (r"dflash\.backbone_rotary_base", "a second rotation base"),
            (r"blk\.\d+\.attn_\w+\.bias", "attention biases"),
            (r"blk\.\d+\.attn_sinks.*", "attention sinks"),
            (r"attention\.value_scale", "scaled values"),
        ),
    ),
    "gemma4-assistant": DialectFamily(
        kept_keys=(
            *_GEMMA,
            "attention.key_length_swa",
            "rope.freq_base_swa",
            "embedding_length_out",
            "embedding_length_per_layer_input",
            "n_centroids",
            "centroid_top_k",
        ),
        renamed_keys={
            "n_embd_backbone": "embedding_length_out",
            "backbone_embedding_length": "embedding_length_out",
            "centroid_count": "n_centroids",
            "sliding_window_pattern": "attention.sliding_window_pattern",
        },
        ignored_keys=(
            r"attention\.k_eq_v",
            r"attention_k_eq_v",
            r"requires_target_arch",
            r"use_ordered_embeddings",
            r"nextn_predict_layers",
            r"attention\.shared_kv_layers",
            r"rope\.dimension_count(_swa)?",
            r"attention\.value_length(_swa)?",
            r"vocab_size",
            r"final_logit_softcapping",  # no engine caps an assistant's logits
        ),
        tensor_names=(
            (r"mtp\.(blk\..*)", r"\1"),
            (r"mtp(?:\.pre_projection|_pre_proj)\.weight", "nextn.pre_projection.weight"),
            (r"mtp(?:\.post_projection|_post_proj)\.weight", "nextn.post_projection.weight"),
            (r"(?:mtp[._]|masked_embd_)centroids\.weight", "masked_embedding.centroids.weight"),
            (
                r"(?:mtp[._]token_|masked_embd_)ordering(?:\.weight)?",
                "masked_embedding.token_ordering",
            ),
            (r"output\.weight", "lm_head.weight"),
        ),
        unsupported=(
            (r"blk\.\d+\.attn_[kv]\.weight", "keys and values of its own"),
            (r"blk\.\d+\.ffn_gate_inp\.weight", "mixture of experts in an assistant"),
        ),
    ),
}


def recognise(arch: object, names: Iterable[str]) -> Dialect | None:
    """Return the dialect of a file with this architecture, keys and tensor names, or None."""
    names = [n.removeprefix(f"{arch}.") for n in names]
    for dialect in DIALECTS:
        if arch in dialect.archs and (
            not dialect.markers or any(re.fullmatch(m, n) for m in dialect.markers for n in names)
        ):
            return dialect
    return None


def current_name(family: DialectFamily, name: str, present: Container[str]) -> str:
    """Return the current name of a tensor, or `name` if the file has the current name too."""
    for pattern, new in family.tensor_names:
        if re.fullmatch(pattern, name):
            current = re.sub(pattern, new, name)
            return name if current in present else current
    return name


def markdown() -> str:
    """Return the table of dialects in docs/sources.md."""
    rows = [
        "| written by | `general.architecture` | recognized by | becomes |",
        "|---|---|---|---|",
    ]
    for d in DIALECTS:
        marks = ", ".join(f"`{m}`" for m in d.markers).replace("|", "\\|") or "the name"
        rows.append(
            f"| {d.title} | {', '.join(f'`{a}`' for a in d.archs)} | {marks} | `{d.kind}` |"
        )
    refused = [feature for f in FAMILIES.values() for _, feature in f.unsupported]
    return "\n".join(rows) + f"\n\nUnsupported features, refused by name: {'; '.join(refused)}.\n"
