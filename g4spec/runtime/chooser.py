"""Choice of tokens from logits for one request (`g4spec.core.Chooser`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from g4spec.backend import Backend
from g4spec.core import Cycle
from g4spec.ops.logits import History, choose_rows, edit_logits, logprobs, sampled_logprobs
from g4spec.runtime.request import Options


class RequestChooser:
    """The sampler of a request with everything else that its choices depend on.

    Args:
        options: options of the request, including the sampler.
        prompt: prompt tokens, which penalties count.
        n_vocab: width of the logits.
    """

    def __init__(
        self, options: Options, prompt: Sequence[int], n_vocab: int, backend: Backend
    ) -> None:
        self.sampler = options.sampler
        self._mask, self._n_logprobs = options.mask, options.logprobs
        self._of_sampled = options.sampled_logprobs
        self._rows = backend.sampler(self.sampler.without_edits())
        self._history: History | None = None
        if self.sampler.uses_history or self._mask is not None:
            self._history = History(prompt, n_vocab, backend.ops.device)

    @property
    def on_host(self) -> bool:
        """True if a choice needs more than logits, sampler and position."""
        return not self.sampler.plain or self._mask is not None or self._n_logprobs is not None

    def pick(self, logits: torch.Tensor, position: int) -> int:
        """Choose a drafted token with the same noise, bias and penalties as the target. The mask is
        not applied: it may still reject the token."""
        if not self.sampler.plain:
            logits = edit_logits(logits, self.sampler, self._history)
        token: int = self._rows.choose(logits, position)
        return token

    def choose(self, logits: torch.Tensor, drafted: Sequence[int], position: int) -> Cycle:
        """Choose the target's tokens over the rows of a step; see `g4spec.core.Chooser`."""
        tokens = choose_rows(
            logits, drafted, position, self.sampler, self._history, self._mask, chooser=self._rows
        )
        values = logits[range(len(tokens)), tokens].tolist()
        cycle = Cycle(tokens, values, list(drafted), len(tokens) - 1)
        for row, token in zip(logits, tokens, strict=False):
            if self._n_logprobs is not None:
                cycle.logprobs.append(self._logprobs(row, token, self._n_logprobs))
            if self._history is not None:
                self._history.extend([token])
        return cycle

    def _logprobs(
        self, row: torch.Tensor, token: int, n: int
    ) -> tuple[float, list[tuple[int, float]]]:
        """Return the log-probabilities of a token; the history ends before it."""
        if not self._of_sampled:
            return logprobs(row, token, n)
        return sampled_logprobs(row, token, n, self.sampler, self._history, self._mask)
