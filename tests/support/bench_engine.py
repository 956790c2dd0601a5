"""An engine in memory for benchmark tests: random target, any draft, one token per character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from g4spec.core import MAX_STEP_ROWS, Batch, Draft, Pick, StepRows
from g4spec.measure.prompts import BenchPrompt
from g4spec.models import ngram
from g4spec.runtime import chooser
from g4spec.runtime.engine import Engine
from tests.support import memory_engine
from tests.support.memory_engine import Characters

__all__ = ["Characters", "ConstantDraft", "engine", "prompts"]


class ConstantDraft:
    """A draft that always proposes the same token."""

    name = "constant"
    taps: tuple[int, ...] = ()
    max_tokens = 15
    rows = 1
    one_pass = True
    commit_rows = MAX_STEP_ROWS
    recordable = False
    mask = 0
    caches: Sequence[Any] = ()
    state: tuple[torch.Tensor, ...] = ()

    def begin(self, slot: int, ids: Sequence[int] = ()) -> None: ...
    def commit(self, rows: StepRows, accepted: torch.Tensor) -> None: ...
    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        return batch.ids.new_full((len(batch.sizes), count), 3)


def engine(draft: Draft | None = None, n_ctx: int = 512, parallel: int = 1) -> Engine:
    """Return an engine with a random target and `draft` (default: n-gram lookup)."""
    return memory_engine.engine(
        lambda target: draft or ngram.Drafter(), n_ctx=n_ctx, parallel=parallel
    )


def let_drafts_change_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the target choose another last token in each step with drafted tokens."""
    honest = chooser.choose_rows

    def careless(logits: Any, drafted: Sequence[int], *of: Any, **more: Any) -> list[int]:
        chosen = honest(logits, drafted, *of, **more)
        return [*chosen[:-1], (chosen[-1] + 1) % 100 + 20] if drafted else chosen

    monkeypatch.setattr(chooser, "choose_rows", careless)


def prompts(count: int = 2) -> list[BenchPrompt]:
    """Return `count` short prompts in each of two categories."""
    return [
        BenchPrompt(f"{c}-{i}", c, f, f"{c} {i} abcabc")
        for c, f in (("code", "raw"), ("chat", "chat"))
        for i in range(count)
    ]
