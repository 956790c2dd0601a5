"""Server-sent events, and cancellation of work when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from g4spec.server.json_response import dumps
from g4spec.server.request_errors import RequestError, internal
from g4spec.server.settings import Settings

log = logging.getLogger("g4spec.server")

PING = ": ping\n\n"
"""SSE comment that keeps an idle connection open; clients skip it."""

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""Headers of every stream: proxies must not cache or buffer it."""

Events = AsyncGenerator[str, None]
T = TypeVar("T")


def event(value: Any, name: str | None = None) -> str:
    """Format one event; a str `value` is sent as it is, anything else as JSON."""
    data = value if isinstance(value, str) else dumps(value)
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


def error_event(error: RequestError) -> str:
    """Format an error as the last event of a stream."""
    return event(error.json())


def ping_seconds(wanted: int | None, default: float) -> float:
    """Return the seconds between the pings of a silent stream; infinity: there are none.

    Args:
        wanted: `sse_ping_interval` of the request.
        default: that of the settings, for a request without it.
    """
    if wanted is None:
        return default
    return wanted if wanted > 0 else math.inf


class ClientDisconnected(Exception):
    """The client closed the connection."""


class _Unread(Exception):
    """The client does not read its stream; a TimeoutError or OSError of the events is another."""


async def cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`; if the client disconnects, cancel it and raise
    ClientDisconnected."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamSource(Protocol):
    """The producer of a stream: a generation, or a watcher of `g4spec.server.live`."""

    def close(self) -> None:
        """Release all resources."""


class EventStream(Response):
    """A response of server-sent events. Its source is closed however the stream ends.

    Args:
        source: producer of the events.
        events: formatted events.
        settings: ping interval and send timeout.
        failed: formats the last event after an error.
        ping: sent when there is no event for `settings.ping` seconds.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: StreamSource,
        events: Events,
        settings: Settings,
        failed: Callable[[RequestError], str] = error_event,
        ping: str = PING,
    ) -> None:
        self._source, self._events, self._failed = source, events, failed
        self._settings, self._ping = settings, ping
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events and pings until the stream ends or the client disconnects; to HEAD, nothing
        but the headers."""
        if scope["method"] == "HEAD":
            self._source.close()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b""})
            return
        watch = asyncio.ensure_future(_wait_for_disconnect(receive))
        work = asyncio.ensure_future(self._stream(send, scope))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for each in (work, watch):
                each.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
            self._source.close()

    async def _stream(self, send: Send, scope: Scope) -> None:
        async def put(message: Message) -> None:
            # Not asyncio.wait_for: before Python 3.12 it may swallow the cancellation.
            try:
                with anyio.fail_after(self._settings.send_limit):
                    await send(message)
            except (TimeoutError, OSError) as error:
                raise _Unread from error

        async def text(piece: str) -> None:
            await put({"type": "http.response.body", "body": piece.encode(), "more_body": True})

        try:
            await put({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._events) as events:
                error = await self._pump(events, text)
            if isinstance(error, RequestError):
                await text(self._failed(error))
            elif not isinstance(error, StopAsyncIteration):
                refused = internal(error)
                scope["app"].state.count_error(refused.status)
                await text(self._failed(refused))
            await put({"type": "http.response.body", "body": b"", "more_body": False})
        except _Unread:
            log.warning(
                "client does not read its stream", extra={"facts": {"id": scope["state"]["id"]}}
            )

    async def _pump(self, events: Events, text: Callable[[str], Awaitable[None]]) -> BaseException:
        """Send the events and pings; return the error that ended them, or StopAsyncIteration."""
        following = asyncio.ensure_future(anext(events))
        try:
            while True:
                done, _ = await asyncio.wait({following}, timeout=self._settings.ping)
                if not done:
                    await text(self._ping)
                    continue
                if (error := following.exception()) is not None:
                    return error
                await text(following.result())
                following = asyncio.ensure_future(anext(events))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


class _Unowned:
    """The source of a stream that has nothing to release."""

    def close(self) -> None:
        """See `StreamSource`."""


def unowned_stream(events: Events) -> EventStream:
    """Return a stream of no model, with the default limits."""
    return EventStream(_Unowned(), events, Settings(""))
