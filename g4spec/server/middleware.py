"""ASGI middleware: API keys, body size limit, panics of Rust libraries, request log."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from g4spec.server.json_response import JsonResponse, dumps
from g4spec.server.request_errors import RequestError

log = logging.getLogger("g4spec.server")

PATHS_WITHOUT_KEY = ("/", "/health", "/v1/health", "/openapi.json")
"""Paths that require no API key; the chat page asks for the key that its requests need."""


def error_response(refused: RequestError, scope: Scope) -> JsonResponse:
    """Return the response for an error, in Anthropic's format under /v1/messages, else OpenAI's."""
    headers = {}
    if refused.retry_after is not None:
        headers["retry-after"] = str(refused.retry_after)
    if scope["path"].startswith("/v1/messages"):
        body = {**refused.anthropic(), "request_id": scope.get("state", {}).get("id")}
    else:
        body = refused.json()
    return JsonResponse(body, refused.status, headers)


class ApiKeyMiddleware:
    """Rejects requests without a valid API key (401); accepts all if no keys are configured."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._known = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and self._known and scope["path"] not in PATHS_WITHOUT_KEY:
            given = _digest(_key(Headers(scope=scope)))
            # Compare with every key, in constant time: response times must not leak a match.
            known = [hmac.compare_digest(given, digest) for digest in self._known]
            if not any(known):
                refused = RequestError(
                    401,
                    "the API key is missing or wrong; send `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                )
                await error_response(refused, scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = given.hex()[:8]
        await self._app(scope, receive, send)


def _key(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class _TooLarge(Exception):
    pass


class BodyLimitMiddleware:
    """Rejects bodies of more than `limit` bytes (413) before reading them completely."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size, started = 0, False
        length = Headers(scope=scope).get("content-length", "0")

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise _TooLarge
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if length.isdecimal() and int(length[:20]) > self._limit:
                raise _TooLarge
            await self._app(scope, limited, watched)
        except _TooLarge:
            if started:
                raise
            refused = RequestError(
                413,
                f"the request body has more than {self._limit} bytes; send a smaller one",
                code="too_large",
            )
            response = error_response(refused, scope)
            response.headers["connection"] = "close"
            await response(scope, receive, send)


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

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = (
                    number  # names of OpenAI and Anthropic
                )
            await send(message)

        try:
            await self._app(scope, receive, numbered)
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
