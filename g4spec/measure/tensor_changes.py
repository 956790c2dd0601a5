"""Tests whether the tensors of a draft have the size and the place that training gave them.

Training ends where no tensor predicts the target's tokens better at half or at twice its values. If
one does, it is wrong, or another tensor of its layer is: wrong query, key or value projections show
in the norm of the queries or the attention output, a wrong feed-forward in its norm or output. Gate
and up projections, which have the same shape, are also tried in each other's place.

All changes are compared at the same steps of the same text, so few steps suffice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
GATE, UP = "ffn_gate.weight", "ffn_up.weight"
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
class TensorChange:
    """A change of a draft: the values of a tensor are multiplied by `factor`, or, if there is an
    `other` tensor, exchanged with its."""

    name: str
    factor: float = 1.0
    other: str = ""

    def __str__(self) -> str:
        return f"{self.name} {f'<-> {self.other}' if self.other else f'* {self.factor:g}'}"

    @property
    def action(self) -> str:
        """Describe what is done to the tensor, in words that continue "if"."""
        return f"exchanged with {self.other}" if self.other else f"multiplied by {self.factor:g}"

    def apply(self, read: Callable[[str], Any]) -> dict[str, Any]:
        """Return the changed tensors by name. `read` returns the present values of a tensor."""
        if self.other:
            return {self.name: read(self.other), self.other: read(self.name)}
        return {self.name: read(self.name) * self.factor}


@dataclass(frozen=True, slots=True)
class BetterTensor:
    """A change with which the draft predicts the target's tokens better.

    Attributes:
        gain: decrease of the mean loss per step, relative.
        standard_errors: the same decrease in standard errors.
    """

    change: TensorChange
    gain: float
    standard_errors: float


def tested_changes(names: Iterable[str]) -> list[TensorChange]:
    """Return the changes to test, of tensors that are not also used where the draft stores keys and
    values of the context: scaled, if the size changes the proposals, and gate exchanged with up."""
    names = [name for name in names if not name.startswith("enc.")]
    normed = any(".post_" in name for name in names)
    kinds = SCALED_VECTORS if normed else (*SCALED_VECTORS, *SCALED_MATRICES)
    scaled = [name for name in names if name.removesuffix(".weight").split(".")[-1] in kinds]
    gates = [name for name in names if name.endswith(f".{GATE}")]
    return [
        *(TensorChange(name, factor) for name in scaled for factor in FACTORS),
        *(TensorChange(name, other=name.removesuffix(GATE) + UP) for name in gates),
    ]


def better_tensors(
    engine: Engine, prompts: Sequence[Sequence[int]], n_predict: int
) -> Iterator[list[BetterTensor]]:
    """Yield, after each prompt, the changes that count on all prompts so far, best first.

    Args:
        engine: an engine on the CPU with a draft that has weights.
        n_predict: tokens per text.
    """
    losses: dict[TensorChange, list[float]] = defaultdict(list)
    base: list[float] = []
    for prompt in prompts:
        options = Options(n_predict, draft_max=_most(engine), ignore_eos=True)
        text = [*prompt, *engine.generate(prompt, options).tokens()]
        with _changed(engine.draft, text, base, losses):
            run = engine.generate(prompt, options)
            for _ in zip(run, range(STEPS_PER_TEXT), strict=False):
                pass
        yield sorted(_counting(base, losses), key=lambda found: -found.gain)


def _most(engine: Engine) -> int:
    assert engine.draft is not None
    return engine.draft.max_tokens


def _counting(base: list[float], losses: dict[TensorChange, list[float]]) -> Iterator[BetterTensor]:
    """Yield the changes that lower the loss enough."""
    n = len(base)
    for change, changed in losses.items():
        gains = [before - after for before, after in zip(base, changed, strict=True)]
        if n < 2 or not all(map(math.isfinite, gains)):
            continue
        mean, total = sum(gains) / n, sum(base)
        error = math.sqrt(sum((x - mean) ** 2 for x in gains) / (n - 1) / n)
        gain, errors = mean * n / max(total, 1e-9), mean / max(error, 1e-9)
        if gain >= MIN_GAIN and errors >= MIN_STANDARD_ERRORS:
            yield BetterTensor(change, gain, errors)


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
def _changed(
    draft: Any, text: Sequence[int], base: list[float], losses: dict[TensorChange, list[float]]
) -> Iterator[None]:
    """Compare, at every proposal of `draft`, its loss on `text` with that of each change.

    Only positions that the target reaches count: up to the first rejected token.
    """
    propose: Callable[[Batch, int, Pick], torch.Tensor] = draft.propose
    changes = tested_changes(draft.w)

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
        for change in changes:
            changed, weights = _Picks(None, chosen, expected), change.apply(draft.w.__getitem__)
            kept = {name: draft.w[name] for name in weights}
            draft.w.update(weights)
            try:
                propose(batch, reached, changed)
            finally:
                draft.w.update(kept)
            losses[change].append(changed.loss(reached))
        return propose(batch, count, pick)

    draft.propose = compared
    try:
        yield
    finally:
        del draft.propose
