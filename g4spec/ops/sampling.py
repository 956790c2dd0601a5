"""From logits to a token, reproducibly.

Sampling uses the Gumbel trick: the token is argmax(logits / T + noise). The noise of a token at a
position depends only on (seed, position, token id), so decoding with and without a draft samples
the same text, and a draft that uses the same noise is accepted often even at high temperature.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from g4spec.errors import InputError, UsageError

Words = np.ndarray[Any, np.dtype[np.uint64]]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


class NotFinite(InputError):
    """Logits contain NaN, or nothing but -inf: the weights or a kernel are broken."""

    @classmethod
    def of_logits(cls) -> NotFinite:
        """Where it was found on the GPU."""
        return cls("logits are not finite", fix="run `g4spec validate` on the file")


def philox(counters: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 of Salmon et al. (2011): counters [n, 4] of 32-bit words -> words [n, 4]."""
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
    """Gumbel noise [n_vocab], float32. Token t reads word t % 4 of counter (t / 4, position)."""
    n = -(-n_vocab // 4)
    counters = np.zeros((n, 4), dtype=np.uint64)
    counters[:, 0] = np.arange(n)
    counters[:, 1], counters[:, 2] = position & 0xFFFFFFFF, position >> 32
    words = philox(counters, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    uniform = ((words.reshape(-1)[:n_vocab] >> np.uint64(8)) + 0.5) * 2.0**-24
    return torch.from_numpy((-np.log(-np.log(uniform))).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Sampler:
    """Chooses tokens; order of filters as in llama.cpp: top-k, top-p, min-p, temperature.

    Attributes:
        temperature: 0 takes the largest logit (lowest id on a tie).
        top_k: candidates kept; 0 keeps all.
        top_p: smallest set of most likely candidates with at least this mass; 1 keeps all.
        min_p: candidates at least this likely relative to the best; 0 keeps all.
        suppress: tokens that are never chosen, whatever their logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    suppress: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, ok, want in (
            ("temp", math.isfinite(self.temperature) and self.temperature >= 0, ">= 0"),
            ("top-k", self.top_k >= 0, ">= 0 (0 keeps all)"),
            ("top-p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min-p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", 0 <= self.seed < 2**64, "in [0, 2^64)"),
        ):
            if not ok:
                value = getattr(self, {"temp": "temperature"}.get(name, name.replace("-", "_")))
                raise UsageError(f"--{name}", expected=want, found=value)

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """The token at absolute `position`, from its logits [V] float32.

        Raises NotFinite when there is no largest logit.
        """
        if self.suppress:
            logits = logits.clone()
            logits[list(self.suppress)] = -math.inf
        best = logits.max()
        if not torch.isfinite(best):
            raise NotFinite("logits are not finite", found=float(best),
                            fix="run `g4spec validate` on the file")  # fmt: skip
        if self.temperature == 0:
            return int(logits.argmax())
        noise = gumbel(self.seed, position, len(logits)).to(logits.device)
        return int((self._filtered(logits) / self.temperature + noise).argmax())

    def choose_rows(self, logits: torch.Tensor, position: int) -> Iterator[int]:
        """Tokens for `position`, `position` + 1, ... from logits [T, V]."""
        for i, row in enumerate(logits):
            yield self.choose(row, position + i)

    def _filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with filtered candidates at -inf."""
        if not self.top_k and self.top_p == 1 and not self.min_p:
            return logits
        values, ids = logits.sort(descending=True, stable=True)
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
