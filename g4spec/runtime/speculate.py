"""The loop: propose, step, accept, commit. It knows no kind of draft."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from g4spec.models.spec import MAX_STEP_ROWS, Chooser, Committed, Draft
from g4spec.runtime.length import Length
from g4spec.runtime.sampling import NotFinite
from g4spec.runtime.target import Target


@dataclass(slots=True)
class Cycle:
    """What one cycle did.

    Attributes:
        tokens: newly chosen tokens; all but the last were drafted and accepted.
        logits: the target's logit of each of `tokens`.
        drafted: what the draft proposed. `accepted`: how many of them held.
        draft_seconds, step_seconds: proposing (bringing the draft up to date included), and the
            target's step with the choice of tokens.
    """

    tokens: list[int]
    logits: list[float]
    drafted: list[int] = field(default_factory=list)
    accepted: int = 0
    draft_seconds: float = 0.0
    step_seconds: float = 0.0


class Backlog:
    """Verified tokens that the draft has not been given yet; plain steps cost it nothing."""

    def __init__(self, draft: Draft | None) -> None:
        self.draft = draft
        self._waiting: list[Committed] = []

    def add(self, step: Committed) -> None:
        if self.draft is not None:
            self._waiting.append(step)

    def flush(self) -> None:
        """Bring the draft up to date, in as few calls as a step's rows allow."""
        assert self.draft is not None
        group: list[Committed] = []
        for step in self._waiting:
            if sum(len(g.ids) for g in group) + len(step.ids) > MAX_STEP_ROWS:
                self.draft.commit(joined(group))
                group = []
            group.append(step)
        if group:
            self.draft.commit(joined(group))
        self._waiting.clear()


def joined(steps: list[Committed]) -> Committed:
    """Successive steps as one."""
    if len(steps) == 1:
        return steps[0]
    ids = [token for step in steps for token in step.ids]
    return Committed(ids, steps[0].start, torch.cat([s.hidden for s in steps]),
                     torch.cat([s.taps for s in steps]))  # fmt: skip


def accept(logits: torch.Tensor, drafted: list[int], position: int, chooser: Chooser) -> list[int]:
    """Tokens for positions position + 1 ...: the target's choices, up to the first one that the
    draft did not foresee (included). `logits` [1 + len(drafted), V]."""
    chosen: list[int] = []
    tokens = chooser.choose_rows(logits, position + 1)
    for token, proposed in zip(tokens, [*drafted, None], strict=True):
        chosen.append(token)
        if token != proposed:
            break
    return chosen


class Speculation:
    """Iterates over cycles from the end of a prompt to the end of the context.

    Args:
        backlog: holds the prompt as the target has read it, and the draft if there is one.
        logits: of the prompt's last row, [V]. `position`: where the first new token goes.
        limit: most tokens to choose.
    """

    def __init__(
        self,
        target: Target,
        backlog: Backlog,
        chooser: Chooser,
        length: Length,
        logits: torch.Tensor,
        position: int,
        limit: int,
    ) -> None:
        self.target, self.backlog = target, backlog
        self.chooser, self.length = chooser, length
        self.failed: str | None = None
        self._logits, self._position, self._limit = logits, position, limit

    def __iter__(self) -> Iterator[Cycle]:
        position, left = self._position, self._limit
        token = self.chooser.choose(self._logits, position)
        yield Cycle([token], [float(self._logits[token])])
        left -= 1
        while left > 0 and position < self.target.n_ctx:
            started = time.perf_counter()
            room = min(left - 1, self.target.n_ctx - 1 - position)
            drafted = self._propose(token, position, room)
            proposed = time.perf_counter()
            out = self.target.step([token, *drafted], position)
            chosen = accept(out.logits, drafted, position, self.chooser)
            n = len(chosen)
            read = out.read
            self.backlog.add(Committed(read.ids[:n], read.start, read.hidden[:n], read.taps[:n]))
            ended = time.perf_counter()
            self.length.observe(len(drafted), n - 1, ended - started)
            values = out.logits[range(n), chosen].tolist()
            yield Cycle(chosen, values, drafted, n - 1, proposed - started, ended - proposed)
            position, token, left = position + n, chosen[-1], left - n

    def _propose(self, token: int, position: int, room: int) -> list[int]:
        draft = self.backlog.draft
        if draft is None or room <= 0 or self.failed:
            return []
        count = self.length.next(min(room, draft.max_tokens))
        if count == 0:
            return []
        try:
            self.backlog.flush()
            return draft.propose(token, position, count, self.chooser)[:count]
        except NotFinite as error:
            self.failed = f"the draft cannot be used, going on without it: {error}"
            return []
