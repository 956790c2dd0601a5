"""A target and a draft with a single sequence in slot 0, addressed by position."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from g4spec.core import Draft, Sequence, StepRows
from g4spec.ops.kv import Space
from g4spec.ops.sampling import Sampler
from g4spec.runtime.backend import TorchBackend
from g4spec.runtime.batches import batch_of
from g4spec.runtime.engine import Engine
from g4spec.runtime.target import Target


def make_target(
    config: Any, weights: Any, n_ctx: int = 512, chunk: int = 64, backend: Any = None
) -> Target:
    """Return a target with one slot that owns all pages."""
    backend = backend or TorchBackend()
    space = backend.space(1, n_ctx, Space.single(n_ctx).n_pages)
    space.assign(0, range(1, space.n_pages + 1))
    return Target(config, weights, backend, space, chunk)


@dataclass
class StepOutput:
    """Logits [T, V] of a step, and its rows."""

    logits: torch.Tensor
    read: StepRows


def claim_slot(engine: Engine) -> tuple[SequenceTarget, SequenceDraft]:
    """Claim slot 0 of a new engine, with the pages of a full context, and do not release it."""
    engine.pool.free_slots.remove(0)
    engine.pool.grow(Sequence(0, [], 0), engine.n_ctx)
    assert engine.draft is not None
    return SequenceTarget(engine.target), SequenceDraft(engine.draft, engine.target)


@contextmanager
def single_sequence(engine: Engine) -> Iterator[SequenceTarget]:
    """Claim slot 0 of an idle engine, with the pages of a full context, and release it at the
    end."""
    pool = engine.pool
    pool.free_slots.remove(0)
    sequence = Sequence(0, [], 0)
    pool.grow(sequence, engine.n_ctx)
    try:
        yield SequenceTarget(engine.target)
    finally:
        pool.free_sequence(sequence)


@contextmanager
def single_sequence_with_draft(engine: Engine) -> Iterator[tuple[SequenceTarget, SequenceDraft]]:
    """As `single_sequence`, with the engine's draft."""
    assert engine.draft is not None
    with single_sequence(engine) as one:
        yield one, SequenceDraft(engine.draft, engine.target)


class SequenceTarget:
    """Runs one sequence of a target. Other attributes are the target's."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the target."""
        if name == "target":
            object.__setattr__(self, name, value)
        else:
            setattr(self.target, name, value)

    def read(self, ids: Seq[int], start: int) -> StepRows:
        """Return the rows of tokens from position `start`, without logits."""
        return self.target.forward(batch_of(self.target.ops, [(0, start, list(ids))]))

    def step(self, ids: Seq[int], start: int) -> StepOutput:
        """Run a step of tokens from position `start`."""
        rows, logits = self.target.step(batch_of(self.target.ops, [(0, start, list(ids))]))
        return StepOutput(logits, rows)

    def prefill(self, ids: Seq[int]) -> Iterator[StepRows]:
        """Read a prompt, one chunk at a time."""
        for start in range(0, len(ids), self.target.chunk):
            part = list(ids[start : start + self.target.chunk])
            yield self.target.backend.read(self.target, 0, part, start)


class SequenceDraft:
    """Drafts for one sequence. Other attributes are the draft's.

    Args:
        target: target whose slot 0 holds the sequence.
    """

    def __init__(self, draft: Draft, target: Target) -> None:
        self.draft, self.target = draft, target
        self.begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.draft, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the draft."""
        if name in ("draft", "target"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.draft, name, value)

    def begin(self) -> None:
        """Start a new sequence."""
        self.draft.begin(0)

    def commit(self, rows: StepRows, n: int | None = None) -> None:
        """Commit the first `n` rows of a step (default: all), all of them accepted."""
        n = len(rows.batch) if n is None else n
        part = rows.rows(0, n, (n,))
        self.draft.commit(part, part.batch.ids.new_tensor([n - 1]))

    def reject(self, rows: StepRows, n: int) -> None:
        """Commit a step of which only the first `n` rows are accepted."""
        self.draft.commit(rows, rows.batch.ids.new_tensor([n - 1]))

    def propose(self, anchor: int, position: int, count: int, chooser: Any = None) -> list[int]:
        """Return the tokens drafted after `anchor` at `position`; `chooser`: as `Sampler`."""
        chooser, draft = chooser or Sampler(), self.draft
        row = [anchor, *[draft.mask] * (draft.rows - 1)]
        batch = batch_of(self.target.ops, [(0, position, row)])

        def pick(logits: torch.Tensor, at: int) -> torch.Tensor:
            ids = [chooser.choose(z, position + 1 + at + i) for i, z in enumerate(logits)]
            return self.target.ops.ids(ids)

        ids: list[int] = draft.propose(batch, count, pick)[0].tolist()
        return ids[: ids.index(-1)] if -1 in ids else ids
