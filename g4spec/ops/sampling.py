"""Reproducible sampling of tokens from logits.

Sampling uses the Gumbel trick: the token is argmax(logits / T + noise). The noise depends only on
(seed, position, token id), so decoding with and without a draft samples the same text, and a draft
that uses the same noise has a high acceptance even at high temperature.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch

from g4spec import ranges
from g4spec.errors import InputError, Unsupported, UsageError

Words = np.ndarray[Any, np.dtype[np.uint64]]

EDITS = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of `Sampler` that edit logits before they are filtered. All but the bias depend on earlier
tokens and have a range in `ranges.RANGES`. `g4spec.ops.logits.edit_logits` applies them."""

MIN_TEMPERATURE = 1e-30
"""Lower temperatures are 0: logits divided by them would overflow, and no noise changes the
largest one."""

MAX_TEMPERATURE = 1e30
"""Higher temperatures become this one: float32 does not hold them all, and the noise alone already
decides."""

MOST_TOKENS = 2**31 - 1
"""A top-k above this becomes 0, which keeps all tokens as well: kernels read 32 bits."""

MOST_SIGMAS = 1e30
"""A top-n-sigma above this becomes 0, which keeps all tokens as well: kernels read 32 bits."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


class NotFinite(InputError):
    """Logits contain NaN, or only -inf: the weights or a kernel are broken."""

    @classmethod
    def of_logits(cls) -> NotFinite:
        """Create the error for logits on the GPU."""
        return cls("logits are not finite", fix="run `g4spec validate` on the file")


def philox(counters: Words, key: tuple[int, int]) -> Words:
    """Compute Philox4x32-10 of Salmon et al. (2011): counters [n, 4] of 32-bit words -> words [n,
    4]."""
    c = [counters[:, i].astype(np.uint64) for i in range(4)]
    k = list(key)
    for _ in range(10):
        a, b = c[0] * np.uint64(_MULTIPLIERS[0]), c[2] * np.uint64(_MULTIPLIERS[1])
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            b & _LOW,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            a & _LOW,
        ]
        k = [(k[i] + _WEYL[i]) & 0xFFFFFFFF for i in range(2)]
    return np.stack(c, axis=1)


@functools.lru_cache(maxsize=64)
def gumbel(seed: int, position: int, n_vocab: int) -> torch.Tensor:
    """Return Gumbel noise [n_vocab], float32. Token t uses word t % 4 of counter (t / 4,
    position)."""
    n = -(-n_vocab // 4)
    counters = np.zeros((n, 4), dtype=np.uint64)
    counters[:, 0] = np.arange(n)
    counters[:, 1], counters[:, 2] = position & 0xFFFFFFFF, position >> 32
    words = philox(counters, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    uniform = ((words.reshape(-1)[:n_vocab] >> np.uint64(8)) + 0.5) * 2.0**-24
    return torch.from_numpy((-np.log(-np.log(uniform))).astype(np.float32))


def least_logit(logits: torch.Tensor, n: float) -> torch.Tensor:
    """Return the largest of logits [V] minus `n` standard deviations of those that are not -inf."""
    x = logits.double()
    there = x != -math.inf
    mean = x.masked_fill(~there, 0).sum() / there.sum()
    variance = (x - mean).masked_fill(~there, 0).square().sum() / there.sum()
    return x.max() - n * variance.sqrt()


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampling settings, and the choice of tokens. Logits are edited first, in this order: bias,
    penalties (repetition, frequency, presence), grammar mask, suppressed tokens. Then they are
    filtered in the order of llama.cpp: top-n-sigma, top-k, top-p, min-p, temperature.

    Bias and penalties need more than a row of logits: `g4spec.ops.logits.choose_rows` applies them.
    `choose` and the GPU kernels read raw logits and accept only a `plain` sampler.

    Attributes:
        temperature: 0 takes the largest logit (lowest id on a tie), and so does any below
            `MIN_TEMPERATURE`, which becomes 0. Any above `MAX_TEMPERATURE` becomes that.
        top_k: number of candidates to keep; 0 keeps all. Any above `MOST_TOKENS` becomes 0.
        top_p: keep the smallest set of most likely candidates with at least this mass; 1 keeps all.
        min_p: keep candidates at least this likely relative to the best; 0 keeps all.
        suppress: tokens that are never chosen, whatever their logits. `Engine.submit` replaces them
            by those that the target's file names; ban others with -inf in `logit_bias`.
        logit_bias: (token id, value) pairs, each id once. The value, -100 to 100, is added to the
            logit: -100 puts a token below all others, but a high temperature may still choose it.
            -inf bans the token.
        repetition_penalty: a positive logit of a token that the prompt or the output contains is
            divided by this, a negative one multiplied, as in transformers and vLLM; 1 disables it.
        presence_penalty: subtracted from the logit of each token that the output contains.
        frequency_penalty: subtracted once for each occurrence of the token in the output. Both as
            in OpenAI's API and vLLM: -2 to 2, 0 disables them, the prompt does not count.
        top_n_sigma: keep candidates whose logit is at most this many standard deviations of the
            logits below the largest, as in llama.cpp; 0 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    suppress: tuple[int, ...] = ()
    logit_bias: Sequence[tuple[int, float]] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_n_sigma: float = 0.0

    def __post_init__(self) -> None:
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "top_n_sigma", *EDITS[1:])
        ranges.check_fields(self, names)
        self._check_bias()
        if 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.temperature > MAX_TEMPERATURE:
            object.__setattr__(self, "temperature", MAX_TEMPERATURE)
        if self.top_k > MOST_TOKENS:
            object.__setattr__(self, "top_k", 0)
        if self.top_n_sigma > MOST_SIGMAS:
            object.__setattr__(self, "top_n_sigma", 0.0)

    def _check_bias(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            raise UsageError(
                "`logit_bias`",
                expected="a tuple of pairs (token id, bias)",
                found="a mapping",
                fix="pass tuple(logit_bias.items())",
            )
        try:  # an iterator can be read only once
            pairs = [(token, value) for token, value in self.logit_bias]
        except (TypeError, ValueError) as error:
            raise UsageError(
                "`logit_bias`",
                expected="a tuple of pairs (token id, bias)",
                found=f"{self.logit_bias!r:.80}",
            ) from error
        seen: set[int] = set()
        for token, value in pairs:
            if not ranges.is_token_id(token):
                raise UsageError("`logit_bias`", expected="a token id >= 0", found=token)
            if token in seen:
                raise UsageError("`logit_bias`", expected="each token id once", found=token)
            number = isinstance(value, Real)
            if not (number and (-100 <= value <= 100 or value == -math.inf)):
                raise UsageError(
                    f"`logit_bias` of token {token}", expected="-100 to 100, or -inf", found=value
                )
            seen.add(token)
        plain = tuple((int(token), ranges.plain_number(value)) for token, value in pairs)
        object.__setattr__(self, "logit_bias", plain)

    @property
    def uses_history(self) -> bool:
        """True if a choice depends on earlier tokens: an edit other than a bias is enabled."""
        return any(name != "logit_bias" for name in self._edits())

    @property
    def plain(self) -> bool:
        """True if raw logits and a position suffice: no bias and no penalty."""
        return not self._edits()

    @property
    def filters(self) -> bool:
        """True if candidates are removed by their logits."""
        return bool(self.top_n_sigma or self.top_k or self.top_p < 1 or self.min_p)

    def _edits(self) -> list[str]:
        """Return the names of the enabled `EDITS`."""
        return [name for name in EDITS if getattr(self, name) != getattr(_DEFAULT, name)]

    def without_edits(self) -> Sampler:
        """Return the same sampler without bias and penalties, for logits that are already
        edited."""
        return replace(self, **{name: getattr(_DEFAULT, name) for name in EDITS})

    def require_plain(self) -> None:
        """Raise Unsupported, naming the fields, unless the sampler is `plain`."""
        edits = [f"`{name}`" for name in self._edits()]
        if edits:
            raise Unsupported(
                f"{', '.join(edits)}: not applied where raw logits are sampled", fix="leave it out"
            )

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """Choose the token at absolute `position` from its logits [V] float32.

        Raises:
            NotFinite: there is no largest logit.
            Unsupported: the sampler is not `plain`.
        """
        self.require_plain()
        if self.suppress:
            logits = logits.clone()
            logits[list(self.suppress)] = -math.inf
        best = logits.max()
        if not torch.isfinite(best):
            raise NotFinite(
                "logits are not finite", found=float(best), fix="run `g4spec validate` on the file"
            )
        if self.temperature == 0:
            return int(logits.argmax())
        noise = gumbel(self.seed, position, len(logits)).to(logits.device)
        return int((self._filtered(logits) / self.temperature + noise).argmax())

    def choose_rows(self, logits: torch.Tensor, position: int) -> Iterator[int]:
        """Choose tokens for `position`, `position` + 1, ... from logits [T, V]."""
        for i, row in enumerate(logits):
            yield self.choose(row, position + i)

    def sampled_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [V] whose softmax is the distribution that `choose` samples from.

        Tokens that are never chosen have -inf; at temperature 0, all but the chosen one.
        """
        if self.suppress:
            logits = logits.clone()
            logits[list(self.suppress)] = -math.inf
        if self.temperature == 0:
            only = torch.full_like(logits, -math.inf)
            only[logits.argmax()] = 0
            return only
        return self._filtered(logits) / self.temperature

    def _filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits with removed candidates at -inf."""
        if not self.filters:
            return logits
        values, ids = logits.sort(descending=True, stable=True)
        if self.top_n_sigma:
            keep = int((values >= least_logit(values, self.top_n_sigma)).sum())
            values, ids = values[:keep], ids[:keep]
        if self.top_k:
            values, ids = values[: self.top_k], ids[: self.top_k]
        if self.top_p < 1:
            mass = values.softmax(0).cumsum(0)
            keep = int((mass < self.top_p).sum()) + 1
            values, ids = values[:keep], ids[:keep]
        if self.min_p:
            keep = int((values >= values[0] + math.log(self.min_p)).sum())
            values, ids = values[:keep], ids[:keep]
        return torch.full_like(logits, -math.inf).index_put((ids,), values)


_DEFAULT = Sampler()
