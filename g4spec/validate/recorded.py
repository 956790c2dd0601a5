"""What a conversion writes down about its inputs, as the rules read it back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

T2D = "g4spec.dflash.t2d_sha256"
"""Digest of the checkpoint's t2d: one byte a target token, 1 where the draft can propose it."""
TARGET_LAYERS = "g4spec.target.block_count"
TARGET_HIDDEN = "g4spec.target.embedding_length"
TARGET_TOKENIZER = "g4spec.target.tokenizer_sha256"
"""Digest of the target's tokens and merges."""


def t2d_digest(d2t: NDArray[np.int64], n_vocab: int) -> str:
    """The digest that the t2d belonging to these target ids has."""
    mask = np.zeros(n_vocab, np.uint8)
    mask[d2t[(d2t >= 0) & (d2t < n_vocab)]] = 1
    return hashlib.sha256(mask.tobytes()).hexdigest()


def tokenizer_digest(*lists: Iterable[str]) -> str:
    """Digest of lists of strings: what a tokenizer is, apart from its special ids."""
    digest = hashlib.sha256()
    for strings in lists:
        digest.update("\0".join(strings).encode())
        digest.update(b"\1")
    return digest.hexdigest()
