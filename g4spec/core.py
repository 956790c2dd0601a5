"""Data structures and protocols shared by the engine, the models and the backends. Read this first.

A *sequence* is a running request. It owns a *slot*, an index into everything that has a fixed size
per running sequence (ring buffers of sliding-window layers, state of the draft), and *pages* of the
pool that holds the KV cache of global layers. A *batch* is the rows of one forward pass. Each row
has a token, a position and a slot; code below the engine knows nothing else about sequences. The
result of a row depends on its own sequence only, never on the rest of the batch.

A *step* is one forward pass of the target over the newest token of each sequence, its *anchor*, and
the tokens drafted after it. A *cycle* is: propose, step, accept, commit.

What a device provides is `g4spec.backend`. Neither module imports torch at run time, so that
`convert`, `inspect` and `--help` start fast.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


MAX_STEP_ROWS = 16
"""Maximum number of rows of one sequence in a step, including the anchor."""

MAX_DRAFT = MAX_STEP_ROWS - 1
"""Maximum number of drafted tokens per sequence and step."""

PAGE = 128
"""Number of positions in a page of the pool."""

PROMPT_BLOCK = 512
"""Number of rows in an aligned prompt block. Prefill computes whole blocks and pads the last one
where the backend needs it. So the bits of a row depend only on the tokens up to the end of its
block, and the prefix cache reuses whole blocks."""


class Reach(NamedTuple):
    """The range of positions that a row attends to.

    Attributes:
        back: number of positions before its own; None: all, from position 0 on.
        from_first: count `back` from the first row of the sequence in the batch instead.
        to_last: attend up to the last row of the sequence in the batch instead of its own.
    """

    back: int | None
    from_first: bool = False
    to_last: bool = False

    @classmethod
    def causal(cls, window: int | None) -> Reach:
        """Return causal attention over the last `window` positions, including its own."""
        return cls(None if window is None else window - 1)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of the KV cache of one layer: rows [n_kv, head_dim] of a window or of all positions.

    Attributes:
        window: size of the sliding window; None for a global layer.
        rotary_pairs: for K=V layers: keys are the values times a weight per column, and RoPE
            rotates only the first `rotary_pairs` pairs (i, i + head_dim / 2), so only those are
            stored. 0: keys are stored whole.
    """

    n_kv: int
    head_dim: int
    window: int | None
    rotary_pairs: int = 0


@dataclass(slots=True)
class Sequence:
    """A running request: its tokens and its part of the KV cache. The scheduler writes these
    fields; runners and drafts read them.

    Attributes:
        slot: index into everything kept per running sequence.
        ids: prompt and generated tokens. The newest one, the anchor, is not in the KV cache yet.
        n_prompt: number of prompt tokens in `ids`.
        n_read: number of tokens of `ids` whose keys and values are in the cache.
        pages: ids of its pages in the pool, in order of position.
        drafting: whether the draft is kept up to date for it.
        pending: numbers of its rows that the draft has not been given yet
            (`g4spec.runtime.pending_rows`). They end at position n_read - 1.
    """

    slot: int
    ids: list[int]
    n_prompt: int
    n_read: int = 0
    pages: list[int] = field(default_factory=list)
    drafting: bool = False
    pending: list[int] = field(default_factory=list)

    @property
    def anchor(self) -> int:
        """The newest token."""
        return self.ids[-1]

    @property
    def position(self) -> int:
        """Position of the anchor."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward pass. Rows of one sequence are adjacent, at consecutive positions.

    Attributes:
        ids, positions, slots: int64 [T] on the device: token, absolute position and slot of each
            row.
        sizes: number of rows of each sequence, T in total. Constant in a recorded CUDA graph.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return self.ids.size(0)  # a tenth of the time of a tensor's `len`

    @property
    def starts(self) -> tuple[int, ...]:
        """Index of the first row of each sequence."""
        return tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))

    @property
    def rows_per_sequence(self) -> int:
        """Number of rows per sequence if it is the same for all, else 0."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else 0

    def with_positions(self, positions: torch.Tensor) -> Batch:
        """Return the same rows at other positions [T]."""
        return replace(self, positions=positions)

    def with_ids(self, ids: torch.Tensor) -> Batch:
        """Return the same rows with other tokens [T]."""
        return replace(self, ids=ids)

    def part(self, rows: slice) -> Batch:
        """Return these rows, which belong to one sequence."""
        ids = self.ids[rows]
        return Batch(ids, self.positions[rows], self.slots[rows], (ids.size(0),))

    def columns(self, first: int, last: int) -> Batch:
        """Return rows first .. last - 1 of every sequence; all have the same number."""
        n, count = self.rows_per_sequence, len(self.sizes)
        assert n, self.sizes

        def cut(x: torch.Tensor) -> torch.Tensor:
            return x.view(count, n)[:, first:last].reshape(-1).contiguous()

        return Batch(cut(self.ids), cut(self.positions), cut(self.slots), (last - first,) * count)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows that the target has computed, with the features that a draft reads.

    Attributes:
        hidden: output of the target after its final norm, [T, H].
        taps: inputs of the target layers `Draft.taps`, concatenated, [T, n * H].
    """

    batch: Batch
    hidden: torch.Tensor
    taps: torch.Tensor

    def rows(self, first: int, last: int, sizes: tuple[int, ...]) -> StepRows:
        """Return rows first .. last - 1; `sizes` is the number of rows of each sequence in them."""
        b, cut = self.batch, slice(first, last)
        batch = Batch(b.ids[cut], b.positions[cut], b.slots[cut], sizes)
        return StepRows(batch, self.hidden[cut], self.taps[cut])

    def clone(self) -> StepRows:
        """Return a copy in memory of its own."""
        b = self.batch
        batch = Batch(b.ids.clone(), b.positions.clone(), b.slots.clone(), b.sizes)
        return StepRows(batch, self.hidden.clone(), self.taps.clone())


Pick = Callable[["torch.Tensor", int], "torch.Tensor"]
"""(logits [S * n, V], i) -> ids [S * n]: choose the drafted tokens i .. i + n - 1 of each of S
sequences. The n rows of a sequence are adjacent."""


class Draft(Protocol):
    """A draft as the engine sees it. Other commands use `g4spec.models.spec.DraftKind`.
    CONTRIBUTING.md lists the steps to add one.

    Attributes:
        taps: target layers whose inputs it reads.
        max_tokens: maximum number of tokens of a proposal.
        rows: number of rows per sequence that `propose` is given.
        one_pass: whether a proposal of one sequence costs the same for any number of tokens.
        commit_rows: maximum number of rows per sequence of a `commit` after several steps.
        recordable: whether the kernels that it launches depend on shapes only, not on values, so
            that a backend may record them as a CUDA graph.
        mask: token of the rows after the anchor in the batch of `propose`.
        caches: its own KV caches, one per layer.
        state: other state per slot, tensors [slots, ...].
    """

    name: str
    taps: tuple[int, ...]
    max_tokens: int
    rows: int
    one_pass: bool
    commit_rows: int
    recordable: bool
    mask: int
    caches: Seq[Any]
    state: tuple[torch.Tensor, ...]

    def begin(self, slot: int, ids: Seq[int] = ()) -> None:
        """Reset the slot. After a prefix hit, `ids` are the tokens whose caches and state have been
        restored into the slot."""

    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        """Draft `count` tokens after the anchor of each of S sequences.

        Args:
            batch: `rows` rows per sequence: the anchor, then `mask` tokens.
            pick: chooses tokens from logits. Its result may overwrite the mask tokens.

        Returns:
            ids [S, count]; -1 marks the end of a shorter proposal.
        """

    def commit(self, rows: StepRows, accepted: torch.Tensor) -> None:
        """Update the draft with rows that the target has computed.

        Called in order of position, without gaps. Only the first 1 + accepted[s] rows of sequence s
        are final; cache entries of the others are overwritten before they are read.

        Args:
            accepted: number of accepted drafted tokens of each sequence, int64 [S].
        """


class TargetView(Protocol):
    """The parts of the target that a draft may use."""

    @property
    def config(self) -> Any: ...

    def embed(self, ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Return token embeddings, [T] -> [T, H], times `scale` (default: the target's own)."""

    @property
    def table(self) -> Any:
        """Output projection [V, H], for `Ops.logits` and `Ops.pick`."""

    def kv(self, layer: int) -> Any:
        """Return the KV cache of a target layer."""


Logprobs = tuple[float, list[tuple[int, float]]]
"""The log-probability of a token, and the top (id, log-probability) pairs in its place."""


@dataclass(slots=True)
class Cycle:
    """The result of one cycle for one sequence.

    Attributes:
        tokens: new tokens; all but the last were drafted and accepted.
        logits: the target's logit of each new token.
        drafted: the proposed tokens.
        accepted: number of accepted drafted tokens.
        draft_seconds, step_seconds: time of the whole batch for proposing (including the update of
            the draft), and for the target's step including sampling.
        logprobs: if requested: for each token its log-probability and the top (id, log-probability)
            pairs.
        draft_failed: why the draft cannot be used for this sequence any more, or None.
        error: why this sequence has to end after `tokens` (logits that are not finite), or None.
        decision: the planned draft length, and why (`g4spec.runtime.draft_decision.DraftDecision`);
            None without a step.
    """

    tokens: list[int]
    logits: list[float]
    drafted: list[int] = field(default_factory=list)
    accepted: int = 0
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    logprobs: list[Logprobs] = field(default_factory=list)
    draft_failed: str | None = None
    error: Exception | None = None
    decision: Any = None

    def count_wait(self, seconds: float) -> None:
        """Set `step_seconds`, given the seconds from the start of the cycle to its result. The
        longer time counts: the cycle may have run before this wait, or waited for the host."""
        self.step_seconds = max(seconds - self.draft_seconds, self.step_seconds)


class Chooser(Protocol):
    """Turns logits into tokens for one sequence.

    Attributes:
        sampler: sampling settings (`g4spec.ops.sampling.Sampler`), which a GPU can apply itself.
        on_host: whether tokens must be chosen on the host, because the choice depends on more than
            logits, sampler and position (penalties, masks) or returns more (log-probabilities).
    """

    sampler: Any

    @property
    def on_host(self) -> bool: ...

    def pick(self, logits: torch.Tensor, position: int) -> int:
        """Choose the drafted token for `position` from the draft's logits [V].

        Raises:
            NotFinite: a logit is not finite.
        """

    def choose(self, logits: torch.Tensor, drafted: Seq[int], position: int) -> Cycle:
        """Choose the target's tokens for `position`, position + 1, ..., from logits
        [1 + drafted, V], up to and including the first one that differs from the draft."""


@dataclass(frozen=True, slots=True)
class Work:
    """The part of one sequence in a cycle: draft `count` tokens and choose tokens with `chooser`.
    The sequence must already have pages for all rows of the step. `whole`: step over `count` tokens
    also if the draft proposes fewer (for measurements)."""

    sequence: Sequence
    count: int
    chooser: Chooser
    whole: bool = False


class Runner(Protocol):
    """Runs cycles of a target, with or without a draft.

    Attributes:
        depth: maximum number of cycles that are started but whose result has not been fetched.
    """

    depth: int

    def can_run(self, work: Seq[Work]) -> bool:
        """Return True if this runner can run the cycle."""

    def start(self, work: Seq[Work]) -> None:
        """Start a cycle. If another cycle is still running, it must have the same sequences, and
        each sequence continues where that cycle will end."""

    def result(self) -> list[Cycle]:
        """Wait for the oldest cycle; return a `Cycle` per sequence, in the order of its work."""

    def drop(self) -> None:
        """Discard cycles whose results were not fetched. Their cache entries are after the last
        verified position, so they are never read."""
