"""Measures the perplexity of a target on a text, and its divergence from a base model.

Chunks, rows and metrics are those of `llama-perplexity --kl-divergence`: the second half of each
chunk is predicted; reported are the Kullback-Leibler divergence from the base's distribution, how
often both have the same top token, and the change in probability of the text's token. Here the
base's distributions are exact; llama-perplexity stores them in 16 bits and cuts them off 16 nats
below the top token, which changes the base's perplexity in the third digit.
Source: llama.cpp `tools/perplexity/perplexity.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from g4spec.core import MAX_STEP_ROWS
from g4spec.errors import InputError
from g4spec.measure import text_chunks
from g4spec.runtime.engine import Engine
from g4spec.runtime.torch_settings import own_settings

Progress = Callable[[int, int], None]
ReadChunk = Callable[[Engine, list[int]], torch.Tensor]
Values = NDArray[np.float64]
PERCENTILES = (100.0, 99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1, 0.0)


@dataclass(frozen=True, slots=True)
class ValueWithError:
    """A number and its standard error."""

    value: float
    error: float

    @classmethod
    def mean(cls, values: Values) -> ValueWithError:
        """Return the mean of independent values [n] and its standard error."""
        return cls(float(values.mean()), math.sqrt(values.var() / max(len(values) - 1, 1)))

    def exp(self) -> ValueWithError:
        """Return exp(value), with the error propagated."""
        grown = math.exp(self.value)
        return ValueWithError(grown, grown * self.error)


@dataclass(frozen=True, slots=True)
class BaseComparison:
    """A model compared with a base model on the same tokens.

    Attributes:
        base: the base's perplexity. ratio: model / base perplexity; its error is that of the
            paired differences.
        divergence: mean KL divergence in nats; divergences: its percentiles.
        same_top: fraction of rows with the same top token.
        moved: root mean square change in the probability of the text's token.
    """

    base: ValueWithError
    ratio: ValueWithError
    divergence: ValueWithError
    divergences: dict[str, float]
    same_top: ValueWithError
    moved: ValueWithError


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """Perplexity over `tokens` predicted tokens of `chunks` chunks of `size` tokens each."""

    chunks: int
    size: int
    tokens: int
    perplexity: ValueWithError
    against: BaseComparison | None

    def json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    engine: Engine,
    parts: Sequence[list[int]],
    base: Engine | None = None,
    progress: Progress = lambda done, total: None,
    read: ReadChunk = text_chunks.read_chunk,
) -> PerplexityResult:
    """Predict the second halves of the chunks of `text_chunks.split_text`, all of one size.

    Args:
        base: a base model with the same vocabulary, or None.
        read: reads a chunk. A caller that compares several models with one base may cache it.

    Raises InputError if the vocabularies differ or logits are not finite.
    """
    if base is not None and base.config.n_vocab != engine.config.n_vocab:
        raise InputError(
            "the two models have different vocabularies",
            expected=base.config.n_vocab,
            found=engine.config.n_vocab,
        )
    rows = []
    for i, ids in enumerate(parts):
        rows.append(_chunk(engine, base, ids, read))
        progress(i + 1, len(parts))
    own, *beside = np.concatenate(rows, axis=1)
    against = None if base is None else _against(own, *beside)
    return PerplexityResult(
        len(parts), len(parts[0]), len(own), ValueWithError.mean(own).exp(), against
    )


def _chunk(engine: Engine, base: Engine | None, ids: list[int], read: ReadChunk) -> Values:
    """Return for each predicted token the negative log-probability; with a base also the base's,
    the divergence, and 1 if the top token is the same; [1 or 4, n]."""
    both = [_log_probs(e, ids, read) for e in (engine, base) if e is not None]
    found = []
    for at, *parts in zip(_starts(ids), *both, strict=True):
        wanted = torch.tensor(ids[at + 1 : at + 1 + len(parts[0])])[:, None]
        lines = [-p.gather(1, wanted)[:, 0] for p in parts]
        if base is not None:
            q, p = parts
            lines += [(p.exp() * (p - q)).sum(1), (p.argmax(1) == q.argmax(1)).double()]
        found.append(torch.stack(lines).numpy())
    return np.concatenate(found, axis=1)


def _starts(ids: list[int]) -> range:
    """Return the first row of each batch of up to 16 rows that predict the second half."""
    return range(len(ids) // 2, len(ids) - 1, MAX_STEP_ROWS)


def _log_probs(engine: Engine, ids: list[int], read: ReadChunk) -> Iterator[torch.Tensor]:
    """Yield log-probabilities float64 [up to 16, V] for each batch of `_starts`, on the CPU."""
    hidden = read(engine, ids)
    for at in _starts(ids):
        last = min(at + MAX_STEP_ROWS, len(ids) - 1)
        with own_settings(hidden.device):
            logits = engine.target.logits(hidden[at:last])
        if not bool(torch.isfinite(logits).all()):
            raise InputError(
                "the target's logits are not finite", fix="run `g4spec validate` on the file"
            )
        yield torch.log_softmax(logits.double(), 1).cpu()


def _against(own: Values, base: Values, divergence: Values, same: Values) -> BaseComparison:
    top, ratio = ValueWithError.mean(same), ValueWithError.mean(own - base).exp()
    square = ValueWithError.mean(np.square(np.exp(-own) - np.exp(-base)))
    moved = math.sqrt(square.value)
    return BaseComparison(
        base=ValueWithError.mean(base).exp(),
        ratio=ratio,
        divergence=ValueWithError.mean(divergence),
        divergences={f"{p:g}": float(np.percentile(divergence, p)) for p in PERCENTILES},
        same_top=top,
        moved=ValueWithError(moved, square.error / (2 * moved) if moved else 0.0),
    )
