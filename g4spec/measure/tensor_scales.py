"""Tests whether the tensors of a draft have the size that training gave them.

Training ends where no tensor predicts the target's tokens better at half or at twice its values. If
one does, it is wrong, or another tensor of its layer is: wrong query, key or value projections show
in the norm of the queries or the attention output, a wrong feed-forward in its norm or output.

All changes are compared at the same steps of the same text, so few steps suffice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from g4spec.core import Batch, Pick
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options

FACTORS = (0.5, 2.0)
SCALED_VECTORS = ("attn_q_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "output_norm")
"""Vectors whose size counts: it is not normalized away later."""
SCALED_MATRICES = ("attn_output", "ffn_down")
"""Matrices whose size counts unless a norm follows them (`post_*`)."""
STEPS_PER_TEXT = 12
"""Steps per text."""
MAX_SEQUENTIAL_POSITIONS = 6
"""Positions per step of a draft with one pass per token; others are compared at all positions."""
MIN_LOG_PROBABILITY = -8.0
"""Lower bound of log-probabilities, so that single tokens do not decide."""
MIN_GAIN, MIN_STANDARD_ERRORS = 0.05, 3.0
"""Decrease of the loss from which a change counts, relative and in standard errors. With intact
trained drafts no change lowered it by more than 3 %, or 1.7 standard errors."""


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """A tensor that predicts the target's tokens better with other values.

    Attributes:
        factor: factor on its values.
        gain: decrease of the mean loss per step, relative.
        standard_errors: the same decrease in standard errors.
    """

    name: str
    factor: float
    gain: float
    standard_errors: float

    @property
    def change(self) -> str:
        """Description of the change."""
        return f"{self.name} * {self.factor:g}"


def tested_tensors(names: Sequence[str]) -> list[str]:
    """Return the tensors to scale: those whose size changes the proposals, and that are not also
    used where the draft stores keys and values of the context."""
    normed = any(".post_" in name for name in names)
    kinds = SCALED_VECTORS if normed else (*SCALED_VECTORS, *SCALED_MATRICES)
    return [
        name
        for name in names
        if name.removesuffix(".weight").split(".")[-1] in kinds and not name.startswith("enc.")
    ]


def better_scales(
    engine: Engine, prompts: Sequence[Sequence[int]], n_predict: int
) -> Iterator[list[ScaledTensor]]:
    """Yield, after each prompt, the changes that count on all prompts so far, best first.

    Args:
        engine: an engine on the CPU with a draft that has weights.
        n_predict: tokens per text.
    """
    losses: dict[tuple[str, float], list[float]] = defaultdict(list)
    base: list[float] = []
    for prompt in prompts:
        options = Options(n_predict, draft_max=_most(engine), ignore_eos=True)
        text = [*prompt, *engine.generate(prompt, options).tokens()]
        with _scaled(engine.draft, text, base, losses):
            run = engine.generate(prompt, options)
            for _ in zip(run, range(STEPS_PER_TEXT), strict=False):
                pass
        yield sorted(_counting(base, losses), key=lambda found: -found.gain)


def _most(engine: Engine) -> int:
    assert engine.draft is not None
    return engine.draft.max_tokens


def _counting(
    base: list[float], losses: dict[tuple[str, float], list[float]]
) -> Iterator[ScaledTensor]:
    """Yield the changes that lower the loss enough."""
    n = len(base)
    for (name, factor), changed in losses.items():
        gains = [before - after for before, after in zip(base, changed, strict=True)]
        if n < 2 or not all(map(math.isfinite, gains)):
            continue
        mean, total = sum(gains) / n, sum(base)
        error = math.sqrt(sum((x - mean) ** 2 for x in gains) / (n - 1) / n)
        gain, errors = mean * n / max(total, 1e-9), mean / max(error, 1e-9)
        if gain >= MIN_GAIN and errors >= MIN_STANDARD_ERRORS:
            yield ScaledTensor(name, factor, gain, errors)


class _Picks:
    """A `Pick` that records the log-probability of the target's token at each position.

    Args:
        pick: chooses the tokens, or None to repeat those of `ids`.
        ids: chosen tokens by position in the proposal.
        expected: the target's tokens after the anchor.
    """

    def __init__(self, pick: Pick | None, ids: dict[int, torch.Tensor], expected: Sequence[int]):
        self.pick, self.ids, self.expected = pick, ids, expected
        self.values: dict[int, float] = {}

    def __call__(self, logits: torch.Tensor, at: int) -> torch.Tensor:
        """See `g4spec.core.Pick`; for one sequence."""
        logs = logits.view(-1, logits.shape[-1]).float().log_softmax(-1)
        for i, (row, token) in enumerate(zip(logs, self.expected[at:], strict=False)):
            self.values[at + i] = max(float(row[token]), MIN_LOG_PROBABILITY)
        if self.pick is not None:
            chosen = self.pick(logits, at)
            self.ids |= {at + i: chosen.view(-1)[i] for i in range(len(logs))}
            return chosen
        ids = torch.stack([self.ids.get(at + i, self.ids[0]) for i in range(len(logs))])
        return ids.to(torch.int64)

    def loss(self, count: int) -> float:
        """Return the loss of the first `count` positions in nats."""
        return -sum(self.values.get(i, MIN_LOG_PROBABILITY) for i in range(count))


@contextmanager
def _scaled(
    draft: Any, text: Sequence[int], base: list[float], losses: dict[tuple[str, float], list[float]]
) -> Iterator[None]:
    """Compare, at every proposal of `draft`, its loss on `text` with that of each change.

    Only positions that the target reaches count: up to the first rejected token.
    """
    propose: Callable[[Batch, int, Pick], torch.Tensor] = draft.propose
    names = tested_tensors(list(draft.w))

    def compared(batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        expected = text[int(batch.positions[0]) + 1 :]
        chosen: dict[int, torch.Tensor] = {}
        unchanged = _Picks(pick, chosen, expected)
        propose(batch, count, unchanged)
        wrong = (i for i, token in enumerate(expected[:count]) if int(chosen.get(i, -1)) != token)
        reached = min(
            next(wrong, count) + 1, count, count if draft.one_pass else MAX_SEQUENTIAL_POSITIONS
        )
        base.append(unchanged.loss(reached))
        for name in names:
            weight = draft.w[name]
            for factor in FACTORS:
                changed = _Picks(None, chosen, expected)
                draft.w[name] = weight * factor
                try:
                    propose(batch, reached, changed)
                finally:
                    draft.w[name] = weight
                losses[name, factor].append(changed.loss(reached))
        return propose(batch, count, pick)

    draft.propose = compared
    try:
        yield
    finally:
        del draft.propose
