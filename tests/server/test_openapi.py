"""The OpenAPI document is valid and complete, and describes how requests are really validated."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from g4spec.server.endpoints import Endpoints, routes
from g4spec.server.model_router import ROUTER_ROUTES
from g4spec.server.openapi import document
from tests.fuzz import requests
from tests.server.mixed_requests import draw
from tests.server.running_server import Served

SERVING = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def api_document(busy: Served) -> Any:
    return busy.http.get("/openapi.json").json()


def operations(api_document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in api_document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def body(api_document: Any, path: str) -> jsonschema.Draft202012Validator:
    """Return the validator of a path's request bodies."""
    schema = api_document["paths"][path]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    return jsonschema.Draft202012Validator({**schema, "components": api_document["components"]})


def test_every_route_is_listed(api_document: Any) -> None:
    expected = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in routes(Endpoints)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert {(path, method) for path, method, _ in operations(api_document)} == expected
    assert ("/openapi.json", "get") in expected and ("/v1/responses/{id}", "delete") in expected
    several = document([*routes(Endpoints), *ROUTER_ROUTES])
    own = {"/models/events", "/models/load", "/models/unload"}
    assert set(several["paths"]) - set(api_document["paths"]) == own


def test_every_path_and_field_is_on_the_page_about_serving(api_document: Any) -> None:
    page = SERVING.read_text(encoding="utf-8")
    known = set(re.findall(r"[\w./{}-]+", page)) | set(re.findall(r"\w+", page))
    schemas = api_document["components"]["schemas"]
    for path, _, operation in operations(api_document):
        assert {path, f"/v1{path}"} & known, f"add {path} to docs/serving.md"
        names = {parameter["name"] for parameter in operation.get("parameters", ())}
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            reference = schema.get("$ref", "").rsplit("/", 1)[-1]
            names |= set(schemas.get(reference, schema)["properties"])
        assert names <= known, f"{path}: add {names - known} to docs/serving.md"


def test_every_field_of_generation_is_fuzzed(api_document: Any) -> None:
    fuzzed = {*requests.FIELDS, *(name for tree in requests.BODIES.values() for name in tree)}
    schemas = api_document["components"]["schemas"]
    for name, schema in schemas.items():
        if "draft_max" in schema.get("properties", ()):
            missing = schema["properties"].keys() - fuzzed
            assert not missing, f"{name}: add {missing} to FIELDS of tests/fuzz/requests.py"


def test_the_document_is_valid(api_document: Any) -> None:
    assert api_document["openapi"] == "3.1.0" and {"title", "version"} <= set(api_document["info"])
    for schema in api_document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = set()
    for path, method, operation in operations(api_document):
        names.add(operation["operationId"])
        assert operation["summary"] and operation["responses"]["200"]["description"]
        declared = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", path))
        cancels = path.endswith("/cancel")
        assert ("requestBody" in operation) == (method == "post" and not cancels), path
    assert len(names) == sum(1 for _ in operations(api_document))
    for reference in re.findall(r"'\$ref': '#/components/schemas/(\w+)'", str(api_document)):
        assert reference in api_document["components"]["schemas"]


def test_accepted_requests_are_valid(api_document: Any) -> None:
    rng = random.Random(5)
    for _ in range(150):
        asked = draw(rng).drafted(rng.choice(["auto", 3]), stream=True)
        body(api_document, asked.path).validate(asked.body)
        assert not body(api_document, asked.path).is_valid({**asked.body, "no_such_field": 1})
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "y"}]},
    ]
    body(api_document, "/v1/messages").validate(
        {"model": "m", "max_tokens": 1, "messages": messages}
    )
    for input_ in ("x", messages):
        body(api_document, "/v1/responses").validate({"input": input_})
    assert not body(api_document, "/v1/messages").is_valid({"messages": messages})


def test_the_document_needs_no_key(busy: Served, api_document: Any) -> None:
    closed = [p for p, _, operation in operations(api_document) if operation["security"]]
    assert "/v1/chat/completions" in closed and "/v1/models" in closed
    assert not {"/", "/health", "/openapi.json"} & set(closed)
