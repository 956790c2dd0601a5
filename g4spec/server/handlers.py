"""What a client gets instead of an answer when a request ends in an exception."""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from g4spec.errors import G4Error
from g4spec.server.access import refusal
from g4spec.server.refusals import Refused
from g4spec.server.streams import Gone

log = logging.getLogger("g4spec.server")


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    request.app.state.service.metrics.refuse(refused.status)
    return refusal(refused, request.scope)


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, G4Error)
    return await _refused(request, Refused.of(error))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.method} is not possible here",
    }
    return await _refused(
        request, Refused(error.status_code, what.get(error.status_code, error.detail))
    )


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("a mistake of ours", exc_info=error)
    refused = Refused(500, "an error inside the server, which its log describes")
    return refusal(refused, request.scope)


HANDLERS: dict[Any, Any] = {
    Refused: _refused,
    G4Error: _error,
    HTTPException: _http,
    Gone: _gone,
    500: _unexpected,
}
"""By exception, as Starlette takes them."""
