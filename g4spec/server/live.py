"""What happens to texts while it happens: the events of /v1/live.

Numbers are told to whoever may use the server, the words of a text only to who knows the word that
its request carries (`live`).
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
from g4spec.server.engine_client import AnyEngine

News = tuple[str, dict[str, Any]]
"""Name and data of an event."""

MOST_WATCHERS = 32
"""Streams of /v1/live at once."""

BACKLOG = 4096
"""Events that wait for a slow reader; what comes then is counted as lost."""

PERIOD = 1.0
"""Seconds between two events `load`."""


class Colours:
    """Tells of each token of one text where it comes from.

    A piece has `kind`: "accepted" (drafted and right), "corrected" (in place of a wrong drafted
    one) or "own" (no draft stood there); and `part`: see `Assembler.parts`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stream = tokenizer, tokenizer.stream(special=True)

    def pieces(self, cycle: Cycle, parts: Sequence[str]) -> list[dict[str, Any]]:
        """Return the pieces of a cycle. Bytes that form no character yet come with a later one."""
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
        """Return the drafted tokens that did not hold."""
        return [self._tokenizer.decode([i], special=True) for i in cycle.drafted[cycle.accepted :]]


@dataclass(slots=True)
class Followed:
    """One text as it is told of.

    Attributes:
        number: its name in the events. word: what shows its words, or None.
        cycles, plain_seconds: steps so far, and what plain decoding would have taken for each; None
            where that was not known for all of them.
    """

    number: int
    word: str | None
    request: Request
    colours: Colours
    cycles: int = 0
    plain_seconds: float | None = 0.0

    def head(self) -> dict[str, Any]:
        """Describe the text before it runs."""
        options = self.request.options
        return {
            "text": self.number,
            "prompt_tokens": self.request.stats.prompt_tokens,
            "draft_max": options.draft_max,
            "most_tokens": options.n_predict,
        }

    def add(self, decision: DraftDecision) -> None:
        """Count a step."""
        self.cycles += 1
        if decision.plain_seconds is None or self.plain_seconds is None:
            self.plain_seconds = None
        else:
            self.plain_seconds += decision.plain_seconds

    def speed(self) -> dict[str, Any]:
        """Compare with plain decoding, which takes a step a token."""
        plain, stats = self.plain_seconds, self.request.stats
        return {
            "tokens_per_second": stats.tokens_per_second,
            "plain_tokens_per_second": self.cycles / plain if plain else None,
        }


class Live:
    """Tells watchers what happens. Belongs to the event loop of its service.

    Args:
        model: its name.
    """

    def __init__(self, engine: AnyEngine, model: str) -> None:
        self._engine, self._model = engine, model
        self._numbers = itertools.count(1)
        self._texts: dict[int, Followed] = {}
        self._watchers: list[Watcher] = []
        self._hits = self._queries = 0

    def follow(self, request: Request, word: str | None) -> Followed:
        """Make the state of a new text; from any thread."""
        return Followed(next(self._numbers), word, request, Colours(self._engine.tokenizer))

    def began(self, text: Followed) -> None:
        """Tell that a text was queued."""
        self._texts[text.number] = text
        self._tell(text, "text", text.head())

    def cycle(self, text: Followed, cycle: Cycle, parts: Sequence[str]) -> None:
        """Tell of a cycle, or of the token that the prompt gave.

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
        told = _read(stats) if decision is None else _told(decision, cycle)
        told = {"text": text.number, **told, "tokens": len(cycle.tokens), **text.speed()}
        words = {}
        if text.word is not None:
            words = {
                "pieces": text.colours.pieces(cycle, parts),
                "rejected": text.colours.rejected(cycle),
            }
        self._tell(text, "first" if decision is None else "cycle", told, words)

    def ended(self, text: Followed, finish: str) -> None:
        """Tell that a text has ended; once."""
        if self._texts.pop(text.number, None) is not None:
            stats = text.request.stats
            self._tell(
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

    def _tell(
        self, text: Followed, name: str, told: dict[str, Any], words: dict[str, Any] | None = None
    ) -> None:
        for watcher in self._watchers:
            known = text.word is not None and watcher.knows(text.word)
            watcher.put((name, {**told, **(words or {}), "yours": True} if known else told))

    # ---- watchers

    def watch(self, word: str | None) -> Watcher | None:
        """Let somebody watch, until the watcher is closed; None where too many do."""
        if len(self._watchers) >= MOST_WATCHERS:
            return None
        watcher = Watcher(self, word)
        self._watchers.append(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Forget a watcher."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    @property
    def idle(self) -> bool:
        """True if there is no text."""
        return not self._texts

    def hello(self) -> News:
        """Describe the server and the texts that it has."""
        engine = self._engine
        return "hello", {
            "model": self._model,
            "draft": engine.draft_name,
            "slots": engine.n_slots,
            "n_ctx": engine.n_ctx,
            "why": REASONS,
            "texts": [text.head() for text in self._texts.values()],
        }

    def load(self, lost: int) -> News:
        """Count what is in work. Prompt tokens are those of the texts that have begun so far."""
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


def _read(stats: Stats) -> dict[str, Any]:
    names = ("prompt_tokens", "cached_tokens", "queue_seconds", "prefill_seconds")
    return {name: getattr(stats, name) for name in names}


def _told(decision: DraftDecision, cycle: Cycle) -> dict[str, Any]:
    told = asdict(decision)
    return {
        **{k: told[k] for k in ("step", "length", "why", "expected", "texts", "plain_seconds")},
        "rows": 1 + len(cycle.drafted),
        "step_rows": decision.rows,
        "planned_seconds": decision.seconds,
        "drafted": len(cycle.drafted),
        "accepted": cycle.accepted,
        "seconds": cycle.draft_seconds + cycle.step_seconds,
        "draft_seconds": cycle.draft_seconds,
    }


class Watcher:
    """One stream of /v1/live.

    Attributes:
        id: for the log.
    """

    id = "live"

    def __init__(self, live: Live, word: str | None) -> None:
        self._live, self._word = live, (word or "").encode()
        self._news: deque[News] = deque()
        self._arrived = asyncio.Event()
        self._lost = 0

    def knows(self, word: str) -> bool:
        """True if it may read a text with this word."""
        return hmac.compare_digest(self._word, word.encode())

    def put(self, news: News) -> None:
        """Queue an event."""
        if len(self._news) < BACKLOG:
            self._news.append(news)
            self._arrived.set()
        else:
            self._lost += 1

    def close(self) -> None:
        """Watch no more."""
        self._live.leave(self)

    async def events(self, draining: Any) -> AsyncGenerator[News, None]:
        """Yield what happens, and `load` in between.

        Args:
            draining: tells, when called, that the stream is to end with the last text.
        """
        yield self._live.hello()
        due = time.monotonic()
        while True:
            while self._news:
                yield self._news.popleft()
            if time.monotonic() >= due:
                due = time.monotonic() + PERIOD
                yield self._live.load(self._lost)
                if draining() and self._live.idle:
                    return
            self._arrived.clear()
            with anyio.move_on_after(max(0.0, due - time.monotonic())):
                await self._arrived.wait()
