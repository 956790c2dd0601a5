"""The words in which targets and drafts describe themselves.

A *noun* file in this package (gemma4, dflash, assistant, ngram) says what one kind of model is:
how its checkpoint is recognised, its hyperparameters, its tensors under both names, and its
forward pass written with :class:`g4spec.ops.reference.Ops`. Nothing here imports torch at run time,
so that converting, inspecting and `--help` stay light.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from g4spec.errors import InputError

if TYPE_CHECKING:
    from g4spec.core import CacheShape
    from g4spec.gguf import GGUF, KV

GEMMA_STOP_IDS = frozenset({1, 106, 50})
"""`<eos>`, `<turn|>`, `<|tool_response>`; a file's own stop ids are added to these."""

Role = Literal["matrix", "embed", "output", "vector", "index"]
"""What a tensor is for, which decides its type: `matrix`, `embed` and `output` are quantized,
`vector` (norms, scales) stays F32, `index` stays an integer."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the converted file.

    Attributes:
        name: GGUF tensor name.
        shape: PyTorch order, `[out, in]` for matrices.
        source: name in the checkpoint after its prefix was stripped, or None when the tensor is
            made at conversion.
        make: `rule` name of a value made or changed at conversion: "rope_freqs" (from the
            configuration) or "absolute_d2t" (delta to absolute ids). None: copied.
        optional: the file may lack it.
        pairs: head size if rows of each head go from halves (0, 1, ...) to neighbouring pairs
            (0, d/2, 1, d/2 + 1, ...), as the rotation of upstream's Llama kind wants them.
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
    """A checkpoint tensor that is left out on purpose, and why."""

    pattern: str  # regular expression matched against the whole stripped name
    reason: str
    same_as: str | None = None  # stripped name of the tensor that it must repeat, byte for byte


QUANTIZED_ACTIVATIONS = Drop(
    r".*\.(input|output|[qkv])_(scale|zero_point|global_scale)",
    "activations are computed in full precision here",
)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs between the layers of one model.

    Attributes:
        window: sliding window in tokens, counting the query itself; None attends to everything.
        causal: whether rows of one block see only earlier rows (always true in targets).
        v_from_k: the value is the key projection before norm and rotation (no `attn_v`).
        rope_base: theta. `rope_partial`: rotated share of the head, 1.0 rotates all of it.
        kv_from: earlier layer whose keys and values are read; None: the layer has its own.
        n_ple: values that the token's per-layer embedding adds to this layer; 0: it has none.
        n_expert, n_expert_used, n_ff_expert: experts beside the dense feed-forward, how many a
            token visits, and their width; 0: none. `split_experts`: their gate and up rows lie in
            two tensors, as in older files, not in one.

    Raises InputError where nothing could rotate such heads or choose such experts.
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
        """Pairs of a head that rotate, the first ones."""
        return int(self.rope_partial * self.head_dim / 2)


def check_heads(layers: Iterable[LayerSpec]) -> None:
    """Raise InputError unless the query heads of each layer divide among those of its keys."""
    for spec in layers:
        if spec.n_kv < 1 or spec.n_head < 1 or spec.n_head % spec.n_kv:
            raise InputError(
                f"layer {spec.index}: heads of queries",
                expected=f"a multiple of those of keys, {spec.n_kv}",
                found=spec.n_head,
            )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A source as `models/` sees it: parsed configuration and tensor names, no file access.

    Attributes:
        config: the parsed `config.json`.
        tensors: name as stored -> (shape in PyTorch order, dtype string of safetensors).
        generation: the parsed `generation_config.json`, or an empty dict.

    Raises InputError where the configuration's outline is not what every kind expects of it.
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


def stop_ids(*sources: Iterable[int]) -> frozenset[int]:
    """Union of Gemma's stop ids and those that a file or configuration names."""
    return GEMMA_STOP_IDS.union(*sources)


class DraftConfig(Protocol):
    """What every verb may read of a draft's configuration.

    Attributes:
        arch: `general.architecture` of its file.
        layers: those with attention, or none.
    """

    arch: str
    n_vocab: int
    n_embd: int

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...


class DraftKind(Protocol):
    """What a file of `g4spec/models/` has that is a kind of draft. `Drafter` is its draft, called
    as `models.drafter.WeightedDrafter` is.

    Where it needs them it also has:
        NAME, MARKS: name of the kind and tensors that no other kind has, where kinds share ARCH.
        ARCHS: all architectures of its files, with `upstream.OWN` behind what upstream must refuse.
        ALIASES: other spellings of tensor names in checkpoints -> usual ones.
        CONFIDENCE: ends of the names of tensors that say how sure the draft is of a token.
        notes(checkpoint): what users should know about a checkpoint's configuration.
        metadata_tensors(config): tensors that become metadata (see `models.assistant`).

    Attributes:
        ARCH: `general.architecture` of its files. TITLE: what people call it.
        PREFIXES: what is stripped from the names of a checkpoint's tensors, the first that fits.
        DROPS: checkpoint tensors that are left out on purpose.
        LIMITS: `upstream.Limit` of each property that upstream computes otherwise.
    """

    ARCH: str
    TITLE: str
    PREFIXES: tuple[str, ...]
    DROPS: tuple[Drop, ...]
    LIMITS: tuple[Any, ...]
    Drafter: Any

    def claims(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint is of this kind and no other."""

    def parse_hf(self, checkpoint: Checkpoint, target: Any) -> DraftConfig:
        """Configuration of a checkpoint; `target` is its gemma4.Config. InputError or Unsupported
        for what is missing, wrong or not implemented."""

    def parse_gguf(
        self, kv: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]
    ) -> DraftConfig:
        """The same from metadata and tensor shapes (PyTorch order) of a GGUF file."""

    def metadata(self, config: Any) -> KV:
        """Keys from which `parse_gguf` reads the same configuration."""

    def tensors(self, config: Any) -> list[TensorSpec]:
        """Every tensor of the GGUF file, in order."""

    def caches(self, config: Any, window: int | None) -> list[CacheShape]:
        """Caches of its own; `window` bounds those of layers without one (`--draft-window`)."""

    def check_pair(self, config: Any, target: Any) -> None:
        """InputError unless the draft fits a target (its gemma4.Config)."""

    def token_ids(self, config: Any, file: GGUF) -> dict[str, Any]:
        """Tokens that the file names outside its index tensors, by what names them."""
