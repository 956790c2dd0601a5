"""A snapshot of the counts of an engine, for monitoring."""

from __future__ import annotations

from dataclasses import dataclass

from g4spec.runtime.pool import Pool
from g4spec.runtime.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SlotStats:
    """Counts of one running request.

    Attributes:
        slot, number: its slot, and its position in the order of arrival.
        prompt_tokens, cached_tokens, tokens, drafted, accepted: see `Stats`.
        left: number of tokens that it may still generate.
    """

    slot: int
    number: int
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    left: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of an engine.

    Attributes:
        running, waiting: number of requests.
        pages, pages_free: of the pool.
        slots: the running requests.
        last_step: see `Engine.last_step`.
        steps: number of decode steps since the engine was loaded.
        step_requests: sum over these steps of the number of requests.
    """

    running: int
    waiting: int
    pages: int
    pages_free: int
    slots: tuple[SlotStats, ...]
    last_step: float
    steps: int = 0
    step_requests: int = 0

    @property
    def idle(self) -> bool:
        """True if there is nothing to do."""
        return not (self.running or self.waiting)


def collect_stats(scheduler: Scheduler, pool: Pool, last_step: float) -> EngineStats:
    """Collect the counts; thread-safe while the engine works."""
    slots = []
    live = list(scheduler.running)
    for task in live:
        if (sequence := task.sequence) is not None:
            stats = task.request.stats
            slots.append(
                SlotStats(
                    sequence.slot,
                    task.number,
                    stats.prompt_tokens,
                    stats.cached_tokens,
                    stats.tokens,
                    task.tokens_left,
                    stats.drafted,
                    stats.accepted,
                )
            )
    waiting = len(scheduler.waiting)
    return EngineStats(
        len(live),
        waiting,
        pool.n_pages,
        pool.n_free,
        tuple(slots),
        last_step,
        scheduler.cycles.n_steps,
        scheduler.cycles.n_step_requests,
    )
