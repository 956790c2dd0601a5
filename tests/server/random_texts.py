"""Random texts that a mask allows: a model without any preference."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

MARKS = {1, 49, 52, 101, 106}
Mask = Callable[[Sequence[int]], torch.Tensor | None]


def random_text(mask: Mask, rng: random.Random, ends: Sequence[int], slow: int = 0) -> list[int]:
    """Return random allowed tokens up to a stop token, which is not included.

    Args:
        ends: tokens whose probability grows with the length of the text.
        slow: number of tokens before it starts to grow.
    """
    text: list[int] = []
    while len(text) < 400:
        allowed = mask(text)
        ids = [*range(4096)] if allowed is None else allowed.nonzero().flatten().tolist()
        assert ids
        liked = set(ends) & set(ids)
        first = sorted(liked & MARKS or liked)  # characters are part of any text, too
        token = rng.choice(first if first and rng.random() < (len(text) - slow) / 30 else ids)
        if token in (1, 50, 106):
            return text
        if rng.random() < 0.2:  # look somewhere else in between, as a step's rows do
            mask([*text, rng.choice(ids)])
            mask(text[: rng.randrange(len(text) + 1)])
        text.append(token)
    raise AssertionError("no end")
