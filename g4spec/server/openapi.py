"""Generate the OpenAPI document: all paths with the fields of their requests."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from g4spec import __version__
from g4spec.server import fields
from g4spec.server.middleware import PATHS_WITHOUT_KEY

Body = TypeVar("Body", bound=BaseModel)
Method = TypeVar("Method", bound=Callable[..., Any])
Handler = Callable[[Any, Request], Awaitable[Response]]

_SCHEMAS = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def takes(
    model: type[Body], read: Callable[[type[Body], bytes], Body] = fields.read
) -> Callable[[Callable[[Any, Request, Body], Awaitable[Response]]], Handler]:
    """Return a decorator for handlers that take a validated request body.

    Args:
        model: schema of the body, also used in the OpenAPI document.
        read: parses and validates the body; default: `fields.read`.
    """

    def around(handler: Callable[[Any, Request, Body], Awaitable[Response]]) -> Handler:
        @functools.wraps(handler)
        async def handled(self: Any, request: Request) -> Response:
            return await handler(self, request, read(model, await request.body()))

        handled.__dict__["body"] = model
        return handled

    return around


def described(
    content: str = "application/json", body: type[BaseModel] | None = None, **query: str
) -> Callable[[Method], Method]:
    """Return a decorator that documents a handler.

    Args:
        content: media type of the response.
        body: schema of a body that the handler reads without `takes`.
        query: descriptions of the query parameters by name.
    """

    def around(handler: Method) -> Method:
        told = {"content": content, "body": body, "query": query}
        handler.__dict__.update(told)
        return handler

    return around


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document; summaries are the first lines of handler docstrings."""
    listed = list(routes)
    bodies = {model for route in listed if (model := getattr(route.endpoint, "body", None))}
    models = [(model, "validation") for model in sorted(bodies, key=lambda m: str(m.__name__))]
    names, schemas = models_json_schema(models, ref_template=_SCHEMAS)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for route in listed:
        path, body = re.sub(r":\w+}", "}", route.path), getattr(route.endpoint, "body", None)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _operation(path, method, route)
            if body is not None:
                content = {"application/json": {"schema": names[body, "validation"]}}
                operation["requestBody"] = {"required": True, "content": content}
            paths.setdefault(path, {})[method.lower()] = operation
    keys = {
        "key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "g4spec", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR}, "securitySchemes": keys},
    }


def _operation(path: str, method: str, route: Route) -> dict[str, Any]:
    """Return the operation object of a route. Response schemas are left open."""
    handler = route.endpoint
    body, query = getattr(handler, "body", None), getattr(handler, "query", {})
    summary = (handler.__doc__ or "").strip().splitlines()[0]
    kind = getattr(handler, "content", "application/json")
    content = {kind: {"schema": {} if kind == "application/json" else {"type": "string"}}}
    if body and "stream" in body.model_fields:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": what,
            "schema": {"type": "string"},
        }
        for name, what in query.items()
    ]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_')}",
        "summary": summary,
        "responses": {
            "200": {"description": "Successful response.", "content": content},
            "default": {
                "description": "Error: one sentence that says what is wrong and what to do.",
                "content": {
                    "application/json": {"schema": {"$ref": _SCHEMAS.format(model="Error")}}
                },
            },
        },
        "security": [] if path in PATHS_WITHOUT_KEY else [{}, {"key": []}, {"x-api-key": []}],
    }
    if parameters:
        operation["parameters"] = parameters
    return operation
