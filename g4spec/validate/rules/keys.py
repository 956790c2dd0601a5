"""Metadata keys: presence, exact type, one entry per layer.

Upstream's loader refuses any other type or width than the one it expects; the table lists what it
reads (llama.cpp `src/llama-model.cpp` and `src/models/*.cpp`).
"""

from __future__ import annotations

from typing import NamedTuple

from g4spec.gguf import ValueType
from g4spec.models.fields import MAX_LAYERS
from g4spec.quant import policy
from g4spec.validate.header import Key
from g4spec.validate.needs import Needs
from g4spec.validate.rule import (
    DFLASH,
    DRAFTS,
    EAGLE,
    ERROR,
    GEMMA,
    TAPPED,
    TARGETS,
    WARNING,
    Finding,
    Findings,
    rule,
)
from g4spec.validate.subject import Subject

FILE = Needs.FILE
REWRITE = "convert again with g4spec convert, which writes the exact types"
INTS = (ValueType.I32, ValueType.U32)
FLAGS = (ValueType.BOOL, *INTS)


class Want(NamedTuple):
    """Accepted scalar types and item types of arrays; `on`: where the key is required."""

    scalar: tuple[ValueType, ...] = ()
    items: tuple[ValueType, ...] = ()
    on: tuple[str, ...] = ()


ALL = (*TARGETS, *DRAFTS)
MODEL, MERGES = "tokenizer.ggml.model", "tokenizer.ggml.merges"
KEYS = {
    ".block_count": Want((ValueType.U32,), on=ALL),
    ".context_length": Want((ValueType.U32,), on=ALL),
    ".embedding_length": Want((ValueType.U32,), on=ALL),
    ".embedding_length_out": Want((ValueType.U32,), on=("gemma4-assistant",)),
    ".nextn_predict_layers": Want((ValueType.U32,), on=("gemma4-assistant",)),
    ".embedding_length_per_layer_input": Want((ValueType.U32,), on=("gemma4",)),
    ".vocab_size": Want((ValueType.U32,)),
    ".feed_forward_length": Want((ValueType.U32,), INTS, ALL),
    ".attention.head_count": Want((ValueType.U32,), INTS, ALL),
    ".attention.head_count_kv": Want((ValueType.U32,), INTS, ALL),
    ".attention.key_length": Want((ValueType.U32,), on=ALL),
    ".attention.value_length": Want((ValueType.U32,), on=ALL),
    ".attention.key_length_swa": Want((ValueType.U32,), on=GEMMA),
    ".attention.value_length_swa": Want((ValueType.U32,), on=GEMMA),
    ".attention.layer_norm_rms_epsilon": Want((ValueType.F32,), on=ALL),
    ".attention.sliding_window": Want((ValueType.U32,), on=GEMMA),
    ".attention.sliding_window_pattern": Want((), FLAGS, GEMMA),
    ".attention.shared_kv_layers": Want((ValueType.U32,)),
    ".expert_count": Want((ValueType.U32,)),
    ".expert_used_count": Want((ValueType.U32,)),
    ".expert_feed_forward_length": Want((ValueType.U32,), INTS),
    ".attention.causal": Want((ValueType.BOOL,)),
    ".attention.scale": Want((ValueType.F32,)),
    ".rope.freq_base": Want((ValueType.F32,), on=GEMMA),
    ".rope.freq_base_swa": Want((ValueType.F32,)),
    ".rope.dimension_count": Want((ValueType.U32,)),
    ".rope.dimension_count_swa": Want((ValueType.U32,)),
    ".final_logit_softcapping": Want((ValueType.F32,)),
    ".block_size": Want((ValueType.U32,), on=DFLASH),
    ".target_layers": Want((), INTS, TAPPED),
    ".target_hidden_size": Want((ValueType.U32,), on=EAGLE),
    ".norm_before_residual": Want((ValueType.BOOL,)),
    ".norm_before_fc": Want((ValueType.BOOL,)),
    ".sample_from_anchor": Want((ValueType.BOOL,)),
    ".has_confidence_head": Want((ValueType.BOOL,)),
    ".conv_kernel_size": Want((ValueType.U32,)),
    ".conv_group_size": Want((ValueType.U32,)),
    ".selector_rank": Want((ValueType.U32,)),
    ".selector_top_k": Want((ValueType.U32,)),
    ".logit_scale": Want((ValueType.F32,)),
    ".embedding_scale": Want((ValueType.F32,)),
    ".hidden_activation": Want((ValueType.STRING,)),
    "general.alignment": Want((ValueType.U32,)),
    "general.file_type": Want((ValueType.U32,)),
    MODEL: Want((ValueType.STRING,), on=ALL),
    "tokenizer.ggml.tokens": Want((), (ValueType.STRING,), ALL),
    MERGES: Want((), (ValueType.STRING,), ALL),
    "tokenizer.ggml.scores": Want((), (ValueType.F32,)),
    "tokenizer.ggml.token_type": Want((), (ValueType.I32,), ALL),
    "tokenizer.ggml.bos_token_id": Want((ValueType.U32,), on=ALL),
    "tokenizer.ggml.eos_token_id": Want((ValueType.U32,), on=ALL),
    "tokenizer.ggml.eot_token_id": Want((ValueType.U32,)),
    "tokenizer.ggml.unknown_token_id": Want((ValueType.U32,)),
    "tokenizer.ggml.padding_token_id": Want((ValueType.U32,)),
    "tokenizer.ggml.mask_token_id": Want((ValueType.U32,)),
    "tokenizer.ggml.suppress_tokens": Want((), (ValueType.I32,)),
    "tokenizer.ggml.add_bos_token": Want((ValueType.BOOL,)),
    "tokenizer.ggml.add_space_prefix": Want((ValueType.BOOL,)),
    "tokenizer.chat_template": Want((ValueType.STRING,)),
}
PER_LAYER = (
    ".feed_forward_length",
    ".attention.head_count",
    ".attention.head_count_kv",
    ".attention.sliding_window_pattern",
)
REMOVED_FILE_TYPES = (4, 5, 6)
"""`general.file_type` values of types that llama.cpp removed in 2023."""
POSITIVE = (
    ".block_count",
    ".context_length",
    ".embedding_length",
    ".attention.key_length",
    ".attention.layer_norm_rms_epsilon",
    ".rope.freq_base",
)


@rule("G4-KEY-001", ERROR, "every key that a loader requires must be present", needs=FILE)
def required(s: Subject) -> Findings:
    """Assistants converted before `nextn_predict_layers` existed load as models of 0 layers and
    fail with "expected 49, got 3"; drafts of one fork carry no tokenizer at all. llama.cpp converts
    EAGLE-3 with a tokenizer without merges, which no program uses."""
    spared = (MERGES,) if s.arch in EAGLE and s.text(MODEL) == "llama" else ()
    for key, want in KEYS.items():
        if s.arch in want.on and not s.has(key) and key not in spared:
            yield Finding(s.name(key), _types(want), "nothing", REWRITE)


@rule("G4-KEY-002", ERROR, "scalars and arrays must have the type that upstream reads", needs=FILE)
def types(s: Subject) -> Findings:
    """A library that guesses types writes 16 as I32 or I64 where the loader wants U32, and a
    scalar `sliding_window_pattern` where it wants an array: "key has wrong type"."""
    for key, want in KEYS.items():
        entry = s.keys.get(s.name(key))
        if entry is not None and not _fits(entry, want):
            found = f"array of {_name(entry.item)}" if entry.item is not None else _name(entry.type)
            yield Finding(entry.name, _types(want), found, REWRITE)


@rule("G4-KEY-003", ERROR, "per-layer arrays must have one entry per layer", needs=FILE)
def per_layer(s: Subject) -> Findings:
    """An array cut from another size of the model gives the last layers the wrong head count."""
    n = s.integer(".block_count")
    for key in PER_LAYER:
        found = s.count(key)
        if found is not None and n is not None and found != n:
            yield Finding(s.name(key), f"{n} entries", found, "use the values of this model")


@rule("G4-KEY-004", ERROR, "sizes, epsilon and rotation base must be positive", needs=FILE)
def positive(s: Subject) -> Findings:
    """Exports that lost `rope_theta` wrote 0; everything rotates by infinity."""
    for key in POSITIVE:
        value = s.number(key)
        if value is not None and not value > 0:
            yield Finding(s.name(key), "> 0", value, "take the value from the checkpoint")


@rule("G4-KEY-005", ERROR, "keys and values must have the same head size", needs=FILE)
def same_head_size(s: Subject) -> Findings:
    """Upstream refuses a Gemma 4 file in which they differ."""
    for swa in ("", "_swa"):
        key, value = (s.integer(f".attention.{x}_length{swa}") for x in ("key", "value"))
        if key is not None and value is not None and key != value:
            yield Finding(s.name(f".attention.value_length{swa}"), key, value, REWRITE)


@rule("G4-KEY-006", ERROR, "query heads must divide among key and value heads")
def grouped(s: Subject) -> Findings:
    """Heads are shared in groups: 0,0,1,1. One engine repeated them 0,1,0,1 and drafted noise;
    a count that does not divide has no right answer at all."""
    for spec in s.config.layers:
        if spec.n_kv <= 0 or spec.n_head % spec.n_kv:
            yield Finding(
                f"layer {spec.index}",
                f"a divisor of {spec.n_head}",
                spec.n_kv,
                "take head_count and head_count_kv from the checkpoint",
            )


@rule("G4-KEY-007", ERROR, "rotation must cover the whole head", needs=FILE)
def rotation(s: Subject) -> Findings:
    """Gemma's partial rotation is in `rope_freqs`; a fork put 0.25 into the dimension count and
    rotated other pairs, at a tenth less acceptance."""
    for swa in ("", "_swa"):
        size = s.integer(f".attention.key_length{swa}")
        dims = s.integer(f".rope.dimension_count{swa}")
        if size is not None and dims is not None and size != dims:
            yield Finding(s.name(f".rope.dimension_count{swa}"), size, dims, REWRITE)


NAMING_TYPES = ("nvfp4", "mxfp4")
"""Types after which llama.cpp's converter names a file, however few matrices have them."""


def most_type(s: Subject) -> str | None:
    """Return the type that most bytes of matrices have."""
    sizes: dict[str, int] = {}
    for t in s.entries.values():
        # Token tables and outputs have another type than the rest in most quantized files.
        if len(t.shape) > 1 and t.name not in (*policy.TABLES, policy.OUTPUT):
            sizes[t.type_name] = sizes.get(t.type_name, 0) + (t.nbytes or 0)
    return max(sizes, key=lambda name: sizes[name], default=None)


@rule("G4-KEY-008", WARNING, "file_type should be the type of most weights", needs=FILE)
def file_type(s: Subject) -> Findings:
    """A requantized file that kept the old number is listed, and chosen, as another type. A file
    may be named after a few matrices in NVFP4 or MXFP4, as by llama.cpp's converter."""
    number = s.integer("general.file_type")
    mix = policy.from_file_type(number) if number is not None else None
    most = most_type(s)
    if number in REMOVED_FILE_TYPES:
        yield Finding(
            "general.file_type",
            "a type that llama.cpp has",
            number,
            "quantize again with g4spec quantize",
        )
    types = {t.type_name.lower() for t in s.entries.values()}
    if mix and mix.name in types.intersection(NAMING_TYPES):
        return
    if mix and most and most.lower() not in policy.expected_types(mix):
        yield Finding(
            "general.file_type", most, mix.name.upper(), "quantize again with g4spec quantize"
        )


@rule(
    "G4-KEY-009",
    ERROR,
    "the metadata must describe a model that can be loaded",
    needs=FILE,
    fallback=True,
)
def describes(s: Subject) -> Findings:
    """Reports errors of the configuration parser that no other rule covers."""
    if s.config_refusal:
        yield Finding("metadata", "a complete configuration", s.config_refusal, REWRITE)


@rule("G4-KEY-010", ERROR, "the model must have sliding and full layers", on=GEMMA, needs=FILE)
def both_kinds(s: Subject) -> Findings:
    """Every Gemma 4 has both, and an assistant reads the KV cache of one layer of each. Exports of
    a text model without `layer_types` came out as all sliding, or all full."""
    found = s.numbers(".attention.sliding_window_pattern")
    if found is not None and (found.all() or not found.any()):
        kind = "only sliding ones" if len(found) and found.all() else "only full ones"
        yield Finding(
            s.name(".attention.sliding_window_pattern"),
            "both kinds",
            kind,
            "take layer_types from the checkpoint",
        )


@rule(
    "G4-KEY-011",
    WARNING,
    "this version should support all features of the file",
    needs=FILE,
    fallback=True,
)
def supported(s: Subject) -> Findings:
    """A valid file of a kind that is not implemented here: most rules could not run, so
    the absence of findings means nothing."""
    if s.unsupported:
        yield Finding(
            "metadata",
            "features of this version",
            s.unsupported,
            "use a newer version, or upstream llama.cpp",
        )


@rule("G4-KEY-012", ERROR, f"the model must have at most {MAX_LAYERS} layers", needs=FILE)
def layer_count(s: Subject) -> Findings:
    """Upstream's limit. A damaged count makes loaders allocate per-layer lists of gigabytes."""
    n = s.integer(".block_count")
    if n is not None and n > MAX_LAYERS:
        yield Finding(s.name(".block_count"), f"at most {MAX_LAYERS}", n, REWRITE)


def _fits(entry: Key, want: Want) -> bool:
    return entry.item in want.items if entry.type is ValueType.ARRAY else entry.type in want.scalar


def _name(kind: ValueType | None) -> str:
    return kind.name if kind is not None else "nothing"


def _types(want: Want) -> str:
    names = [_name(t) for t in want.scalar] + [f"array of {_name(t)}" for t in want.items]
    return " or ".join(names)
