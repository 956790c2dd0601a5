"""The live view: events of /v1/live about all texts while they are generated.

Every client of the server sees the figures. The words of a text are sent only to clients that know
the secret of its request (field `live`).
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import anyio

from g4spec.core import Cycle
from g4spec.runtime.draft_decision import REASONS, DraftDecision
from g4spec.runtime.request import Request, Stats
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server.engine_client import EngineLike

LiveEvent = tuple[str, dict[str, Any]]
"""Name and data of an event."""

MAX_WATCHERS = 32
"""Maximum number of concurrent streams of /v1/live."""

MAX_QUEUED_EVENTS = 4096
"""Maximum number of events queued for a slow reader; further ones are counted as lost."""

LOAD_PERIOD = 1.0
"""Seconds between two `load` events."""


class TokenOrigins:
    """Labels each token of one text with its origin.

    A piece has `kind`: "accepted" (drafted and accepted), "corrected" (replaces a rejected token)
    or "own" (chosen by the target where nothing was drafted); and `part`, see `Assembler.parts`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stream = tokenizer, tokenizer.stream(special=True)

    def pieces(self, cycle: Cycle, parts: Sequence[str]) -> list[dict[str, Any]]:
        """Return the pieces of a cycle; incomplete UTF-8 characters come with a later piece."""
        out = []
        for i, (token, part) in enumerate(zip(cycle.tokens, parts, strict=True)):
            kind = "accepted"
            if i >= cycle.accepted:
                kind = "corrected" if cycle.accepted < len(cycle.drafted) else "own"
            out.append(
                {"id": token, "text": self._stream.push([token]), "kind": kind, "part": part}
            )
        return out

    def rejected(self, cycle: Cycle) -> list[str]:
        """Return the texts of the rejected drafted tokens."""
        return [self._tokenizer.decode([i], special=True) for i in cycle.drafted[cycle.accepted :]]


@dataclass(slots=True)
class LiveText:
    """The state of one text in the live view.

    Attributes:
        number: number of the text in the events.
        live_key: secret that shows its words, or None.
        request: request of the engine.
        origins: labels of its tokens.
        cycles: steps so far.
        plain_seconds: sum of the seconds that plain decoding would take for these steps; None if
            unknown for any of them.
    """

    number: int
    live_key: str | None
    request: Request
    origins: TokenOrigins
    cycles: int = 0
    plain_seconds: float | None = 0.0

    def head(self) -> dict[str, Any]:
        """Return the data of the event `text`."""
        options = self.request.options
        return {
            "text": self.number,
            "prompt_tokens": self.request.stats.prompt_tokens,
            "draft_max": options.draft_max,
            "most_tokens": options.n_predict,
        }

    def add(self, decision: DraftDecision) -> None:
        """Add the figures of a step."""
        self.cycles += 1
        if decision.plain_seconds is None or self.plain_seconds is None:
            self.plain_seconds = None
        else:
            self.plain_seconds += decision.plain_seconds

    def speed(self) -> dict[str, Any]:
        """Return tokens per second, measured and with plain decoding (one token per step)."""
        plain, stats = self.plain_seconds, self.request.stats
        return {
            "tokens_per_second": stats.tokens_per_second,
            "plain_tokens_per_second": self.cycles / plain if plain else None,
        }


class Live:
    """Sends events to watchers. Used from the event loop of its service only.

    Args:
        model: name of the model.
    """

    def __init__(self, engine: EngineLike, model: str) -> None:
        self._engine, self._model = engine, model
        self._numbers = itertools.count(1)
        self._texts: dict[int, LiveText] = {}
        self._watchers: list[Watcher] = []
        self._hits = self._queries = 0

    def follow(self, request: Request, live_key: str | None) -> LiveText:
        """Create the state of a new text; callable from any thread."""
        return LiveText(
            next(self._numbers), live_key, request, TokenOrigins(self._engine.tokenizer)
        )

    def began(self, text: LiveText) -> None:
        """Send the event `text`: a text was queued."""
        self._texts[text.number] = text
        self._broadcast(text, "text", text.head())

    def cycle(self, text: LiveText, cycle: Cycle, parts: Sequence[str]) -> None:
        """Send the event `cycle`, or `first` for the token computed by prefill.

        Args:
            parts: see `Assembler.parts`.
        """
        stats, decision = text.request.stats, cycle.decision
        if decision is None:
            self._queries += stats.prompt_tokens
            self._hits += stats.cached_tokens
        else:
            text.add(decision)
        if not self._watchers:
            return
        data = _prompt_data(stats) if decision is None else _cycle_data(decision, cycle)
        data = {"text": text.number, **data, "tokens": len(cycle.tokens), **text.speed()}
        private = {}
        if text.live_key is not None:
            private = {
                "pieces": text.origins.pieces(cycle, parts),
                "rejected": text.origins.rejected(cycle),
            }
        self._broadcast(text, "first" if decision is None else "cycle", data, private)

    def ended(self, text: LiveText, finish: str) -> None:
        """Send the event `end`, once per text."""
        if self._texts.pop(text.number, None) is not None:
            stats = text.request.stats
            self._broadcast(
                text,
                "end",
                {
                    "text": text.number,
                    "finish": finish,
                    **text.speed(),
                    "tokens": stats.tokens,
                    "cycles": stats.cycles,
                    "drafted": stats.drafted,
                    "accepted": stats.accepted,
                    "seconds": stats.seconds,
                    "draft_seconds": stats.draft_seconds,
                    "prompt_tokens": stats.prompt_tokens,
                    "cached_tokens": stats.cached_tokens,
                    "notes": text.request.notes,
                },
            )

    def _broadcast(
        self, text: LiveText, name: str, data: dict[str, Any], private: dict[str, Any] | None = None
    ) -> None:
        for watcher in self._watchers:
            known = text.live_key is not None and watcher.may_read(text.live_key)
            watcher.put((name, {**data, **(private or {}), "yours": True} if known else data))

    # ---- watchers

    def watch(self, live_key: str | None) -> Watcher | None:
        """Add and return a watcher, or None if there are too many. Close it after use."""
        if len(self._watchers) >= MAX_WATCHERS:
            return None
        watcher = Watcher(self, live_key)
        self._watchers.append(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    @property
    def idle(self) -> bool:
        """Return True if there is no text."""
        return not self._texts

    def hello(self) -> LiveEvent:
        """Return the event `hello`: the server and its current texts."""
        engine = self._engine
        return "hello", {
            "model": self._model,
            "draft": engine.draft_name,
            "slots": engine.n_slots,
            "n_ctx": engine.n_ctx,
            "why": REASONS,
            "texts": [text.head() for text in self._texts.values()],
        }

    def load(self, lost: int) -> LiveEvent:
        """Return the event `load`. Prompt tokens are summed over all texts started so far."""
        figures = self._engine.stats()
        return "load", {
            "running": figures.running,
            "waiting": figures.waiting,
            "pages": figures.pages,
            "pages_free": figures.pages_free,
            "prompt_tokens": self._queries,
            "cached_tokens": self._hits,
            "lost": lost,
        }


def _prompt_data(stats: Stats) -> dict[str, Any]:
    names = ("prompt_tokens", "cached_tokens", "queue_seconds", "prefill_seconds")
    return {name: getattr(stats, name) for name in names}


def _cycle_data(decision: DraftDecision, cycle: Cycle) -> dict[str, Any]:
    data = asdict(decision)
    return {
        **{k: data[k] for k in ("step", "length", "why", "expected", "texts", "plain_seconds")},
        "rows": 1 + len(cycle.drafted),
        "step_rows": decision.rows,
        "planned_seconds": decision.seconds,
        "drafted": len(cycle.drafted),
        "accepted": cycle.accepted,
        "seconds": cycle.draft_seconds + cycle.step_seconds,
        "draft_seconds": cycle.draft_seconds,
    }


class Watcher:
    """One client of /v1/live."""

    def __init__(self, live: Live, live_key: str | None) -> None:
        self._live, self._live_key = live, (live_key or "").encode()
        self._queue: deque[LiveEvent] = deque()
        self._arrived = asyncio.Event()
        self._lost = 0

    def may_read(self, live_key: str) -> bool:
        """True if it may read a text with this word."""
        return hmac.compare_digest(self._live_key, live_key.encode())

    def put(self, event: LiveEvent) -> None:
        """Queue an event, or count it as lost if the queue is full."""
        if len(self._queue) < MAX_QUEUED_EVENTS:
            self._queue.append(event)
            self._arrived.set()
        else:
            self._lost += 1

    def close(self) -> None:
        """Stop watching."""
        self._live.leave(self)

    async def events(self, draining: Any) -> AsyncGenerator[LiveEvent, None]:
        """Yield events as they occur, and `load` every LOAD_PERIOD seconds.

        Args:
            draining: returns True if the stream is to end after the last text.
        """
        yield self._live.hello()
        due = time.monotonic()
        while True:
            while self._queue:
                yield self._queue.popleft()
            if time.monotonic() >= due:
                due = time.monotonic() + LOAD_PERIOD
                yield self._live.load(self._lost)
                if draining() and self._live.idle:
                    return
            self._arrived.clear()
            with anyio.move_on_after(max(0.0, due - time.monotonic())):
                await self._arrived.wait()
