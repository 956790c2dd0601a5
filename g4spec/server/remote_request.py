"""Requests whose text is generated in the engine's process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from g4spec.core import Cycle
from g4spec.runtime.request import Driver, Options, Request, Stats
from g4spec.runtime.tokenizer import Tokenizer

log = logging.getLogger("g4spec.server")

MAX_TRIES = 3
"""Maximum number of processes to which a request is submitted before its prefill begins."""


class EngineLost(RuntimeError):
    """The engine's process ended while it generated text."""


class RemoteEngine(Driver, Protocol):
    """The part of `EngineClient` that requests use."""

    tokenizer: Tokenizer
    notes: list[str]

    def cancel(self, request: Request) -> None:
        """End a request, also if the process does not respond."""
        ...


class RemoteRequest(Request):
    """A request whose text is generated in another process."""

    def __init__(self, prompt: Sequence[int], options: Options, client: RemoteEngine) -> None:
        super().__init__(prompt, options, client, client.tokenizer, client.notes)
        self._client = client

    def cancel(self) -> None:
        """See `Request.cancel`."""
        if not self.cancelled:
            super().cancel()
            self._client.cancel(self)

    def add(self, cycle: Cycle, stats: Stats, length: int, text: str) -> None:
        """Add a cycle; replace the text after its first `length` characters by `text`."""
        self.ids += cycle.tokens
        self.stats, self.text = stats, self.text[:length] + text
        self._cycles.append(cycle)
        self._notify()

    def end(
        self, stats: Stats, notes: list[str], error: Exception | None, length: int, text: str
    ) -> None:
        """Mark the request as ended; arguments as for `add`."""
        self.stats, self.notes, self.text = stats, notes, self.text[:length] + text
        self.error, self.done = error, True
        self._notify()

    def _notify(self) -> None:
        """Call the listeners, from the thread that reads the messages about all requests: one that
        fails must not end it."""
        for listener in tuple(self._listeners):
            with _Logged():
                listener()


class _Logged(AbstractContextManager[None]):
    """Logs an exception of its block, which ends it."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            log.error("a listener of a request failed", exc_info=error)
        return isinstance(error, Exception)


@dataclass(slots=True)
class PendingRequest:
    """A request that has not ended.

    Attributes:
        options: pickled `Options`.
        begun: True once prefill has begun.
        tries: number of processes to which it was submitted.
    """

    request: RemoteRequest
    options: bytes
    begun: bool = False
    tries: int = 0

    @property
    def ends_with_process(self) -> bool:
        """Return True if the request is not submitted to another process."""
        return self.begun or self.tries >= MAX_TRIES or self.request.cancelled

    def end_with_process(self, reason: str, failed: Exception | None) -> None:
        """End the request: with EngineLost, or the error of an engine that is not restarted."""
        if self.request.cancelled:
            self.request.finish("cancelled")
            return
        lost = EngineLost(f"the engine failed: {reason}")
        self.request.finish("interrupted", lost if self.begun else failed or lost)
