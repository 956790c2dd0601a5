"""The words in which targets and drafts describe themselves.

A *noun* file in this package (gemma4, dflash, assistant, ngram) says what one kind of model is:
how its checkpoint is recognised, its hyperparameters, its tensors under both names, and its
forward pass written with :class:`g4spec.ops.reference.Ops`. Nothing here imports torch at run time,
so that converting, inspecting and `--help` stay light.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from g4spec.errors import InputError

if TYPE_CHECKING:
    import torch

MAX_STEP_ROWS = 16
"""Rows of one verification step, anchor included (design decision 4)."""

MAX_DRAFT = MAX_STEP_ROWS - 1
"""Most tokens drafted per step."""

GEMMA_STOP_IDS = frozenset({1, 106, 50})
"""`<eos>`, `<turn|>`, `<|tool_response>`; a file's own stop ids are added to these."""

Role = Literal["matrix", "embed", "output", "vector", "index"]
"""What a tensor is for, which decides its type: `matrix`, `embed` and `output` are quantized,
`vector` (norms, scales) stays F32, `index` stays an integer."""


class Reach(NamedTuple):
    """Which positions a row of consecutive ones sees.

    Attributes:
        back: how many positions in front of its own, or None: from 0 on.
        from_first: in front of the first row's position instead.
        to_last: up to the last row's position instead of its own.
    """

    back: int | None
    from_first: bool = False
    to_last: bool = False

    @classmethod
    def causal(cls, window: int | None) -> Reach:
        """The last `window` positions, its own included."""
        return cls(None if window is None else window - 1)


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


QUANTIZED_ACTIVATIONS = Drop(r".*\.(input|output|[qkv])_(scale|zero_point|global_scale)",
                             "activations are computed in full precision here")  # fmt: skip


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

    @property
    def turning(self) -> int:
        """Pairs of a head that rotate, the first ones."""
        return int(self.rope_partial * self.head_dim / 2)


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
            raise InputError("config.json: architectures", expected="a list of names",
                             found=f"{names!r:.80}")  # fmt: skip
        text = self.config.get("text_config")
        if text is not None and not isinstance(text, dict):
            raise InputError("config.json: text_config", expected="an object",
                             found=f"{text!r:.80}")  # fmt: skip


@dataclass(slots=True)
class Committed:
    """Tokens that the target has verified, handed to a draft after prefill chunks and steps.

    Attributes:
        ids: the tokens, [n]. `start`: position of the first.
        hidden: target output after its final norm, [n, H].
        taps: concatenated layer inputs that the draft asked for, [n, len(taps) * H]; empty
            second dimension when it asked for none.
    """

    ids: Sequence[int]
    start: int
    hidden: torch.Tensor
    taps: torch.Tensor


@dataclass(frozen=True, slots=True)
class Unseen:
    """A step's rows as they lie on a device, which of them are verified included.

    Attributes:
        ids, positions: of each row, [T]. hidden, taps: see `Committed`.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor
    taps: torch.Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Keys and values one layer keeps: rows [n_kv, head_dim] for a window, or for all positions.

    Attributes:
        turning: keys are the values times a weight for each column, and then only this many pairs
            (i, i + head_dim / 2) turn, the first ones; 0: they are other vectors, or all turns.
    """

    n_kv: int
    head_dim: int
    window: int | None
    turning: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """What an attention sublayer projects its input with.

    Attributes:
        q, k, v: weights [n * head_dim, H]. Without `k` the layer reads the keys and values of
            another; without `v` (but with `k`) the value is the key projection before norm and
            rotation.
        q_norm, k_norm: weights [head_dim] of the norm of each head, or None. `v_norm`: whether
            values are normed (without weight).
        freqs: radians a position, [head_dim / 2]. `pairs`: which pairs turn together: neighbours
            (2 i, 2 i + 1), or else halves (i, i + head_dim / 2).
    """

    q: Any
    k: Any
    v: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    v_norm: bool
    head_dim: int
    eps: float
    freqs: torch.Tensor
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """What a layer with experts does after its attention. Norms are weights [H].

    Attributes:
        post_attention, ffn_norm, post: norms of attention's result, of what the dense branch
            reads, and of both branches' sum.
        gate, up, down: the dense branch, [I, H] twice and [H, I]. post_dense: norm of its result.
        router: [E, H], of rows normed with `router_norm`. gains: [E]. n_used: experts of a row.
        expert_norm, post_experts: norms of what experts read, and of their sum.
        gate_exps, up_exps: [E, I, H]; or all of it in `gate_exps` [E, 2 I, H].
        down_exps: [E, H, I].
    """

    post_attention: torch.Tensor
    ffn_norm: torch.Tensor
    post: torch.Tensor
    gate: Any
    up: Any
    down: Any
    post_dense: torch.Tensor
    router: torch.Tensor
    router_norm: torch.Tensor
    gains: torch.Tensor
    n_used: int
    expert_norm: torch.Tensor
    post_experts: torch.Tensor
    gate_exps: Any
    up_exps: Any
    down_exps: Any
    eps: float


class Chooser(Protocol):
    """Turns logits into a token; the same object serves the target and the draft."""

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """`logits` [V] float32 for the token at absolute `position`."""
        ...

    def choose_rows(self, logits: torch.Tensor, position: int) -> Iterator[int]:
        """Tokens for `position`, `position` + 1, ... from logits [T, V]; NotFinite where they
        cannot be told, when that row is asked for."""
        ...


class Draft(Protocol):
    """Anything that proposes tokens. The loop knows nothing else about it."""

    name: str
    taps: tuple[int, ...]
    max_tokens: int

    def reset(self) -> None:
        """Forget the sequence."""
        ...

    def propose(self, anchor: int, position: int, count: int, chooser: Chooser) -> list[int]:
        """At most `count` tokens for positions `position + 1 ...`; `anchor` is the newest token,
        at `position`, which the target has chosen but not yet read."""
        ...

    def commit(self, step: Committed) -> None:
        """The target has read `step.ids`; called in order, without gaps."""
        ...


Pick = Callable[["torch.Tensor", int], "torch.Tensor"]
"""(logits [T, V], i) -> ids [T] of the drafted tokens i, i + 1, ..."""


@runtime_checkable
class Recordable(Draft, Protocol):
    """A draft that can do without the host: what it computes depends on shapes, never on values.

    Attributes:
        recordable: whether it can, with the file it was made from.
        at_once: whether a proposal costs the same for any number of tokens.
        mask: the token that `fill` is given where nothing is drafted yet.
    """

    recordable: bool
    at_once: bool
    mask: int

    def fill(
        self, ids: torch.Tensor, positions: torch.Tensor, count: int, pick: Pick
    ) -> torch.Tensor:
        """`propose`: the drafted tokens [count].

        Args:
            ids: [16], the anchor and then masks; `positions`: of these. What `pick` returns may
                lie over the masks.
            pick: the chooser.
        """
        ...

    def take(self, rows: Unseen, accepted: torch.Tensor) -> None:
        """`commit` of a step's rows, of which the first 1 + `accepted` [1] are verified. What is
        appended for others is overwritten before it counts."""
        ...


class TargetView(Protocol):
    """What a draft may use of its target."""

    @property
    def config(self) -> Any: ...

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Rows of the token table, [T] -> [T, H]; times `scale`, or else the target's own."""
        ...

    @property
    def table(self) -> Any:
        """Output table [V, H], for `Ops.logits` and `Ops.pick`."""
        ...

    def kv(self, layer: int) -> Any:
        """The `LayerKV` of a target layer."""
        ...


def stop_ids(*sources: Iterable[int]) -> frozenset[int]:
    """Union of Gemma's stop ids and those that a file or configuration names."""
    return GEMMA_STOP_IDS.union(*sources)
