"""A target and a draft as one sequence sees them, in slot 0: for tests that walk along a text."""

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
from g4spec.runtime.engine import Engine
from g4spec.runtime.target import Target, batch_of


def make_target(
    config: Any, weights: Any, n_ctx: int = 512, chunk: int = 64, backend: Any = None
) -> Target:
    """A target with one slot, all of whose pages are its own."""
    backend = backend or TorchBackend()
    space = backend.space(1, n_ctx, Space.single(n_ctx).n_pages)
    space.assign(0, range(1, space.n_pages + 1))
    return Target(config, weights, backend, space, chunk)


@dataclass
class StepOutput:
    """Logits [T, V] of a step, and its rows."""

    logits: torch.Tensor
    read: StepRows


def taken(engine: Engine) -> tuple[One, Drafting]:
    """Slot 0 of a new engine and all pages that a context needs, for good."""
    engine.pool.free_slots.remove(0)
    engine.pool.grow(Sequence(0, [], 0), engine.n_ctx)
    assert engine.draft is not None
    return One(engine.target), Drafting(engine.draft, engine.target)


@contextmanager
def alone(engine: Engine) -> Iterator[One]:
    """Slot 0 of an idle engine, with all pages that a context needs."""
    pool = engine.pool
    pool.free_slots.remove(0)
    sequence = Sequence(0, [], 0)
    pool.grow(sequence, engine.n_ctx)
    try:
        yield One(engine.target)
    finally:
        pool.free_sequence(sequence)


@contextmanager
def borrowed(engine: Engine) -> Iterator[tuple[One, Drafting]]:
    """The same with the engine's draft."""
    assert engine.draft is not None
    with alone(engine) as one:
        yield one, Drafting(engine.draft, engine.target)


class One:
    """Runs one sequence of a target by position; everything else is the target's."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Changes are made to the target."""
        if name == "target":
            object.__setattr__(self, name, value)
        else:
            setattr(self.target, name, value)

    def read(self, ids: Seq[int], start: int) -> StepRows:
        """Rows of tokens at positions start ..., without logits."""
        return self.target.forward(batch_of(self.target.ops, [(0, start, list(ids))]))

    def step(self, ids: Seq[int], start: int) -> StepOutput:
        """A step of tokens at positions start ...."""
        rows, logits = self.target.step(batch_of(self.target.ops, [(0, start, list(ids))]))
        return StepOutput(logits, rows)

    def prefill(self, ids: Seq[int]) -> Iterator[StepRows]:
        """Read a prompt, a chunk at a time."""
        for start in range(0, len(ids), self.target.chunk):
            part = list(ids[start : start + self.target.chunk])
            yield self.target.backend.read(self.target, 0, part, start)


class Drafting:
    """Drafts for one sequence; everything else is the draft's.

    Args:
        target: whose slot 0 it is.
    """

    def __init__(self, draft: Draft, target: Target) -> None:
        self.draft, self.target = draft, target
        self.begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.draft, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Changes are made to the draft."""
        if name in ("draft", "target"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.draft, name, value)

    def begin(self) -> None:
        """Start a new sequence."""
        self.draft.begin(0)

    def commit(self, rows: StepRows, n: int | None = None) -> None:
        """Give the draft the first `n` rows of a step, all of which are verified."""
        n = len(rows.batch) if n is None else n
        part = rows.rows(0, n, (n,))
        self.draft.commit(part, part.batch.ids.new_tensor([n - 1]))

    def reject(self, rows: StepRows, n: int) -> None:
        """Give the draft all rows of a step, of which the first `n` are verified."""
        self.draft.commit(rows, rows.batch.ids.new_tensor([n - 1]))

    def propose(self, anchor: int, position: int, count: int, chooser: Any = None) -> list[int]:
        """Tokens drafted after `anchor` at `position`; `chooser`: as `Sampler`."""
        chooser, draft = chooser or Sampler(), self.draft
        row = [anchor, *[draft.mask] * (draft.rows - 1)]
        batch = batch_of(self.target.ops, [(0, position, row)])

        def pick(logits: torch.Tensor, at: int) -> torch.Tensor:
            ids = [chooser.choose(z, position + 1 + at + i) for i, z in enumerate(logits)]
            return self.target.ops.ids(ids)

        ids: list[int] = draft.propose(batch, count, pick)[0].tolist()
        return ids[: ids.index(-1)] if -1 in ids else ids
