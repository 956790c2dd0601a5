"""A draft walked along a text and held against an oracle: at every anchor, and after rejections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.oracle import build

Oracle = Callable[[torch.Tensor, list[int], int, int], torch.Tensor]
"""Features [n, taps * H], the text's ids, the anchor's position and a count -> logits [count, V]
of the greedy proposal, -inf where undraftable."""


def opened(
    on: Path, folder: Path, ids: list[int], chunk: int = 64, window: int | None = None
) -> tuple[Any, Any, torch.Tensor]:
    """Target and draft that have read nothing, and the features of every position."""
    target = build.target(on, chunk)
    build.draft(folder, target)
    features = torch.cat([r.taps for r in target.prefill(ids)])
    target = build.target(on, chunk)
    return target, build.draft(folder, target, window), features


def difference(
    draft: Any, oracle: Oracle, features: torch.Tensor, ids: list[int], at: int
) -> float:
    """Largest difference of logits at anchor `at`; proposals and draftable tokens must be equal."""
    seen = build.Recorder()
    drafted = draft.propose(ids[at], at, draft.max_tokens, seen)
    its = oracle(features, ids, at, len(drafted))
    assert drafted == its.argmax(-1).tolist()
    mine = torch.stack(seen.rows)
    assert torch.equal(torch.isfinite(mine), torch.isfinite(its))
    return float((mine - its)[torch.isfinite(mine)].abs().max())


def every_anchor(
    on: Path, folder: Path, oracle: Oracle, ids: list[int], window: int | None = None
) -> float:
    """Largest difference over all anchors from 1 on, one token committed at a time."""
    target, draft, features = opened(on, folder, ids, 8, window)
    worst = 0.0
    for at in range(len(ids)):
        if at:
            worst = max(worst, difference(draft, oracle, features, ids, at))
        build.commit(draft, target.read(ids[at : at + 1], at), 1)
    return worst


def after_rejections(on: Path, folder: Path, oracle: Oracle, ids: list[int], chunk: int) -> float:
    """Largest difference while 1, 2, ... rows of each step hold, after a prompt in chunks."""
    target, draft, features = opened(on, folder, ids, chunk)
    vocab, rows = target.config.n_vocab, draft.max_tokens + 1
    at, turn, worst = len(ids) // 2 + 2, 0, 0.0
    build.prefill(target, draft, ids[:at])
    while at + rows < len(ids):
        keep = turn % min(rows, 7) + 1
        worst = max(worst, difference(draft, oracle, features, ids, at))
        wrong = [(t + 1) % vocab for t in ids[at + keep : at + rows]]
        build.commit(draft, target.step([*ids[at : at + keep], *wrong], at).read, keep)
        at, turn = at + keep, turn + 1
    assert turn > 6
    return worst
