"""ASGI middleware: API keys, origins, limits of bodies and streams, panics, request log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from g4spec.server.json_response import JsonResponse, dumps
from g4spec.server.request_errors import INTERNAL, RequestError, internal

log = logging.getLogger("g4spec.server")

BODY_LIMIT = 32 << 20
"""Default of the maximum size of a request body, in bytes."""

PATHS_WITHOUT_KEY = ("/", "/health", "/v1/health", "/openapi.json")
"""Paths that require no API key for GET and HEAD; the chat page asks for the key that its requests
need."""


def error_response(refused: RequestError, scope: Scope) -> JsonResponse:
    """Count an error and return its response, in Anthropic's format under /v1/messages, else
    OpenAI's."""
    if "failed" not in scope.get("state", {}):
        scope["app"].state.count_error(refused.status)
    headers = {}
    if refused.retry_after is not None:
        headers["retry-after"] = str(refused.retry_after)
    if refused.code == "timeout":  # SDKs would repeat it, with all of its computation
        headers["x-should-retry"] = "false"
    if scope["path"].startswith("/v1/messages"):
        body = {**refused.anthropic(), "request_id": scope.get("state", {}).get("id")}
    else:
        body = refused.json()
    return JsonResponse(body, refused.status, headers)


class ApiKeyMiddleware:
    """Rejects requests without a valid API key (401); accepts all if no keys are configured."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._key_digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and self._key_digests and not _is_open(scope):
            digest_sent = _digest(_key(Headers(scope=scope)))
            # Compare with every key, in constant time: response times must not leak a match.
            matches = [
                hmac.compare_digest(digest_sent, key_digest) for key_digest in self._key_digests
            ]
            if not any(matches):
                refused = RequestError(
                    401,
                    "the API key is missing or wrong; send `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                )
                await error_response(refused, scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = digest_sent.hex()[:8]
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    return scope["path"] in PATHS_WITHOUT_KEY and scope["method"] in ("GET", "HEAD")


def _key(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class _RefusedBody(Exception):
    """Passes through the application, unlike a RequestError, which it would answer itself."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.answer = RequestError(status, message, code=code)


BODY_SECONDS = 30.0
"""Maximum time between two parts of a request body."""


class BodyLimitMiddleware:
    """Rejects bodies of more than `limit` bytes (413) before reading them completely, those that
    stop before their end for BODY_SECONDS (408), and compressed ones (415)."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size, complete, started = 0, False, False
        headers = Headers(scope=scope)
        length, encoding = (headers.get(f"content-{what}", "") for what in ("length", "encoding"))

        async def limited_receive() -> Message:
            nonlocal size, complete
            if complete:  # what follows is the disconnect
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), BODY_SECONDS)
            except asyncio.TimeoutError:
                what = f"nothing of the request body arrived for {BODY_SECONDS:g} seconds"
                raise _RefusedBody(408, what, "body_timeout") from None
            size += len(message.get("body", b""))
            if size > self._limit:
                raise self._too_large()
            complete = not message.get("more_body", False)
            # At the end: a client that still sends may not read the response.
            if complete and size and encoding.lower() not in ("", "identity"):
                what = f"Content-Encoding: {encoding!r:.80} is not supported; send the body without"
                raise _RefusedBody(415, f"{what} compression", "unsupported_encoding")
            return message

        async def tracked_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if length.isdecimal() and int(length[:20]) > self._limit:
                raise self._too_large()
            await self._app(scope, limited_receive, tracked_send)
        except _RefusedBody as refused:
            if started:
                raise
            response = error_response(refused.answer, scope)
            response.headers["connection"] = "close"
            if refused.answer.status == 415:
                response.headers["accept-encoding"] = "identity"  # RFC 7694
            await response(scope, receive, send)

    def _too_large(self) -> _RefusedBody:
        what = f"the request body has more than {self._limit} bytes; send a smaller one"
        return _RefusedBody(413, what, "too_large")


MAX_FOLLOWERS = 256
"""Maximum number of open streams of GET requests."""


class StreamLimitMiddleware:
    """Rejects a GET request of a stream (429) while `limit` of them are open. The number of streams
    of POST requests is limited by the request queue."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit, self._open = app, limit, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or not _opens_stream(scope):
            await self._app(scope, receive, send)
            return
        if self._open >= self._limit:
            what = f"{self._limit} streams of GET requests are open; retry later"
            refused = RequestError(429, what, code="too_many_streams", retry_after=5)
            await error_response(refused, scope)(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1


def _opens_stream(scope: Scope) -> bool:
    """Return True if the response to a request is a stream that does not generate anything."""
    path = scope["path"]
    stored = path.startswith("/v1/responses/") and b"stream=true" in scope["query_string"]
    return scope["method"] == "GET" and (
        stored or path in ("/v1/live", "/v1/stream", "/models/events")
    )


LOOPBACK_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?")
"""Origins that `localhost` stands for in `--cors-origin`."""


READABLE_HEADERS = (
    "x-speculation",
    "x-request-id",
    "request-id",
    "retry-after",
    "x-should-retry",
    "process-start-time-unix",
)
"""Headers of responses that pages of allowed origins can read, in addition to those of CORS."""


class OriginMiddleware(CORSMiddleware):
    """Allows cross-origin requests (CORS) of some origins.

    A preflight request of another origin is answered with 200 and without the CORS headers, as
    llama.cpp does: the browser then blocks the request.

    Args:
        origins: allowed origins; `*` allows all, `localhost` those of this machine on any port.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=[origin for origin in origins if origin != "localhost"],
            allow_origin_regex=LOOPBACK_ORIGIN.pattern if "localhost" in origins else None,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=READABLE_HEADERS,
        )
        # Pages of the internet that may send requests, too; older versions of Starlette lack it.
        self.allow_private_network = True

    def preflight_response(self, request_headers: Headers) -> Response:
        """See `CORSMiddleware`."""
        if self.is_allowed_origin(request_headers["origin"]):
            return super().preflight_response(request_headers)
        return Response(headers={"vary": "Origin"})


class DisabledPathsMiddleware:
    """Answers requests to disabled paths with an error: 404 for the page, otherwise 501.

    Args:
        paths: disabled paths, each with the option of `serve` that disables it.
    """

    def __init__(self, app: ASGIApp, paths: Mapping[str, str]) -> None:
        self._app, self._paths = app, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        scope.setdefault("state", {})["disabled"] = self._paths  # for /props
        option = self._paths.get(scope["path"]) if scope["type"] == "http" else None
        if option is None:
            await self._app(scope, receive, send)
            return
        status = 404 if scope["path"] == "/" else 501
        refused = RequestError(
            status, f"{scope['path']} is disabled; start the server without {option}"
        )
        await error_response(refused, scope)(scope, receive, send)


class WakeMiddleware:
    """Calls `wake` for each POST request: GET requests show the state of a sleeping server."""

    def __init__(self, app: ASGIApp, wake: Callable[[], None]) -> None:
        self._app, self._wake = app, wake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["method"] == "POST":
            self._wake()
        await self._app(scope, receive, send)


async def internal_error(request: Request, error: Exception) -> Response:
    """Log an unexpected error and return its response (500)."""
    state = request.scope.setdefault("state", {})
    # Starlette raises the error again, and handles it again outside.
    again = state.get("failed") == id(error)
    refused = RequestError(500, INTERNAL) if again else internal(error)
    response = error_response(refused, request.scope)
    state["failed"] = id(error)
    response.headers["connection"] = "close"  # as uvicorn does after an error
    return response


class PanicMiddleware:
    """Converts a panic of a Rust library into a RuntimeError, which is answered with 500.

    A PanicException is not an Exception: Starlette would drop the connection without a response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await self._app(scope, receive, send)
        except BaseException as error:
            if type(error).__name__ == "PanicException":
                raise RuntimeError(f"a library panicked: {error}") from error
            raise


class RequestLogMiddleware:
    """Logs one JSON line per request, without any of its text, and sets the request id headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        number = uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["facts"], state["id"] = {}, number

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = number  # as OpenAI
                headers["request-id"] = number  # as Anthropic
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - began
            log.info(
                "request",
                extra={
                    "facts": {
                        "id": number,
                        "method": scope["method"],
                        "path": scope["path"][:200],
                        "status": status,
                        "seconds": round(seconds, 4),
                        "key": state.get("key"),
                        **state["facts"],
                    }
                },
            )


def create_middleware(
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    body_limit: int = BODY_LIMIT,
    disabled: Mapping[str, str] | None = None,
) -> list[Middleware]:
    """Return the middleware of an application, outermost first; arguments as in
    `g4spec.server.app.create_app`."""
    out = [Middleware(RequestLogMiddleware)]
    if origins:
        out.append(Middleware(OriginMiddleware, origins=origins))
    # Starlette's own is outermost: its responses lack the headers of the middleware above.
    out.append(Middleware(ServerErrorMiddleware, handler=internal_error))
    out.append(Middleware(BodyLimitMiddleware, limit=body_limit))
    out.append(Middleware(ApiKeyMiddleware, keys=keys))
    out.append(Middleware(StreamLimitMiddleware, limit=MAX_FOLLOWERS))
    if disabled:
        out.append(Middleware(DisabledPathsMiddleware, paths=disabled))
    return [*out, Middleware(PanicMiddleware)]


class JsonLogFormatter(logging.Formatter):
    """Formats log records as one line of JSON each."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return dumps(line, default=str)
