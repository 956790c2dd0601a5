"""The endpoints of stored responses, which need no model."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from g4spec.server import response_fields
from g4spec.server.json_response import JsonResponse
from g4spec.server.openapi import described
from g4spec.server.response_store import Record, ResponseStore
from g4spec.server.settings import Settings
from g4spec.server.sse import EventStream

MODEL = "name of the model"
"""Description of a query parameter."""


class StoredResponses:
    """The handlers of stored responses, of one model or of all.

    Args:
        store: the responses.
        settings: limits of streams.
        check_model: raises RequestError (404) for the name of a model that is not served.
    """

    def __init__(
        self, store: ResponseStore, settings: Settings, check_model: Callable[[str | None], object]
    ) -> None:
        self._store, self._settings, self._check_name = store, settings, check_model

    def _check_model(self, request: Request) -> None:
        """Raise RequestError (404) if the query names a model that is not served."""
        self._check_name(request.query_params.get("model") or None)

    @described(
        stream="true: as events",
        starting_after="sequence_number of the last event received",
        model=MODEL,
    )
    async def response(self, request: Request) -> Response:
        """Answer GET and DELETE /v1/responses/{id}."""
        self._check_model(request)
        name, key = request.path_params["id"], owner(request)
        if request.method == "DELETE":
            return JsonResponse(self._store.delete(name, key))
        record = self._store.get(name, key)
        after = response_fields.followed(request.query_params, record.events is not None)
        return JsonResponse(record.response) if after is None else self._follow(record, after)

    def _follow(self, record: Record, after: int) -> Response:
        return EventStream(record, record.follow(after), self._settings)

    @described(model=MODEL)
    async def cancel(self, request: Request) -> Response:
        """Answer POST /v1/responses/{id}/cancel."""
        self._check_model(request)
        found = await self._store.cancel(request.path_params["id"], owner(request))
        return JsonResponse(found)

    @described(
        limit="1 to 100, default 20", order="asc or desc", after="id of an item", model=MODEL
    )
    async def input_items(self, request: Request) -> Response:
        """Answer GET /v1/responses/{id}/input_items."""
        self._check_model(request)
        record = self._store.get(request.path_params["id"], owner(request))
        return JsonResponse(self._store.list_items(record, request.query_params))


def stored_routes(handlers: StoredResponses | type[StoredResponses]) -> list[Route]:
    """Return the routes; see `endpoints.routes`."""
    return [
        Route("/v1/responses/{id}", handlers.response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", handlers.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", handlers.input_items, methods=["GET"]),
    ]


def owner(request: Request) -> str | None:
    """Return the first digits of the hash of the request's API key, or None if the server has no
    keys."""
    key: str | None = request.scope.get("state", {}).get("key")
    return key
