"""Resolve references, alternatives and conjunctions of JSON schemas.

The result are plain schemas, without `$ref`, `allOf`, `anyOf` and `oneOf`, from which grammars are
built. Keywords that no grammar can enforce are errors in a strict schema and ignored otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from g4spec.errors import InputError, Unsupported

Schema = Mapping[str, Any]

TYPES = ("string", "object", "array", "number", "integer", "boolean", "null")

DEPTH = 64
"""Maximum nesting of a schema; protects against accidental and malicious recursion."""

STEPS = 50_000
"""Maximum number of schemas and pairs of schemas to look at: alternatives can multiply."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""Keywords that restrict the value of a number."""

_TYPE_KEYWORDS = {  # keywords that apply to one type
    "string": ("minLength", "maxLength", "pattern", "format"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
    ),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "number": BOUNDS,
}
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_VALUE_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys((*_LOWER_BOUNDS, *_UPPER_BOUNDS), ((int, float), "a number")),
    **dict.fromkeys(("properties", "patternProperties"), (Mapping, "an object")),
    "multipleOf": ((int, float), "a number"),
    "enum": (list, "a list"),
    "prefixItems": (list, "a list of schemas"),
    "format": (str, "a string"),
}
"""Types of the values of keywords, with their names for errors; null is as if left out."""
_ANNOTATIONS = (
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "nullable",
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
    "$anchor",
    "strict",
)


_PARTS = (
    *("items", "prefixItems", "additionalItems", "contains", "additionalProperties"),
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "propertyNames"),
)
"""Keywords whose value is a schema or a list of schemas."""
NAMED_PARTS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose value is an object of schemas."""


def unsupported(where: str, keyword: str, schema: Schema) -> Unsupported:
    """Return the error for a keyword of a strict schema that cannot be enforced."""
    return Unsupported(
        f"schema of {where}: {keyword} cannot be enforced",
        found=json.dumps(schema, default=str)[:120],
        fix="remove the keyword, or `strict: true`",
    )


def without_draft_4(schema: Any, *, strict: bool, where: str) -> Any:
    """Return a schema, or a list of schemas, in which no exclusive bound is a boolean.

    Raises:
        Unsupported: the schema is strict, and such a boolean has no `minimum` or `maximum`.
    """

    def convert(part: Any) -> Any:
        if isinstance(part, list):
            return [convert(each) for each in part]
        if not isinstance(part, Mapping):
            return part
        out = dict(part)
        for keyword, value in part.items():
            if keyword in _PARTS:
                out[keyword] = convert(value)
            elif keyword in NAMED_PARTS and isinstance(value, Mapping):
                out[keyword] = {name: convert(each) for name, each in value.items()}
        convert_bounds(out, strict=strict, where=where)
        return out

    return convert(schema)


def convert_bounds(schema: dict[str, Any], *, strict: bool, where: str) -> None:
    """Replace exclusive bounds of draft 4, which are booleans, by those of draft 6.

    Raises:
        Unsupported: the schema is strict, and the boolean has no `minimum` or `maximum`.
    """
    for exclusive, limit in _EXCLUSIVE.items():
        if not isinstance(schema.get(exclusive), bool):
            continue
        if schema[exclusive] and schema.get(limit) is not None:
            schema[exclusive] = schema.pop(limit)
        elif schema[exclusive] and strict:
            raise unsupported(where, f"{exclusive} without {limit}", schema)
        else:
            del schema[exclusive]


def types_of(schema: Schema) -> list[str]:
    """Return the types that a plain schema allows; without `type`, those its keywords apply to."""
    named = schema.get("type")
    if named is not None:
        found = [named] if isinstance(named, str) else list(named)
        return [t for t in TYPES if t in found and not (t == "integer" and "number" in found)]
    types = [t for t, keywords in _TYPE_KEYWORDS.items() if any(k in schema for k in keywords)]
    return types or list(TYPES)


class Resolver:
    """A resolver for the parts of one schema.

    Args:
        root: the complete schema, the target of `$ref`.
        strict: raise Unsupported for keywords that cannot be enforced.
        where: name of the schema in errors.
    """

    def __init__(self, root: Schema, *, strict: bool, where: str) -> None:
        self._root, self._strict, self.where = root, strict, where
        self._steps = 0

    # ---- errors

    def error(self, what: str, **more: Any) -> InputError:
        """Return an error about this schema."""
        return InputError(f"schema of {self.where}: {what}", **more)

    def unsupported(self, keyword: str, schema: Schema) -> None:
        """Raise Unsupported in a strict schema; otherwise do nothing."""
        if self._strict:
            raise unsupported(self.where, keyword, schema)

    def refuse(self, schema: Schema, *keywords: str) -> None:
        """Call `unsupported` for each of the keywords that the schema has."""
        for keyword in keywords:
            if schema.get(keyword) not in (None, False):
                self.unsupported(keyword, schema)

    # ---- alternatives

    def pointer(self, schema: Any) -> str | None:
        """Return the pointer of a schema that consists only of a `$ref`; None for others."""
        return self._pointer(schema) if _keywords(schema) == ["$ref"] else None

    def branches(self, schema: Any) -> list[Any] | None:
        """Return the alternatives of a schema that consists only of anyOf or oneOf; else None."""
        keywords = _keywords(schema)
        if keywords not in (["anyOf"], ["oneOf"], ["allOf"]):
            return None
        branches = self._list(schema, keywords[0])
        if keywords == ["allOf"] and len(branches) != 1:
            return None
        if keywords == ["oneOf"] and not _disjoint([self.options(b) for b in branches]):
            self.unsupported("oneOf with overlapping schemas", schema)
        return branches

    def _pointer(self, schema: Schema) -> str:
        pointer = schema["$ref"]
        if not isinstance(pointer, str) or (pointer != "#" and not pointer.startswith("#/")):
            raise self.error(
                "$ref", expected="a reference into the same schema, #/...", found=repr(pointer)
            )
        return pointer

    def target(self, pointer: str) -> Schema | bool:
        """Return the schema that a `$ref` points to."""
        at: Any = self._root
        for part in pointer[1:].split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
                at = at[int(name)]
            elif isinstance(at, Mapping) and name in at:
                at = at[name]
            else:
                raise self.error("$ref points to nothing", found=pointer)
        return self._checked(at)

    def options(self, schema: Schema | bool, depth: int = 0) -> list[Schema]:
        """Expand a schema into plain alternatives, at least one of which a value must match."""
        schema = self._checked(schema)
        self._count(1)
        if isinstance(schema, bool):
            return [{}] if schema else []
        if depth > DEPTH:
            raise self.error(f"more than {DEPTH} levels deep, or a reference to itself")
        self.refuse(schema, "not", "if", "then", "else")
        own = {k: v for k, v in schema.items() if k not in ("$ref", "allOf", "anyOf", "oneOf")}
        own = {k: v for k, v in own.items() if k not in _ANNOTATIONS}
        options: list[Schema] = [self._typed(own)]
        parts = [self.target(self._pointer(schema))] if "$ref" in schema else []
        for part in (*parts, *self._list(schema, "allOf")):
            options = self._intersect(options, self.options(part, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                branches = [self.options(b, depth + 1) for b in self._list(schema, keyword)]
                if keyword == "oneOf" and not _disjoint(branches):
                    self.unsupported("oneOf with overlapping schemas", schema)
                options = self._intersect(options, [o for branch in branches for o in branch])
        return options

    def plain(self, schema: Schema) -> Schema:
        """Return the plain schema of `schema`, or an empty one if it has alternatives."""
        options = self.options(schema)
        return options[0] if len(options) == 1 else {}

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > STEPS:
            raise self.error("too many alternatives", expected=f"at most {STEPS} in all")

    def _typed(self, schema: dict[str, Any]) -> Schema:
        for keyword in schema.keys() & _VALUE_TYPES:
            types, expected = _VALUE_TYPES[keyword]
            if schema[keyword] is None:
                del schema[keyword]
            elif not isinstance(schema[keyword], types):
                raise self.error(keyword, expected=expected, found=f"{schema[keyword]!r:.80}")
        convert_bounds(schema, strict=self._strict, where=self.where)
        named = schema.get("type")
        names = named if isinstance(named, list) else [] if named is None else [named]
        wrong = [t for t in names if t not in TYPES]
        if wrong:
            if self._strict:
                raise self.error("type", expected=" or ".join(TYPES), found=repr(wrong[0]))
            del schema["type"]
        if "const" in schema:
            value = schema.pop("const")
            schema["enum"] = [v for v in schema.get("enum", [value]) if v == value]
        return schema

    def _list(self, schema: Schema, keyword: str) -> list[Any]:
        value = schema.get(keyword, [])
        if not isinstance(value, list) or (keyword in schema and not value):
            raise self.error(keyword, expected="a list of schemas", found=f"{value!r:.80}")
        return value

    def _checked(self, schema: Any) -> Schema | bool:
        if not isinstance(schema, (Mapping, bool)):
            raise self.error(
                "not a schema", expected="an object or a boolean", found=f"{schema!r:.80}"
            )
        return schema

    # ---- conjunctions

    def _intersect(self, left: list[Schema], right: list[Schema]) -> list[Schema]:
        """Intersect alternatives: values must match one of `left` and one of `right`."""
        self._count(len(left) * len(right))
        return [both for a in left for b in right if (both := self._merge(a, b)) is not None]

    def _merge(self, a: Schema, b: Schema) -> Schema | None:
        """Intersect two schemas; return None if no value matches both."""
        if not a or not b:
            return a or b
        out: dict[str, Any] = {**b, **a}
        for keyword in set(a) & set(b):
            x, y = a[keyword], b[keyword]
            if x != y:
                out[keyword] = self._combine(keyword, x, y, out)
        for one, other in ((a, b), (b, a)):
            self._apply_additional(one, other, out)
        if "type" in a and "type" in b:
            both = [t for t in TYPES if _allows(types_of(a), t) and _allows(types_of(b), t)]
            if not both:
                return None
            out["type"] = both
        return out if out.get("enum", True) != [] else None

    def _combine(self, keyword: str, x: Any, y: Any, schema: Schema) -> Any:
        if keyword in (*_LOWER_BOUNDS, *_UPPER_BOUNDS):
            return max(x, y) if keyword in _LOWER_BOUNDS else min(x, y)
        if keyword == "required":
            x, y = (names if isinstance(names, list) else [] for names in (x, y))
            return [*x, *(name for name in y if name not in x)]
        if keyword == "enum":
            return [value for value in x if value in y]
        if keyword in ("properties", "patternProperties"):
            return {**y, **x, **{k: {"allOf": [x[k], y[k]]} for k in x if k in y and x[k] != y[k]}}
        if keyword in ("items", "additionalProperties"):
            return False if x is False or y is False else {"allOf": [x, y]}
        if keyword != "type":
            self.unsupported(f"allOf with two different {keyword}", schema)
        return x

    def _apply_additional(self, one: Schema, other: Schema, out: dict[str, Any]) -> None:
        """Apply `additionalProperties` of one of two schemas to keys that only the other lists."""
        more, listed = one.get("additionalProperties", True), out.get("properties")
        if more is True or not isinstance(listed, Mapping):
            return
        if "patternProperties" in one:
            self.unsupported("allOf with patternProperties and additionalProperties", out)
        own, keys = one.get("properties", {}), other.get("properties", {})
        changed = {k: more and {"allOf": [listed[k], more]} for k in keys if k not in own}
        out["properties"] = {**listed, **changed}

    # ---- parts

    def items(self, schema: Schema) -> tuple[list[Any], Any]:
        """Return the schemas of an array's first items, and the schema of all further items."""
        items = schema.get("items", True)
        if isinstance(items, list):  # until draft 7
            return items, schema.get("additionalItems", True)
        first = schema.get("prefixItems", [])
        more = not first or "items" in schema or schema.get("minItems", 0) > len(first)
        return first, items if more else False

    def counts(self, schema: Schema, what: str) -> tuple[int, int | None]:
        """Return the values of `min<what>` and `max<what>`, checked."""
        least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
        for value in (least, most):
            if value is not None and (not isinstance(value, int) or value < 0):
                raise self.error(
                    f"min{what}, max{what}", expected="integers of 0 or more", found=repr(value)
                )
        if most is not None and most < least:
            raise self.error(f"min{what} is larger than max{what}")
        return least, most


def _keywords(schema: Any) -> list[str]:
    """Return the keywords of a schema, without annotations."""
    return [k for k in schema if k not in _ANNOTATIONS] if isinstance(schema, Mapping) else []


def _allows(types: list[str], t: str) -> bool:
    return t in types or (t == "integer" and "number" in types)


def _disjoint(branches: list[list[Schema]]) -> bool:
    """Return True if types and enum values show that no value matches two branches."""
    seen: set[tuple[str, ...]] = set()
    types: set[str] = set()  # of all branches before
    for branch in branches:
        own = {tag for option in branch for tag in _tags(option)}
        for kind, *value in own:
            if (kind, *value) in seen or (kind,) in seen or (not value and kind in types):
                return False
        seen |= own
        types |= {kind for kind, *_ in own}
    return True


def _tags(schema: Schema) -> list[tuple[str, ...]]:
    """Return (type,) for each type, or (type, value) for each enum value."""
    types = ["number" if t == "integer" else t for t in types_of(schema)]
    values = [json.dumps(v, sort_keys=True) for v in schema.get("enum", ())]
    return [(t, v) for t in types for v in values] if "enum" in schema else [(t,) for t in types]
