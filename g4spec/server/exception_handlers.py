"""Error responses for the exceptions that handlers raise."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from g4spec.errors import G4Error
from g4spec.server.middleware import error_response, internal_error
from g4spec.server.request_errors import RequestError
from g4spec.server.sse import ClientDisconnected

NO_EMBEDDINGS = "this server computes no embeddings; use one with an embedding model"
NO_RANKS = "this server does not rank documents; use one with a reranking model"

MISSING = {
    "/infill": "Gemma 4 has no tokens for infilling; send the text before the gap to /completion",
    **dict.fromkeys(("/embedding", "/embeddings", "/v1/embeddings"), NO_EMBEDDINGS),
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), NO_RANKS),
}
"""Endpoints of llama.cpp that do not exist here, and why (501, as there)."""


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, RequestError)
    return error_response(refused, request.scope)


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, G4Error)
    return await _refused(request, RequestError.of(error))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{request.url.path:.200}"
    if error.status_code == 404 and path in MISSING:
        return await _refused(request, RequestError(501, f"{path}: {MISSING[path]}"))
    fix = "GET /openapi.json lists all"
    if path.startswith("/api/"):
        fix = "Ollama's API is not supported, use a client of OpenAI's API with a base URL on /v1"
    if path.startswith("/v1/v1/"):
        fix = "set the client's base URL without /v1"
    what = {
        404: f"no endpoint at {path}; {fix}",
        405: f"{path} does not accept {request.method}; see GET /openapi.json",
    }
    response = await _refused(
        request, RequestError(error.status_code, what.get(error.status_code, error.detail))
    )
    response.headers.update(error.headers or {})  # `Allow` of 405, which HTTP requires
    return response


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


EXCEPTION_HANDLERS: dict[Any, Any] = {
    RequestError: _refused,
    G4Error: _error,
    HTTPException: _http,
    ClientDisconnected: _disconnected,
    ClientDisconnect: _disconnected,
    500: internal_error,
}
"""Handlers by exception type or status, for Starlette."""
