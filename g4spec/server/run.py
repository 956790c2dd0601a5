"""Run the server until a signal: the first finishes running requests, the second stops at once."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol
from urllib.parse import unquote

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from g4spec.server import model_router
from g4spec.server.addresses import ServerAddress
from g4spec.server.app import create_app
from g4spec.server.json_response import JsonResponse
from g4spec.server.middleware import MAX_FOLLOWERS, JsonLogFormatter
from g4spec.server.request_errors import RequestError
from g4spec.server.service import Service

HEADER_LIMIT = 64 << 10
"""Maximum size of the request line and headers, in bytes."""

IDLE_SECONDS = 30
"""Time after which a connection ends that has no complete head of a request."""

FILES = 128
"""Open files besides connections: sockets, pipes, model files while they are loaded."""

MAX_FILES = 1 << 20
"""Largest limit of open files to set; some programs go through all numbers below it."""


class HttpProtocol(H11Protocol):
    """HTTP/1.1 that answers what is not HTTP with an error in JSON, too, and ends connections whose
    next request does not begin, or stops within its head."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _limit_head(self) -> None:
        """Start the timer of an incomplete head, or stop it: a request has its own limits."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(IDLE_SECONDS, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        """See `H11Protocol`, which calls this for an error of h11 that it has caught."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application must not answer after this
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            why = str(sys.exc_info()[1] or msg).partition(": bytearray")[0]
            refused = RequestError(400, f"the request is not valid HTTP: {why}")
            response = JsonResponse(refused.json(), 400, {"connection": "close"})
            head = h11.Response(status_code=400, headers=response.raw_headers, reason="Bad Request")
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


_ORIGIN = re.compile(b"https?://[^/]*", re.IGNORECASE)


def origin_form(application: ASGIApp) -> ASGIApp:
    """Return the application with only the path of a request whose target is a whole address, as
    clients send it to a proxy (RFC 9112, 3.2.2)."""

    async def converted(scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path", b"")
        if (origin := _ORIGIN.match(raw)) is not None:
            raw = raw[origin.end() :] or b"/"
            scope = {**scope, "raw_path": raw, "path": unquote(raw.decode("ascii"))}
        await application(scope, receive, send)

    return converted


class Drainable(Protocol):
    """An application that rejects new requests while `draining` is True."""

    draining: bool


class Server(uvicorn.Server):
    """A uvicorn server that drains at the first signal and stops at the second.

    Args:
        ready: called once the server accepts requests.
    """

    def __init__(
        self, config: uvicorn.Config, service: Drainable, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`; signals are captured before the event loop starts.

        An exception of the caller's handler in the first steps of the loop could end a step before
        it began, and the loop would wait for that step for ever.
        """
        with self._signals_captured():
            super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`; shut the application down after a second signal, too."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: `run` has captured the signals."""
        yield

    @contextmanager
    def _signals_captured(self) -> Iterator[None]:
        """See `uvicorn.Server.capture_signals`; the end of the terminal counts too, but not under
        `nohup`."""
        before = signal.getsignal(signal.SIGHUP)
        is_main = threading.current_thread() is threading.main_thread()
        captured = is_main and before is not signal.SIG_IGN
        if captured:
            signal.signal(signal.SIGHUP, self.handle_exit)
        try:
            with super().capture_signals():
                yield
        finally:
            if captured:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `uvicorn.Server`."""
        self._service.draining = True
        if self.should_exit and self._loop is not None:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._cut)
        self.should_exit = True

    def _cut(self) -> None:
        """Close all connections at once."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()


def configure_logging() -> None:
    """Send the server's log to stderr, one line of JSON per record."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLogFormatter())
    handler.addFilter(is_news)
    levels = {"g4spec.server": logging.INFO, "uvicorn": logging.ERROR, "asyncio": logging.ERROR}
    for name, level in levels.items():
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(level)
        log.propagate = False
    logging.getLogger("asyncio").filters[:] = [OncePerMinute()]


def raise_file_limit(connections: int) -> None:
    """Raise the soft limit of open files to the hard one; log it if that is too low for so many
    connections. Subprocesses inherit it."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    except (ImportError, ValueError, OSError):
        return  # not supported by this system
    needed = connections + FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        facts = {"limit": soft, "needed": needed, "fix": "raise the hard limit (ulimit -Hn)"}
        logging.getLogger("g4spec.server").warning(
            "the limit of open files is too low for all connections", extra={"facts": facts}
        )


class OncePerMinute(logging.Filter):
    """Passes a message once a minute: asyncio repeats one thousands of times a second while no file
    descriptor is free for a connection."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[str, float] = "", 0.0  # without the name of the socket

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        error = record.exc_info[1] if record.exc_info else None
        message, now = f"{record.getMessage().splitlines()[0]} {error}", time.monotonic()
        if self._last[0] == message and now - self._last[1] < 60:
            return False
        self._last = message, now
        return True


def is_news(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's reports of an error of the application (`middleware` has logged
    it), of a request that was cancelled (the second signal cancels all) and of a response without
    an end (`sse` has logged whose client does not read it): the last two are no errors."""
    error = record.exc_info[1] if record.exc_info else None
    logged = record.msg == "Exception in ASGI application\n" and isinstance(error, Exception)
    cut = record.msg == "ASGI callable returned without completing response."
    return not (logged or cut or isinstance(error, asyncio.CancelledError))


def create_server(
    application: Starlette, service: Drainable, address: ServerAddress, ready: Callable[[], None]
) -> Server:
    """Create the server; run it with `run(sockets=[...])`.

    Args:
        ready: called once the server accepts requests.
    """
    config = uvicorn.Config(
        origin_form(application),
        log_config=None,
        access_log=False,
        ssl_certfile=address.certificate,
        ssl_keyfile=address.key,
        server_header=False,
        h11_max_incomplete_event_size=HEADER_LIMIT,
        loop="asyncio",  # also where uvloop is installed, which the tests do not have
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        timeout_keep_alive=IDLE_SECONDS,
    )
    return Server(config, service, ready)


def serve(
    service: Service,
    address: ServerAddress,
    listeners: list[socket.socket],
    ready: Callable[[], None],
    **more: Any,
) -> None:
    """Serve one model until a signal.

    Args:
        listeners: listening sockets (`g4spec.server.addresses.listen`).
        ready: called once the server accepts requests.
        more: arguments of `g4spec.server.app.create_app`.
    """
    configure_logging()
    raise_file_limit(service.settings.queue + service.engine.n_slots + MAX_FOLLOWERS)
    service.warm_up()
    create_server(create_app(service, **more), service, address, ready).run(sockets=listeners)


def serve_models(
    router: model_router.ModelRouter,
    address: ServerAddress,
    listeners: list[socket.socket],
    ready: Callable[[], None],
    **more: Any,
) -> None:
    """Serve several models until a signal; see `serve`."""
    configure_logging()
    raise_file_limit(MAX_FOLLOWERS)
    application = model_router.create_app(router, **more)
    create_server(application, router.models, address, ready).run(sockets=listeners)
