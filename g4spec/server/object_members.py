"""The members that a JSON schema allows in an object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from g4spec.server.schemas import Resolver, Schema


def members(
    resolver: Resolver, schema: Schema
) -> tuple[dict[str, Any], set[str], list[tuple[str | None, Any]]]:
    """Return the listed keys with their schemas, the required keys, and the (pattern, schema) pairs
    of other keys (pattern None: any key).

    Unlisted keys are left out by default, unless `minProperties` needs some.
    """
    keys, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(keys, Mapping) or not isinstance(required, list):
        raise resolver.error(
            "properties, required",
            expected="an object and a list",
            found=f"{keys!r:.40} and {required!r:.40}",
        )
    by_pattern = schema.get("patternProperties", {})
    matches = {pattern: _search(resolver, pattern) for pattern in by_pattern}
    listed = "properties" in schema or "patternProperties" in schema
    keys = {str(k): v for k, v in keys.items()}
    for name in map(str, required):
        if name not in keys:
            matched = any(matches[pattern](name) for pattern in by_pattern)
            keys[name] = matched or schema.get("additionalProperties", True)
    for pattern, value in by_pattern.items():
        for key in keys:
            if matches[pattern](key):
                keys[key] = {"allOf": [keys[key], value]}
    few = resolver.counts(schema, "Properties")[0] > len(keys)
    more = schema.get("additionalProperties", few or not listed)
    others: list[tuple[str | None, Any]] = list(by_pattern.items())
    if others and more is not False:
        resolver.unsupported("patternProperties together with additionalProperties", schema)
        others = []
    others += [] if more is False else [(None, more)]
    return keys, set(map(str, required)), others


def _search(resolver: Resolver, pattern: str) -> Callable[[str], bool]:
    """Return the function that tells whether a key matches a pattern of `patternProperties`.

    It takes linear time. Python's `re` may take exponential time, in which the server would do
    nothing else.
    """
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern)).isinstance_python
    except SchemaError:  # look-around and backreferences, which no grammar has, either
        resolver.unsupported("patternProperties", {"patternProperties": pattern})
        return lambda key: False
