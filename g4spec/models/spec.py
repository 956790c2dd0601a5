"""The protocols by which targets and drafts describe themselves.

Each kind of model (gemma4, dflash, assistant, ngram, ...) is a file in this package: how its
checkpoint is recognised, its hyperparameters, its tensors with both names, and its forward pass
written with :class:`g4spec.ops.reference.Ops`. This module does not import torch at run time, so
that `convert`, `inspect` and `--help` start fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from g4spec.errors import InputError

if TYPE_CHECKING:
    from g4spec.core import CacheShape
    from g4spec.gguf import GGUF, KV

GEMMA_STOP_IDS = frozenset({1, 106, 50})
"""`<eos>`, `<turn|>`, `<|tool_response>`; a file's own stop ids are added to these."""

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
"""Token types of GGUF (llama.h, `enum llama_token_type`)."""

VISIBLE = frozenset(
    [
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    ]
)
"""Control tokens that must be rendered as text, so that chat parsers see them."""

END_TOKENS = ("eos", "eot", "eom")
"""Tokens that end a text wherever a tokenizer names them (`tokenizer.ggml.eos_token_id`)."""

END_TEXTS = frozenset(
    [
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<|im_end|>",
        "<end_of_turn>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<｜end▁of▁sentence｜>",
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    ]
)
"""Tokens that end a text wherever a vocabulary has them: llama.cpp finds them by their text
(`src/llama-vocab.cpp`). Gemma's has the first three; fine-tuned models rename unused tokens."""

T = TypeVar("T")

Role = Literal["matrix", "embed", "output", "vector", "index"]
"""Role of a tensor, which decides its type: `matrix`, `embed` and `output` are quantized, `vector`
(norms, scales) stays F32, `index` stays an integer."""


def factors_name(weight: str) -> str:
    """Return the name of the tensor by which a weight is multiplied, a factor for each matrix:
    those of experts in `ffn_down_exps`, and NVFP4 weights."""
    return f"{weight.removesuffix('weight')}scale"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the converted file.

    Attributes:
        name: GGUF tensor name.
        shape: in PyTorch order, `[out, in]` for matrices.
        source: name in the checkpoint without its prefix, or None if the tensor is created at
            conversion.
        make: how a created or changed tensor is computed: "rope_freqs" (from the configuration) or
            "absolute_d2t" (from offsets to absolute ids). None: copied.
        optional: whether the file may lack it.
        pairs: head size if the rows of each head have to be reordered from halves (0, 1, ...) to
            neighbouring pairs (0, d/2, 1, d/2 + 1, ...), as RoPE of upstream's Llama architecture
            expects them.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    source: str | None
    make: Literal["rope_freqs", "absolute_d2t"] | None = None
    optional: bool = False
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """A checkpoint tensor that is dropped on purpose, with the reason."""

    pattern: str  # regular expression matched against the whole stripped name
    reason: str
    same_as: str | None = None  # stripped name of the tensor that it must repeat, byte for byte


QUANTIZED_ACTIVATIONS = Drop(
    r".*\.(input|output|[qkv])_(scale|zero_point|global_scale)",
    "activations are computed in full precision here",
)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Properties that differ between the layers of a model.

    Attributes:
        window: sliding window in tokens, including the query; None for a global layer.
        causal: whether rows of a block attend only to earlier rows (always true in targets).
        v_from_k: the value is the key projection before norm and RoPE (no `attn_v`).
        rope_base: theta. rope_partial: fraction of the head that RoPE rotates.
        kv_from: earlier layer whose KV cache is read; None: the layer has its own.
        n_ple: width of the per-layer embedding of this layer; 0: none.
        n_expert, n_expert_used, n_ff_expert: number of experts beside the dense feed-forward,
            experts per token, and their width; 0: none. split_experts: gate and up projections are
            two tensors, as in older files.

    Raises:
        InputError: RoPE or the choice of experts is impossible with these numbers.
    """

    index: int
    window: int | None
    n_head: int
    n_kv: int
    head_dim: int
    n_ff: int
    rope_base: float
    rope_partial: float = 1.0
    v_from_k: bool = False
    causal: bool = True
    kv_from: int | None = None
    n_ple: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0
    split_experts: bool = False

    def __post_init__(self) -> None:
        where, base = f"layer {self.index}", self.rope_base
        if self.head_dim < 2 or self.head_dim % 2:
            raise InputError(
                f"{where}: size of a head", expected="an even number", found=self.head_dim
            )
        if not 0 < base < math.inf or not 0 <= self.rope_partial <= 1:
            raise InputError(
                f"{where}: rotation",
                expected="a base above 0, a share of 0 to 1",
                found=f"base {base}, share {self.rope_partial}",
            )
        if not 0 <= self.n_expert_used <= self.n_expert:
            raise InputError(
                f"{where}: experts of a token",
                expected=f"at most {self.n_expert}",
                found=self.n_expert_used,
            )

    @property
    def rotary_pairs(self) -> int:
        """Number of pairs of a head that rotate; they are the first ones."""
        return int(self.rope_partial * self.head_dim / 2)


def check_heads(layers: Iterable[LayerSpec]) -> None:
    """Raise InputError unless the number of query heads of each layer is a multiple of its KV
    heads."""
    for spec in layers:
        if spec.n_kv < 1 or spec.n_head < 1 or spec.n_head % spec.n_kv:
            raise InputError(
                f"layer {spec.index}: heads of queries",
                expected=f"a multiple of those of keys, {spec.n_kv}",
                found=spec.n_head,
            )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as `models/` sees it: parsed configuration and tensor names, without file
    access.

    Attributes:
        config: the parsed `config.json`.
        tensors: stored name -> (shape in PyTorch order, dtype string of safetensors).
        generation: the parsed `generation_config.json`, or an empty dict.

    Raises:
        InputError: the configuration does not have the structure that all kinds expect.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    generation: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.config.get("architectures")
        if names is not None and not (
            isinstance(names, list) and all(isinstance(n, str) for n in names)
        ):
            raise InputError(
                "config.json: architectures", expected="a list of names", found=f"{names!r:.80}"
            )
        text = self.config.get("text_config")
        if text is not None and not isinstance(text, dict):
            raise InputError(
                "config.json: text_config", expected="an object", found=f"{text!r:.80}"
            )


def end_ids(tokens: Iterable[str]) -> list[int]:
    """Return the ids of a vocabulary's tokens that end a text by what they are called."""
    return [i for i, text in enumerate(tokens) if text in END_TEXTS]


def with_end_types(types: T, ends: Iterable[int]) -> T:
    """Return a copy of the types of a vocabulary's tokens, a list or array, as they are read:
    normal ones of `end_ids` are control tokens, as in llama.cpp."""
    out: Any = copy(types)
    for i in ends:
        if i < len(out) and out[i] == NORMAL:
            out[i] = CONTROL
    return cast(T, out)


def stop_ids(*sources: Iterable[int]) -> frozenset[int]:
    """Return the union of Gemma's stop ids and those of files or configurations."""
    return GEMMA_STOP_IDS.union(*sources)


class DraftConfig(Protocol):
    """The properties of a draft's configuration that all commands use.

    Attributes:
        arch: `general.architecture` of its file.
        layers: the layers with attention; may be empty.
    """

    arch: str
    n_vocab: int
    n_embd: int

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...


class DraftKind(Protocol):
    """The members of a module of `g4spec/models/` that defines a kind of draft. `Drafter` is its
    `core.Draft`, constructed like `models.drafter.WeightedDrafter`.

    Optional members:
        NAME, UNIQUE_TENSORS: name of the kind, and tensors that only it has, if kinds share ARCH.
        ARCHS: all architectures of its files; those that upstream must refuse end in
            `upstream.REFUSED_SUFFIX`.
        ALIASES: other spellings of tensor names in checkpoints -> usual ones.
        CONFIDENCE: suffixes of the tensor names of a confidence head.
        notes(checkpoint): remarks for users about a checkpoint's configuration.
        file_notes(file): remarks to show whenever a GGUF file of the kind runs.
        metadata_tensors(config): tensors that are stored as metadata (see `models.assistant`).

    Attributes:
        ARCH: `general.architecture` of its files. TITLE: name shown to users.
        PREFIXES: prefixes to strip from the tensor names of a checkpoint; the first that matches.
        DROPS: checkpoint tensors that are dropped on purpose.
        LIMITS: `upstream.Limit` of each property that upstream computes differently.
    """

    ARCH: str
    TITLE: str
    PREFIXES: tuple[str, ...]
    DROPS: tuple[Drop, ...]
    LIMITS: tuple[Any, ...]
    Drafter: Any

    def claims(self, checkpoint: Checkpoint) -> bool:
        """Return whether the checkpoint is of this kind and no other."""

    def parse_hf(self, checkpoint: Checkpoint, target: Any) -> DraftConfig:
        """Parse the configuration of a checkpoint; `target` is its gemma4.Config. Raises InputError
        or Unsupported if something is missing, wrong or not implemented."""

    def parse_gguf(
        self, kv: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]
    ) -> DraftConfig:
        """Parse the same configuration from metadata and tensor shapes (PyTorch order) of a GGUF
        file."""

    def metadata(self, config: Any) -> KV:
        """Return the metadata from which `parse_gguf` reads the same configuration."""

    def tensors(self, config: Any) -> list[TensorSpec]:
        """Return every tensor of the GGUF file, in order."""

    def caches(self, config: Any, window: int | None) -> list[CacheShape]:
        """Return the shapes of its own KV caches; `window` limits global layers
        (`--draft-window`)."""

    def check_pair(self, config: Any, target: Any) -> None:
        """Raise InputError unless the draft fits a target (its gemma4.Config)."""

    def token_ids(self, config: Any, file: GGUF) -> dict[str, Any]:
        """Return the token ids in the file outside its index tensors, by the key that contains
        them."""
