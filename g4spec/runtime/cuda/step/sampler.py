"""Samples tokens from logits on the GPU: all rows at once, with one synchronization."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from g4spec.ops.sampling import NotFinite, Sampler
from g4spec.runtime.cuda.step.choose import Choice


class CudaSampler:
    """Samples like `Sampler`, with the kernels of choose.cu (a `g4spec.ops.logits.RowSampler`).

    Raises:
        Unsupported: the sampler is not `plain`: the kernels apply no bias and no penalties.
    """

    def __init__(self, sampler: Sampler, device: torch.device) -> None:
        sampler.require_plain()
        self._sampler, self._device = sampler, device
        self._choices: dict[int, Choice] = {}  # by number of columns of the logits

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """Choose the token at absolute `position` from its logits [V] float32. Raises NotFinite."""
        return next(self.choose_rows(logits[None], position))

    def choose_rows(self, logits: torch.Tensor, position: int) -> Iterator[int]:
        """Choose tokens for `position`, `position` + 1, ... from logits [T, V] float32. Raises
        NotFinite when the token of a row without a largest logit is requested."""
        count, width = logits.shape
        choice = self._choices.get(width)
        if choice is None:
            choice = Choice(width, self._device, suppress=self._sampler.suppress)
            choice.set(self._sampler)
            self._choices[width] = choice
        positions = torch.arange(position, position + count, device=self._device)
        chosen = choice(logits.contiguous(), positions, ahead=0)
        for token, bad in torch.stack([chosen.ids, chosen.bad.long()], dim=1).tolist():
            if bad:
                raise NotFinite.of_logits()
            yield token
