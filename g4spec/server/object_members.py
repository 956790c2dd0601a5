"""The members that a JSON schema allows in an object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
    listed = "properties" in schema or "patternProperties" in schema
    keys = {str(k): v for k, v in keys.items()}
    for name in map(str, required):
        if name not in keys:
            matched = any(_matches(resolver, pattern, name) for pattern in by_pattern)
            keys[name] = matched or schema.get("additionalProperties", True)
    for pattern, value in by_pattern.items():
        for key in keys:
            if _matches(resolver, pattern, key):
                keys[key] = {"allOf": [keys[key], value]}
    few = resolver.counts(schema, "Properties")[0] > len(keys)
    more = schema.get("additionalProperties", few or not listed)
    others: list[tuple[str | None, Any]] = list(by_pattern.items())
    if others and more is not False:
        resolver.unsupported("patternProperties together with additionalProperties", schema)
        others = []
    others += [] if more is False else [(None, more)]
    return keys, set(map(str, required)), others


def _matches(resolver: Resolver, pattern: Any, key: str) -> bool:
    """Return whether a listed key matches a pattern of `patternProperties`."""
    try:
        return re.search(str(pattern), key) is not None
    except re.error:
        resolver.unsupported("patternProperties", {"patternProperties": pattern})
        return False
