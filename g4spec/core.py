"""The objects that pass between the engine, the models and the backends. Read this first.

A *sequence* is one text that is being generated. It owns a *slot* (its place in everything that has
a fixed size for each live sequence: rings of layers with a window, the state of a draft) and some
*pages* of the pool in which layers without a window keep their keys and values. A *batch* is the
rows of one forward pass; each row knows its token, its position and its slot, and nothing below the
engine knows of more. The numbers of a row depend on its sequence alone, never on its company.

A *step* is one pass of the target over the newest token of each sequence (its *anchor*) and the
tokens drafted after it. A *cycle* is: propose, step, accept, commit.

Nothing here imports torch at run time, so that converting, inspecting and `--help` stay light.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from g4spec.gguf import GGUF
    from g4spec.gguf.reader import TensorInfo

MAX_STEP_ROWS = 16
"""Rows of one sequence in a step, anchor included (design decision 4)."""

MAX_DRAFT = MAX_STEP_ROWS - 1
"""Most tokens drafted per sequence and step."""

PAGE = 128
"""Positions of a page of the pool."""

PROMPT_BLOCK = 512
"""Rows of an aligned prompt block. Prompts are read in such blocks, the last one padded where a
backend needs it, so that a row's bits depend on nothing but the tokens up to the block's end, and a
prefix hit reuses whole blocks (design decision 9)."""


class Reach(NamedTuple):
    """Positions that a row of consecutive ones sees.

    Attributes:
        back: how many positions before its own, or None: from 0 on.
        from_first: count back from the first row of the sequence in the batch instead.
        to_last: see up to the last row of the sequence in the batch instead of its own.
    """

    back: int | None
    from_first: bool = False
    to_last: bool = False

    @classmethod
    def causal(cls, window: int | None) -> Reach:
        """See the last `window` positions, its own included."""
        return cls(None if window is None else window - 1)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Keys and values that one layer keeps, rows [n_kv, head_dim], for a window or all positions.

    Attributes:
        rotary_pairs: keys are the values times a weight for each column, and then only this many
            pairs (i, i + head_dim / 2) are rotated, the first ones; 0: keys are kept whole.
    """

    n_kv: int
    head_dim: int
    window: int | None
    rotary_pairs: int = 0


@dataclass(slots=True)
class Sequence:
    """One text: its tokens, how far they have been read, and what it holds of the cache.

    The scheduler writes these fields; runners and drafts read them.

    Attributes:
        slot: index into everything kept per live sequence.
        ids: prompt and chosen tokens. The newest, the anchor, has been chosen but not read.
        n_prompt: how many of `ids` are the prompt.
        n_read: how many of `ids` have their keys and values in the cache.
        pages: ids of its pages in the pool, in order of position.
        drafting: whether a draft is kept up to date for it.
        pending: steps that the target has read and the draft has not been given yet.
    """

    slot: int
    ids: list[int]
    n_prompt: int
    n_read: int = 0
    pages: list[int] = field(default_factory=list)
    drafting: bool = False
    pending: list[StepRows] = field(default_factory=list)

    @property
    def anchor(self) -> int:
        """The newest token."""
        return self.ids[-1]

    @property
    def position(self) -> int:
        """Where the anchor stands."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one forward pass. Rows of a sequence are consecutive, at consecutive positions.

    Attributes:
        ids, positions, slots: int64 [T] on the device: token, absolute position and cache slot of
            each row.
        sizes: rows of each sequence, sum T. A fixed number for a recorded graph.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def starts(self) -> tuple[int, ...]:
        """First row of each sequence."""
        return tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))

    @property
    def uniform(self) -> int:
        """Rows of every sequence; 0 where they differ."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else 0

    def at(self, positions: torch.Tensor) -> Batch:
        """The same rows at other positions [T]."""
        return replace(self, positions=positions)

    def holding(self, ids: torch.Tensor) -> Batch:
        """Other tokens [T] in the same places."""
        return replace(self, ids=ids)

    def columns(self, first: int, last: int) -> Batch:
        """Rows first .. last - 1 of every sequence. All sequences have the same number of rows."""
        n, count = self.uniform, len(self.sizes)
        assert n, self.sizes

        def cut(x: torch.Tensor) -> torch.Tensor:
            return x.view(count, n)[:, first:last].reshape(-1).contiguous()

        return Batch(cut(self.ids), cut(self.positions), cut(self.slots), (last - first,) * count)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows that the target has read, as a draft is given them.

    Attributes:
        hidden: output of the target after its final norm, [T, H].
        taps: inputs of the layers that the draft asked for, side by side, [T, n * H].
    """

    batch: Batch
    hidden: torch.Tensor
    taps: torch.Tensor

    def rows(self, first: int, last: int, sizes: tuple[int, ...]) -> StepRows:
        """Rows first .. last - 1, which belong to sequences of `sizes` rows."""
        b, cut = self.batch, slice(first, last)
        batch = Batch(b.ids[cut], b.positions[cut], b.slots[cut], sizes)
        return StepRows(batch, self.hidden[cut], self.taps[cut])


Pick = Callable[["torch.Tensor", int], "torch.Tensor"]
"""(logits [S * n, V], i) -> ids [S * n]: choose the drafted tokens i, i + 1, ... of each of S
sequences, whose rows are consecutive."""


class Draft(Protocol):
    """Anything that proposes tokens. The engine knows nothing else about it. What the other verbs
    know of a kind of draft is `g4spec.models.spec.DraftKind`; CONTRIBUTING.md has the steps.

    Attributes:
        taps: target layers whose input it is given.
        max_tokens: most tokens of a proposal.
        rows: rows a sequence that `propose` is given.
        at_once: whether a proposal costs the same for any number of tokens.
        recordable: whether what it computes depends on shapes alone, never on values, so that a
            backend may record it.
        mask: token of the rows behind the anchor in what `propose` is given.
        caches: its own key-value caches, a layer each.
        state: what it keeps per slot beside caches, tensors [slots, ...].
    """

    name: str
    taps: tuple[int, ...]
    max_tokens: int
    rows: int
    at_once: bool
    recordable: bool
    mask: int
    caches: Seq[Any]
    state: tuple[torch.Tensor, ...]

    def begin(self, slot: int, ids: Seq[int] = ()) -> None:
        """Forget what the slot held. `ids` have been read already, and the slot's caches and state
        are those of then (a prefix hit)."""

    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        """Draft `count` tokens after the anchor of each of S sequences -> ids [S, count]; from the
        first -1 on nothing is proposed.

        Args:
            batch: `rows` rows a sequence: the anchor and then `mask`. What `pick` returns
                may lie over the masks.
        """

    def commit(self, rows: StepRows, accepted: torch.Tensor) -> None:
        """Take in rows that the target has read, of which the first 1 + accepted[s] of each
        sequence are verified; called in order of position, without gaps. What is appended to
        caches for others is overwritten before it is read.

        Args:
            accepted: int64 [S].
        """


class TargetView(Protocol):
    """What a draft may use of its target."""

    @property
    def config(self) -> Any: ...

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Rows of the token table, [T] -> [T, H]; times `scale`, or else the target's own."""

    @property
    def table(self) -> Any:
        """Output table [V, H], for `Ops.logits` and `Ops.pick`."""

    def kv(self, layer: int) -> Any:
        """The cache of a target layer."""


@dataclass(slots=True)
class Cycle:
    """What one cycle did for one sequence.

    Attributes:
        tokens: newly chosen tokens; all but the last were drafted and accepted.
        logits: the target's logit of each. drafted: what was proposed. accepted: how many held.
        draft_seconds, step_seconds: time of the whole batch: proposing (bringing the draft up to
            date included), and the target's step with the choice of tokens.
        logprobs: if asked for, each token's log-probability and the likeliest (id, its own) pairs.
        draft_failed: why the draft cannot be used for this sequence any more, or None.
        error: why this sequence cannot go on (its target's logits are not finite), or None.
        share: what was planned for it and why (`g4spec.runtime.plan.Share`); None without a step.
    """

    tokens: list[int]
    logits: list[float]
    drafted: list[int] = field(default_factory=list)
    accepted: int = 0
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    draft_failed: str | None = None
    error: Exception | None = None
    share: Any = None


class Chooser(Protocol):
    """How one sequence turns logits into tokens.

    Attributes:
        sampler: `g4spec.ops.sampling.Sampler`, whose numbers a device may take over.
        on_host: choices depend on more than logits, sampler and position (penalties, masks), or
            more than the token is asked for (log-probabilities).
    """

    sampler: Any

    @property
    def on_host(self) -> bool: ...

    def pick(self, logits: torch.Tensor, position: int) -> int:
        """The drafted token for `position`, from the draft's logits [V]; NotFinite if there is
        none."""

    def choose(self, logits: torch.Tensor, drafted: Seq[int], position: int) -> Cycle:
        """The target's tokens for `position`, position + 1, ... from logits [1 + drafted, V], up to
        the first one that was not drafted, included."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a sequence does in a cycle: draft `count` tokens, choose as `chooser` does. Its pages
    reach as far as the rows of its step."""

    sequence: Sequence
    count: int
    chooser: Chooser


class Runner(Protocol):
    """Runs cycles of a target and perhaps a draft.

    Attributes:
        depth: cycles that may have been started and not asked for.
    """

    depth: int

    def takes(self, work: Seq[Work]) -> bool:
        """True if it can run this cycle."""

    def start(self, work: Seq[Work]) -> None:
        """Start a cycle. While another is under way it is of the same sequences, and each begins
        where that one will have ended."""

    def result(self) -> list[Cycle]:
        """Wait for the oldest cycle; one for each sequence, in the order of its work."""

    def drop(self) -> None:
        """Forget cycles that were started and not asked for. What they appended to caches stands
        behind the last verified position."""


class Budget(Protocol):
    """Bytes that the parts of an engine take on a device."""

    def weights(self, tensors: Iterable[TensorInfo]) -> int: ...
    def page(self, shapes: Seq[CacheShape]) -> int:
        """Of one page of the pool, all layers."""

    def slot(self, shapes: Seq[CacheShape], n_ctx: int, slack: int) -> int:
        """Of the rings of one slot."""

    def slots(self, sequences: int) -> int:
        """Slots for so many sequences, with a spare one where the device keeps one."""

    def workspace(self, config: Any, n_ctx: int, chunk: int, sequences: int) -> int:
        """Of a prompt's chunk, or of a step of so many sequences."""

    def available(self) -> int: ...


class Backend(Protocol):
    """A device: what loads, allocates and records. What computes is its `ops`.

    Attributes:
        ops: `g4spec.ops.reference.Ops`, the vocabulary that models are written in.
        chunk: rows of a prompt that are read at a time, a multiple of PROMPT_BLOCK.
        padded: whether the sequences of a step all pay for as many rows as the longest.
        budget: bytes on the device.
    """

    ops: Any
    name: str
    title: str
    chunk: int
    padded: bool

    @property
    def budget(self) -> Budget: ...

    def enter(self) -> None:
        """Make the calling thread use this device."""

    def load(self, file: GGUF, name: str) -> Any:
        """Tensor `name` as the ops compute with it."""

    def space(self, n_slots: int, n_ctx: int, n_pages: int) -> Any:
        """The table of slots and pages (`g4spec.ops.kv.Space`)."""

    def slack(self, chunk: int) -> int:
        """Rows that a ring needs beyond its window to read chunks of this size."""

    def cache(self, shape: CacheShape, space: Any, slack: int) -> Any:
        """An empty cache of one layer (`g4spec.ops.kv.LayerKV`)."""

    def read(self, target: Any, slot: int, ids: Seq[int], start: int) -> StepRows:
        """Run prompt tokens at positions start ..., a multiple of PROMPT_BLOCK, appending to the
        slot's caches; no logits. Bits of a row depend on nothing but the tokens up to the end of
        its block."""

    def commit(self, draft: Draft, rows: StepRows) -> None:
        """Give a draft the rows that `read` returned. As exact as they are."""

    def sampler(self, sampler: Any) -> Any:
        """What chooses tokens from raw logits on this device as `sampler` says
        (`g4spec.ops.logits.RowSampler`)."""

    def runners(self, target: Any, draft: Draft | None) -> Seq[Runner]:
        """Runners in order of preference; the last one takes any work."""
