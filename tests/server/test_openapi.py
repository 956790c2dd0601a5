"""The OpenAPI document: valid, complete, and what requests are really checked by."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from g4spec.server import app as one
from g4spec.server.model_router import ROUTER_ROUTES
from g4spec.server.openapi import document
from tests.server.mixed_requests import draw
from tests.server.running_server import Served


@pytest.fixture(scope="module")
def told(busy: Served) -> Any:
    return busy.http.get("/openapi.json").json()


def operations(told: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def body(told: Any, path: str) -> jsonschema.Draft202012Validator:
    """What validates the bodies of a path."""
    schema = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": told["components"]})


def test_every_route_is_listed(told: Any) -> None:
    routes = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in one.routes(one.Endpoints)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert {(path, method) for path, method, _ in operations(told)} == routes
    assert ("/openapi.json", "get") in routes and ("/v1/responses/{id}", "delete") in routes
    several = document([*one.routes(one.Endpoints), *ROUTER_ROUTES])
    own = {"/models/events", "/models/load", "/models/unload"}
    assert set(several["paths"]) - set(told["paths"]) == own


def test_the_document_is_valid(told: Any) -> None:
    assert told["openapi"] == "3.1.0" and {"title", "version"} <= set(told["info"])
    for schema in told["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = set()
    for path, method, operation in operations(told):
        names.add(operation["operationId"])
        assert operation["summary"] and operation["responses"]["200"]["description"]
        declared = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", path))
        cancels = path.endswith("/cancel")
        assert ("requestBody" in operation) == (method == "post" and not cancels), path
    assert len(names) == sum(1 for _ in operations(told))
    for reference in re.findall(r"'\$ref': '#/components/schemas/(\w+)'", str(told)):
        assert reference in told["components"]["schemas"]


def test_requests_that_are_taken_are_valid(told: Any) -> None:
    rng = random.Random(5)
    for _ in range(150):
        asked = draw(rng).drafted(rng.choice(["auto", 3]), stream=True)
        body(told, asked.path).validate(asked.body)
        assert not body(told, asked.path).is_valid({**asked.body, "no_such_field": 1})
    said = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "y"}]},
    ]
    body(told, "/v1/messages").validate({"model": "m", "max_tokens": 1, "messages": said})
    for input_ in ("x", said):
        body(told, "/v1/responses").validate({"input": input_})
    assert not body(told, "/v1/messages").is_valid({"messages": said})


def test_it_needs_no_key(busy: Served, told: Any) -> None:
    closed = [p for p, _, operation in operations(told) if operation["security"]]
    assert "/v1/chat/completions" in closed and "/v1/models" in closed
    assert not {"/", "/health", "/openapi.json"} & set(closed)
