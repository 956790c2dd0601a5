"""Resumable streams: generation continues after a disconnect, and clients can read on.

A conversation id identifies the stream, as in llama.cpp.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.requests import Request

from g4spec.server.request_errors import RequestError, check_query, internal
from g4spec.server.sse import Events, StreamSource

KEEP_SECONDS = 300.0
"""Seconds that a stream is kept after it has ended."""

MAX_BYTES = 64 << 20
"""Maximum total size of kept streams, in bytes; the oldest ended ones are dropped first."""


def is_valid_name(name: str) -> bool:
    """Return True for 1 to 256 characters, which an X-Conversation-Id may have."""
    return 1 <= len(name) <= 256


def check_named(name: str) -> None:
    """Raise RequestError unless a request names a stream."""
    if not name:
        raise RequestError(
            400,
            "conv_id: missing; send the X-Conversation-Id of the stream, /v1/stream?conv_id=ID",
            param="conv_id",
        )


def not_found(name: str) -> RequestError:
    """Return the error for a stream that does not exist."""
    return RequestError(
        404,
        f"there is no stream {name!r:.80}: its request had no X-Conversation-Id header, or it "
        f"ended more than {KEEP_SECONDS:g} seconds ago",
        param="conv_id",
        code="stream_not_found",
    )


class RecordedStream:
    """A recorded stream of events; each event has its number as `id`, from 1 on.

    Args:
        name: conversation id.
        source: producer of the events; closed at the end of the stream.
        events: formatted events.
        failed: formats the last event after an error.
    """

    def __init__(
        self, name: str, source: StreamSource, events: Events, failed: Callable[[RequestError], str]
    ) -> None:
        self.id, self.size, self._source = name, 0, source
        self.ended: float | None = None
        self._events: list[str] = []
        self._arrived = asyncio.Event()
        self._failed = failed
        self._task = asyncio.create_task(self._consume(events))
        self._task.add_done_callback(self._end)  # also of a task that never ran

    def close(self) -> None:
        """Do nothing: the client may reconnect. See `sse.StreamSource`."""

    async def _consume(self, events: Events) -> None:
        async with aclosing(events):
            async for each in events:
                self._add(each)

    def _end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RequestError):
            self._add(self._failed(error))
        elif error is not None:
            self._add(self._failed(internal(error)))
        self._source.close()
        self.ended = time.monotonic()
        self._notify()

    def _add(self, event: str) -> None:
        self._events.append(f"id: {len(self._events) + 1}\n{event}")
        self.size += len(event)
        self._notify()

    def _notify(self) -> None:
        self._arrived.set()
        self._arrived = asyncio.Event()

    def cancel(self) -> None:
        """Cancel the task that records the events."""
        self._task.cancel()

    async def stop(self) -> None:
        """Cancel the task that records the events, and wait for its end."""
        self.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def follow(self, at: int) -> AsyncGenerator[str, None]:
        """Yield the events after the first `at` ones, until the stream ends."""
        while at < len(self._events) or self.ended is None:
            if at < len(self._events):
                yield self._events[at]
                at += 1
            else:
                await self._arrived.wait()


class ReplayStore:
    """Recorded streams by owner and id. Used from one event loop only."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str | None, str], RecordedStream] = OrderedDict()

    async def begin(
        self,
        owner: str | None,
        name: str,
        source: StreamSource,
        events: Events,
        failed: Callable[[RequestError], str],
    ) -> RecordedStream:
        """Record a stream; stop an earlier one with the same id. See `RecordedStream`."""
        while (before := self._kept.pop((owner, name), None)) is not None:
            await before.stop()  # meanwhile another with the same id may begin
        self._drop()
        replay = self._kept[owner, name] = RecordedStream(name, source, events, failed)
        return replay

    def get(self, owner: str | None, name: str) -> RecordedStream:
        """Return a stream; raise RequestError (404) if it does not exist."""
        self._drop()
        if (found := self._kept.get((owner, name))) is None:
            raise not_found(name)
        return found

    @staticmethod
    def name(request: Request) -> str | None:
        """Return the X-Conversation-Id header of a request, or None."""
        name = request.headers.get("x-conversation-id")
        if name is not None and not is_valid_name(name):
            raise RequestError(
                400, "X-Conversation-Id: expected 1 to 256 characters", param="X-Conversation-Id"
            )
        return name

    def requested(self, request: Request, owner: str | None) -> tuple[RecordedStream, int]:
        """Return the stream that a request resumes, and how many events the client has."""
        query = request.query_params
        check_query(query, ("conv_id", "from", "model"))
        check_named(name := query.get("conv_id", ""))
        at = query.get("from", request.headers.get("last-event-id", "0"))
        if not re.fullmatch("[0-9]{1,9}", at):
            raise RequestError(
                400, "from: expected the id of the last event received, or 0 for all", param="from"
            )
        return self.get(owner, name), int(at)

    async def delete(self, owner: str | None, name: str) -> None:
        """Stop and remove a stream."""
        await self.get(owner, name).stop()
        self._kept.pop((owner, name), None)

    def discard(self, owner: str | None, name: str) -> None:
        """Stop and remove a stream if it exists, without waiting for its end."""
        if (found := self._kept.pop((owner, name), None)) is not None:
            found.cancel()

    def _drop(self) -> None:
        """Remove ended streams that are too old or exceed MAX_BYTES in total."""
        size, now = sum(each.size for each in self._kept.values()), time.monotonic()
        for key, each in list(self._kept.items()):
            if each.ended is not None and (now - each.ended > KEEP_SECONDS or size > MAX_BYTES):
                size -= self._kept.pop(key).size

    async def close(self) -> None:
        """Stop all streams."""
        await asyncio.gather(*(each.stop() for each in self._kept.values()))
