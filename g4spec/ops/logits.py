"""Edits of logits (bias, penalties, grammar masks) and log-probabilities.

A penalty or mask makes a choice depend on earlier tokens, including drafted ones. So the rows of a
step are edited one after the other: row i sees the output and the drafted tokens 1..i, and it is
used only if all of these were accepted. The tokens are therefore those of decoding one by one, bit
for bit: an edited row depends only on its logits and its history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from g4spec.errors import InputError, UsageError
from g4spec.ops.sampling import NotFinite, Sampler

Mask = Callable[[Sequence[int]], torch.Tensor | None]
"""(output tokens so far, including the drafted prefix) -> bool [V], True for allowed next tokens,
or None if all are allowed. Must depend on the tokens only; their list is valid only during the
call. Applied after penalties and before filters."""

DEVICE_FAULTS = (
    MemoryError,
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", MemoryError),  # since torch 2.8
)
"""Errors of a mask that end the step of all requests. Any other ends its request alone."""


class RowSampler(Protocol):
    """Chooses tokens from raw logits, like `Sampler`."""

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """Choose the token at absolute `position` from its logits [V] float32."""
        ...

    def choose_rows(self, logits: torch.Tensor, position: int) -> Iterator[int]:
        """Choose tokens for `position`, `position` + 1, ... from logits [T, V]. Raises NotFinite
        when the token of a row without a largest logit is requested."""
        ...


class History:
    """Token counts of one sequence, for penalties and masks.

    Args:
        prompt: token ids of the prompt.
        n_vocab: V.
        device: device of the logits.

    Attributes:
        output: output tokens, in order. Changed only by `extend` and `truncate`.
        prompted: bool [V], True for tokens of the prompt.
        counts: int32 [V], number of occurrences in the output.
    """

    def __init__(
        self, prompt: Sequence[int], n_vocab: int, device: torch.device | str = "cpu"
    ) -> None:
        self.output: list[int] = []
        self.prompted = torch.zeros(n_vocab, dtype=torch.bool, device=device)
        self.prompted[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        self.counts = torch.zeros(n_vocab, dtype=torch.int32, device=device)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append output tokens."""
        self._count(tokens, 1)
        self.output += tokens

    def truncate(self, length: int) -> None:
        """Remove output tokens from index `length` on."""
        assert 0 <= length <= len(self.output), (length, len(self.output))
        self._count(self.output[length:], -1)
        del self.output[length:]

    def _count(self, tokens: Sequence[int], by: int) -> None:
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.counts.device)
        self.counts.index_add_(0, ids, torch.full_like(ids, by, dtype=torch.int32))


def edit_logits(
    logits: torch.Tensor, sampler: Sampler, history: History | None = None
) -> torch.Tensor:
    """Apply bias, then repetition, frequency and presence penalty.

    Args:
        logits: raw logits of one row, [V]; not modified.
        history: history that the row sees; required if `sampler.uses_history`.

    Returns:
        Edited logits, float32 [V].

    Raises:
        UsageError: the bias names a token outside the vocabulary.
    """
    assert logits.dim() == 1, logits.shape
    row = logits.to(torch.float32, copy=True)
    if sampler.logit_bias:
        ids, values = zip(*sampler.logit_bias, strict=True)
        if max(ids) >= len(row):
            raise UsageError(
                "`logit_bias`", expected=f"token ids 0 to {len(row) - 1}", found=max(ids)
            )
        row[list(ids)] += torch.tensor(values, dtype=torch.float32, device=row.device)
    if not sampler.uses_history:
        return row
    assert history is not None, "penalties need a history"
    present = history.counts > 0
    if (penalty := sampler.repetition_penalty) != 1:
        scaled = torch.where(row < 0, row * penalty, row / penalty)
        row = torch.where(history.prompted | present, scaled, row)
    if sampler.frequency_penalty:
        row -= history.counts.to(torch.float32) * sampler.frequency_penalty
    if sampler.presence_penalty:
        row -= present.to(torch.float32) * sampler.presence_penalty
    return row


def choose_rows(
    logits: torch.Tensor,
    drafted: Sequence[int],
    position: int,
    sampler: Sampler,
    history: History | None = None,
    mask: Mask | None = None,
    *,
    chooser: RowSampler | None = None,
) -> list[int]:
    """Choose tokens as decoding one by one would, up to and including the first one that differs
    from the draft, or the last one before a row that fails: the text may end before that row.

    Args:
        logits: raw logits of a step, [1 + len(drafted), V] float32.
        position: absolute position of the first token to choose.
        history: output up to `position`; required for penalties and masks. Unchanged on return: the
            caller appends the tokens that it keeps.
        chooser: chooses from edited logits; must belong to `sampler.without_edits()`. Default:
            torch.

    Raises:
        NotFinite: the first row has no largest logit.
        InputError: in the first row, the mask allows no token that the sampler can choose.
    """
    assert len(logits) == 1 + len(drafted), (len(logits), len(drafted))
    chooser = chooser or sampler.without_edits()
    kept = 0 if history is None else len(history.output)

    def one_by_one(chooser: RowSampler) -> Iterator[int]:
        for i, row in enumerate(logits):
            if i and history is not None:  # asked for only where this token was accepted
                history.extend([drafted[i - 1]])
            allowed = _masked(edit_logits(row, sampler, history), sampler, history, mask)
            yield chooser.choose(allowed, position + i)

    quick = sampler.plain and mask is None
    tokens = chooser.choose_rows(logits, position) if quick else one_by_one(chooser)
    chosen: list[int] = []
    try:
        for token, proposed in zip(tokens, [*drafted, None], strict=True):
            chosen.append(token)
            if token != proposed:
                break
    except InputError:
        if not chosen:
            raise
    finally:
        if history is not None:
            history.truncate(kept)
    return chosen


def _masked(
    row: torch.Tensor, sampler: Sampler, history: History | None, mask: Mask | None
) -> torch.Tensor:
    """Set the logits [V] of forbidden tokens to -inf.

    Raises:
        InputError: the mask, a function of the caller, fails or allows nothing.
    """
    if mask is None:
        return row
    assert history is not None, "masks need a history"
    name = getattr(mask, "__name__", type(mask).__name__)
    what = f"mask {name} after {len(history.output)} output tokens"
    try:
        with torch.inference_mode(False):  # tensors that it keeps can be changed anywhere
            allowed = mask(history.output)
    except Exception as error:
        if not isinstance(error, (InputError, *DEVICE_FAULTS)):
            raise InputError(what, found=repr(error)) from error
        raise
    if allowed is None:
        return row
    if not isinstance(allowed, torch.Tensor):
        found = type(allowed).__name__
        raise InputError(what, expected=f"torch.bool {list(row.shape)}", found=found)
    if allowed.dtype != torch.bool or allowed.shape != row.shape:
        found = f"{allowed.dtype} {list(allowed.shape)}"
        raise InputError(what, expected=f"torch.bool {list(row.shape)}", found=found)
    usable = allowed.clone()  # on the CPU, as masks are: a GPU would be waited for
    usable[[*sampler.suppress, *(i for i, bias in sampler.logit_bias if bias == -math.inf)]] = False
    if not bool(usable.any()):
        found = "only suppressed or banned ones" if bool(allowed.any()) else "none"
        raise InputError(
            what,
            expected="at least one allowed token",
            found=found,
            fix="allow a stop token where the grammar is complete",
        )
    return row.masked_fill(~allowed.to(row.device), -math.inf)


def logprobs(logits: torch.Tensor, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
    """Compute log-probabilities (natural logarithm) of raw logits at temperature 1, in float32.

    Args:
        logits: one row, [V]: after the softcap, before bias, penalties, masks and filters.
        token: token whose log-probability is returned first.
        n: number of top tokens to return, equal logits by lowest id; all if n > V.

    Raises:
        NotFinite: there is no largest logit.
    """
    assert logits.dim() == 1 and n >= 0, (logits.shape, n)
    # A copy starts at an aligned address: kernels sum an unaligned row in another order.
    row = logits.to(torch.float32, copy=True)
    if not torch.isfinite(row.max()):
        raise NotFinite.of_logits()
    logs = row.log_softmax(0)
    ids = _best(row, min(n, len(row)))
    values = logs[[token, *ids]].tolist()
    return values[0], list(zip(ids, values[1:], strict=True))


def sampled_logprobs(
    logits: torch.Tensor,
    token: int,
    n: int,
    sampler: Sampler,
    history: History | None,
    mask: Mask | None = None,
) -> tuple[float, list[tuple[int, float]]]:
    """Compute log-probabilities of the distribution that the token was sampled from: after bias,
    penalties, mask, filters and temperature.

    Args:
        logits: raw logits of one row, [V].
        token, n: see `logprobs`; tokens of probability 0 are left out.
        sampler, history, mask: see `choose_rows`; the history ends before this token.
    """
    edited = _masked(edit_logits(logits, sampler, history), sampler, history, mask)
    value, best = logprobs(sampler.sampled_logits(edited), token, n)
    return value, [(i, logprob) for i, logprob in best if logprob > -math.inf]


def _best(row: torch.Tensor, n: int) -> list[int]:
    """Return the ids of the `n` largest values of [V], ties by lowest id (`topk` does not order
    ties)."""
    if n == 0:
        return []
    candidates = (row >= row.topk(n).values[-1]).nonzero().flatten()
    order = row[candidates].sort(descending=True, stable=True).indices[:n]
    best: list[int] = candidates[order].tolist()
    return best
