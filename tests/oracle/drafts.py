"""A draft run along a text and compared with an oracle: at every anchor, and after rejections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tests.oracle import build

Oracle = Callable[[torch.Tensor, list[int], int, list[int]], torch.Tensor]
"""Called with features [n, taps * H], the text's ids, the anchor's position and the drafted tokens.
Returns the logits [drafted, V] from which each token is chosen, -inf for tokens that cannot be
drafted."""


class Pair(Protocol):
    """A target and a draft that can be opened repeatedly."""

    def open(self) -> tuple[Any, Any]:
        """Return both with empty caches; the target's taps are the draft's."""
        ...


@dataclass
class Folders:
    """A pair from checkpoint folders, without the converter."""

    target: Path
    draft: Path
    chunk: int = 8
    window: int | None = None

    def open(self) -> tuple[Any, Any]:
        target = build.target(self.target, self.chunk)
        return target, build.draft(self.draft, target, self.window)


def read_features(pair: Pair, ids: list[int]) -> torch.Tensor:
    """Return the draft's input at every position of a text, [n, taps * H]."""
    return torch.cat([r.taps for r in pair.open()[0].prefill(ids)])


def difference(
    draft: Any, oracle: Oracle, features: torch.Tensor, ids: list[int], at: int
) -> float:
    """Return the largest difference of logits at anchor `at`; proposals and draftable tokens must
    be equal."""
    seen = build.Recorder()
    drafted = draft.propose(ids[at], at, draft.max_tokens, seen)
    its = oracle(features, ids, at, drafted)
    assert drafted == its.argmax(-1).tolist()
    mine = torch.stack(seen.rows)
    assert torch.equal(torch.isfinite(mine), torch.isfinite(its))
    return float((mine - its)[torch.isfinite(mine)].abs().max())


def every_anchor(pair: Pair, oracle: Oracle, ids: list[int]) -> float:
    """Return the largest difference over all anchors from 1 on, one token committed at a time."""
    features, worst = read_features(pair, ids), 0.0
    target, draft = pair.open()
    for at in range(len(ids)):
        if at:
            worst = max(worst, difference(draft, oracle, features, ids, at))
        draft.commit(target.read(ids[at : at + 1], at), 1)
    return worst


def after_rejections(pair: Pair, oracle: Oracle, ids: list[int]) -> float:
    """Return the largest difference if 1, 2, ... rows of each step are accepted, after half of the
    text has been read at once."""
    features = read_features(pair, ids)
    target, draft = pair.open()
    vocab, rows = target.config.n_vocab, draft.max_tokens + 1
    at, turn, worst = len(ids) // 2 + 2, 0, 0.0
    build.prefill(target, draft, ids[:at])
    while at + rows < len(ids):
        keep = turn % rows + 1
        worst = max(worst, difference(draft, oracle, features, ids, at))
        wrong = [(t + 1) % vocab for t in ids[at + keep : at + rows]]
        draft.commit(target.step([*ids[at : at + keep], *wrong], at).read, keep)
        at, turn = at + keep, turn + 1
    assert turn > 6
    return worst
