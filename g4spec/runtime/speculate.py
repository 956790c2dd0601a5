"""The loop: propose, step, accept, commit. It knows no kind of draft.

A backend may play such cycles as a whole (`Player`), and where nothing about the next cycle depends
on what this one finds but numbers that it passes on, the next one is started before this one is
read. A cycle that turns out not to be wanted (a text has ended) is dropped: what it appended to
caches stands behind the last verified position, where it is overwritten before anything looks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from g4spec.core import Draft, MAX_STEP_ROWS
from g4spec.ops.sampling import NotFinite, Sampler
from g4spec.runtime.length import Length
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


@dataclass(slots=True)
class Played:
    """A cycle that a `Player` played.

    Attributes:
        cycle: its times are the backend's own, without what the host took.
        refused: whether the draft's logits were not finite. bad: the same of the target's.
        read: what a plain step has read, for a draft that has not been given it.
    """

    cycle: Cycle
    refused: bool
    bad: bool
    read: Committed | None = None


class Player(Protocol):
    """Plays cycles of one target and one draft, with the draft brought up to date in each; or of a
    target alone."""

    def ready(self, sampler: Sampler) -> bool:
        """Take another sampler; False where it cannot."""
        ...

    def begin(self, token: int, position: int) -> None:
        """The next cycle starts at `position`, where the newest token stands; cycles that have been
        started and not been asked for are dropped."""
        ...

    def start(self, count: int) -> None:
        """Start a cycle of `count` drafted tokens, none without a draft, where the one before it
        will have ended. Two may be started and not yet asked for."""
        ...

    def result(self) -> Played:
        """Wait for the oldest one."""
        ...


MOST_WAITING = 1024
"""Rows that a draft may have missed: it could not be afforded for so long, so it never will be."""


class Backlog:
    """Verified tokens, `rows` of them, that the draft has not been given yet; plain steps cost it
    nothing."""

    def __init__(self, draft: Draft | None) -> None:
        self.draft = draft
        self.rows = 0
        self._waiting: list[Committed] = []

    def add(self, step: Committed) -> None:
        if self.draft is not None:
            self._waiting.append(step)
            self.rows += len(step.ids)

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
        self.rows = 0


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
        player: plays cycles with a draft, if given; it has been told the sampler.
        plain: the same of plain steps.
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
        player: Player | None = None,
        plain: Player | None = None,
    ) -> None:
        self.target, self.backlog = target, backlog
        self.chooser, self.length = chooser, length
        self.failed: str | None = None
        self._logits, self._position, self._limit = logits, position, limit
        self._player, self._plain = player, plain
        self._ahead: Player | None = None  # has started a cycle that has not been asked for

    def __iter__(self) -> Iterator[Cycle]:
        position, left = self._position, self._limit
        token = self.chooser.choose(self._logits, position)
        yield Cycle([token], [float(self._logits[token])])
        left -= 1
        while left > 0 and position < self.target.n_ctx:
            room = min(left - 1, self.target.n_ctx - 1 - position)
            count = self._count(room)
            player = self._player if count else self._plain
            if player:
                cycle = self._play(player, token, position, count, room)
            else:
                cycle = self._step(token, position, count)
            n = len(cycle.tokens)
            seconds = cycle.draft_seconds + cycle.step_seconds
            self.length.observe(len(cycle.drafted), cycle.accepted, seconds)
            position, token, left = position + n, cycle.tokens[-1], left - n
            yield cycle

    def _count(self, room: int) -> int:
        """Tokens to draft now."""
        draft = self.backlog.draft
        if draft is None or room <= 0 or self.failed:
            return 0
        count = self.length.next(min(room, draft.max_tokens))
        if not count and self.backlog.rows > MOST_WAITING:
            self._give_up("a proposal takes more time than may be risked")
        return count

    def _step(self, token: int, position: int, count: int) -> Cycle:
        """A cycle in parts."""
        started = time.perf_counter()
        drafted = self._propose(token, position, count) if count else []
        proposed = time.perf_counter()
        out = self.target.step([token, *drafted], position)
        chosen = accept(out.logits, drafted, position, self.chooser)
        n, read = len(chosen), out.read
        self.backlog.add(Committed(read.ids[:n], read.start, read.hidden[:n], read.taps[:n]))
        values = out.logits[range(n), chosen].tolist()
        ended = time.perf_counter()
        return Cycle(chosen, values, drafted, n - 1, proposed - started, ended - proposed)

    def _propose(self, token: int, position: int, count: int) -> list[int]:
        assert self.backlog.draft is not None
        try:
            self.backlog.flush()
            return self.backlog.draft.propose(token, position, count, self.chooser)[:count]
        except NotFinite as error:
            self._give_up(str(error))
            return []

    def _play(self, player: Player, token: int, position: int, count: int, room: int) -> Cycle:
        """A cycle as a whole; the next one is started too, if it is certain to be of the same
        length, even where all of this one is accepted."""
        started = time.perf_counter()
        if self._ahead is not player:
            if count:
                self.backlog.flush()
            player.begin(token, position)
            player.start(count)
        later = room - (count + 1)  # room of the next one at least
        self._ahead = player if later >= count and self._again(count, later) else None
        if self._ahead:
            player.start(count)
        played = player.result()
        if played.read:
            self.backlog.add(played.read)
        cycle, waited = played.cycle, time.perf_counter() - started
        if played.bad:
            raise NotFinite.of_logits()
        if played.refused:
            self._give_up(str(NotFinite.of_logits()))
        # The longer of both: cycles may have run while nobody waited, or waited for the host.
        cycle.step_seconds = max(waited - cycle.draft_seconds, cycle.step_seconds)
        return cycle

    def _again(self, count: int, room: int) -> bool:
        """Whether the next cycle is one of `count` tokens too."""
        if self.backlog.draft is None or self.failed:
            return True
        return self.length.again(count, min(room, self.backlog.draft.max_tokens))

    def _give_up(self, why: str) -> None:
        self.backlog = Backlog(None)  # nothing is kept for it any more
        self.failed = f"the draft cannot be used, going on without it: {why}"
