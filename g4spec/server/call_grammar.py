"""Convert JSON schemas of functions to a grammar of Gemma 4's tool call syntax.

    call:NAME{city:<|"|>Paris<|"|>,days:3}

The grammar is in llguidance's Lark dialect. It accepts only calls whose arguments are valid against
the schema. It may accept fewer: unlisted keys are allowed only if the schema gives a type for them.
Keys may come in any order, each once. `format` is enforced for `patterns.FORMATS` and otherwise an
annotation, as JSON Schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from g4spec.errors import InputError
from g4spec.server import patterns
from g4spec.server.exact_numbers import bound_is_enforced
from g4spec.server.object_members import members
from g4spec.server.schemas import Resolver, Schema, types_of

FREE = r"""
TEXT: /(?s:.*)/
INT: /-?(0|[1-9][0-9]{0,39})/
NUM: /-?(0|[1-9][0-9]{0,39})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?/
KEY: /[^\s:,"{}()\[\]]+/
any: text | NUM | "true" | "false" | "null" | any_object | any_array
any_object: "{" (any_pair ("," any_pair)*)? "}"
any_pair: KEY ":" any
any_array: "[" (any ("," any)*)? "]"
"""
"""Rules of values without a schema."""

MAX_RULES = 20_000
"""Maximum number of rules per request; expanding self-referencing schemas could be endless."""

MAX_DEPTH = 100
"""Maximum nesting of values: a schema that contains itself without a rule of its own is endless."""

MAX_UNORDERED_KEYS = 64
"""Maximum number of keys in any order; llguidance rule parameters have this many bits."""

_PLAIN_KEY = re.compile(r"[^\s:,\"{}()\[\]]+")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Function:
    """The declaration of a function.

    Attributes:
        parameters: JSON schema of the arguments; None: no arguments.
        strict: reject schema keywords that cannot be enforced; otherwise ignore them.
    """

    name: str
    description: str = ""
    parameters: Schema | None = None
    strict: bool = False


class UnsatisfiableSchema(InputError):
    """A schema without valid values; optional keys with such a schema are omitted."""


def call_rules(functions: Sequence[Function], call_end: int, delimiter: int) -> str:
    """Return Lark rules; the rule `call` matches from after `<|tool_call>` to `<tool_call|>`.

    Args:
        call_end, delimiter: token ids of `<tool_call|>` and `<|"|>`.

    Raises:
        InputError: a schema is invalid, or strict and not enforceable.
    """
    rules = _Rules(delimiter)
    names = []
    for function in functions:
        if not _NAME.fullmatch(function.name):
            raise InputError(
                "invalid function name",
                found=repr(function.name),
                expected="1 to 128 letters, digits or characters of _.-",
            )
        arguments = rules.arguments(function)
        names.append(rules.add(f"{_quoted('call:' + function.name)} {arguments}"))
    call = f"call: ({' | '.join(names)}) <[{call_end}]>"
    return "\n".join([call, f"text: {rules.delimited('TEXT')}", FREE, *rules.lines])


class _Rules:
    """A builder that collects the rules of a grammar."""

    def __init__(self, delimiter: int) -> None:
        self.lines: list[str] = []
        self._delimiter = f"<[{delimiter}]>"
        self._count = 0
        self._resolver = Resolver({}, strict=False, where="")
        self._depth = 0
        self._reference_rules: dict[str, str] = {}  # rules by $ref pointer

    def arguments(self, function: Function) -> str:
        """Add the rule of a function's arguments; return its name."""
        if function.parameters is None:
            return self.add('"{" "}"')
        schema = function.parameters
        self._resolver = Resolver(schema, strict=function.strict, where=function.name)
        self._reference_rules = {}
        if "object" not in types_of(self._resolver.plain(schema)):
            raise InputError(
                f"function {function.name}: parameters",
                expected='"type": "object"',
                found=repr(schema.get("type")),
            )
        return self._value({**schema, "type": "object"})

    def add(self, body: str, kind: str = "v") -> str:
        """Add a rule or terminal for `body`; return its name."""
        name = self._new(kind)
        self.lines.append(f"{name}: {body}")
        return name

    def delimited(self, body: str) -> str:
        """Enclose a string body in delimiter tokens."""
        return f"{self._delimiter} {body} {self._delimiter}"

    def _new(self, kind: str) -> str:
        self._count += 1
        if self._count > MAX_RULES:
            raise self._resolver.error("too large", expected=f"at most {MAX_RULES} grammar rules")
        return f"{kind}{self._count}"

    # ---- values

    def _value(self, schema: Schema | bool) -> str:
        """Add the rule of a value; return its name."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._resolver.error(f"more than {MAX_DEPTH} levels deep, or endless")
        try:
            return self._rule(schema)
        finally:
            self._depth -= 1

    def _rule(self, schema: Schema | bool) -> str:
        if (pointer := self._resolver.pointer(schema)) is not None:
            return self._reference(pointer)
        if (branches := self._resolver.branches(schema)) is not None:
            rules = []
            for branch in branches:
                with suppress(UnsatisfiableSchema):
                    rules.append(self._value(branch))
            return self._alternatives(rules)
        options = self._resolver.options(schema)
        return self._alternatives([rule for option in options for rule in self._option(option)])

    def _reference(self, pointer: str) -> str:
        """Return the rule of a $ref target; references may be recursive."""
        if pointer not in self._reference_rules:
            name = self._reference_rules[pointer] = self._new("v")
            self.lines.append(f"{name}: {self._value(self._resolver.target(pointer))}")
        return self._reference_rules[pointer]

    def _alternatives(self, rules: Sequence[str]) -> str:
        unique = list(dict.fromkeys(rules))
        if not unique:
            raise UnsatisfiableSchema(f"schema of {self._resolver.where}: no value is valid")
        return unique[0] if len(unique) == 1 else self.add(" | ".join(unique))

    def _option(self, schema: Schema) -> list[str]:
        """Add the rules of a plain schema, one per type or enum value."""
        types = types_of(schema)
        if "enum" in schema:
            values = [
                v
                for v in schema["enum"]
                if patterns.has_type(v, types) and patterns.within_bounds(v, schema)
            ]
            for kind in {type(v) for v in values} & set(patterns.NESTED_KEYWORDS):
                self._resolver.refuse(schema, *patterns.NESTED_KEYWORDS[kind])
            return [self._literal(value) for value in values]
        if len(types) > 6:  # all types, without constraints
            return ["any"]
        make: dict[str, Callable[[Schema], str]] = {
            "string": self._text,
            "object": self._object,
            "array": self._array,
            "integer": self._number,
            "number": self._number,
            "boolean": lambda schema: '"true" | "false"',
            "null": lambda schema: '"null"',
        }
        return [self.add(make[t]({**schema, "type": t})) for t in types]

    def _literal(self, value: Any) -> str:
        """Add the rule of one constant value."""
        if isinstance(value, str):
            return self.add(self.delimited(_quoted(value)))
        if isinstance(value, list):
            return self.add(f'"[" {self._join([self._literal(v) for v in value])} "]"')
        if isinstance(value, dict):
            pairs = [f"{self._key(k)} {self._literal(v)}" for k, v in value.items()]
            return self.add(f'"{{" {self._join(pairs)} "}}"')
        return self.add(_quoted(json.dumps(value)))

    def _join(self, rules: Sequence[str]) -> str:
        return ' "," '.join(rules)

    def _number(self, schema: Schema) -> str:
        bounds = patterns.bounds(schema)
        for keyword, value in [*bounds.items()]:
            if not bound_is_enforced(keyword, value, schema["type"]):
                self._resolver.unsupported(keyword, schema)
                del bounds[keyword]
        if not bounds:
            return "INT" if schema["type"] == "integer" else "NUM"
        return f"%json {json.dumps({'type': schema['type'], **bounds})}"

    def _text(self, schema: Schema) -> str:
        terminal, unenforced = patterns.terminal(schema)
        for keyword in unenforced:
            self._resolver.unsupported(keyword, schema)
        if terminal is None:
            return "text"
        return self.delimited(self.add(terminal, "S"))

    def _array(self, schema: Schema) -> str:
        self._resolver.refuse(
            schema, "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"
        )
        first, rest = self._resolver.items(schema)
        least, most = self._resolver.counts(schema, "Items")
        if rest is False:
            most = len(first) if most is None else min(most, len(first))
        fixed = [self._value(item) for item in first[:most]]
        more = "" if most is not None and most <= len(first) else self._value(rest)
        body = ""
        if more:
            low, high = max(least - len(fixed), 0), "" if most is None else most - len(fixed)
            body = f'("," {more}){{{low},{high}}}'
            if not fixed:
                tail = f'("," {more}){{{max(low - 1, 0)},{"" if most is None else most - 1}}}'
                body = f"{more} {tail}" if least else f"({more} {tail})?"
        for i in reversed(range(len(fixed))):
            body = f"{_COMMA if i else ''} {fixed[i]} {body}"
            if i >= least:
                body = f"({body})?"
        if least > len(fixed) and not more:
            raise self._resolver.error(
                "minItems exceeds the number of items that the schema allows"
            )
        return f'"[" {body} "]"'

    # ---- objects

    def _object(self, schema: Schema) -> str:
        self._resolver.refuse(
            schema,
            "propertyNames",
            "dependentRequired",
            "dependentSchemas",
            "dependencies",
            "unevaluatedProperties",
        )
        keys, required, others = members(self._resolver, schema)
        keys = {k: v for k, v in keys.items() if v is not False or k in required}
        extra = self._extra(others, list(keys))
        least, most = self._resolver.counts(schema, "Properties")
        counted = least > len(required) or most is not None
        if extra and not keys:
            tail = f'("," {extra}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
            body = f"{extra} {tail}" if least else f"({extra} {tail})?"
            return '"{" "}"' if most == 0 else f'"{{" {body} "}}"'
        if counted and (extra or len(keys) > MAX_UNORDERED_KEYS):
            self._resolver.unsupported("minProperties/maxProperties", schema)
            least, most = 0, None
        pairs = []
        for key in sorted(keys, key=lambda k: k not in required):
            try:
                pairs.append(self.add(f"{self._key(key)} {self._value(keys[key])}"))
            except UnsatisfiableSchema:
                if key in required:
                    raise
        if (least > len(pairs) and not extra) or (most is not None and most < len(required)):
            raise UnsatisfiableSchema(
                f"schema of {self._resolver.where}: no object has as many keys as it wants"
            )
        if len(pairs) > MAX_UNORDERED_KEYS:
            return self._ordered(pairs, len(required), extra)
        return self._any_order(pairs, len(required), extra, least, most)

    def _any_order(
        self, pairs: Sequence[str], required: int, extra: str, least: int, most: int | None
    ) -> str:
        """Return the body of an object with members in any order; the first `required` ones must
        be present."""
        if not pairs and not extra:
            return '"{" "}"'
        first, more = self._new("m"), self._new("m")
        conditions = [f"is_ones([0:{required}])"] if required else []
        conditions += [f"bit_count_ge(_, {least})"] if least > required else []
        done = " %if " + _all(conditions) if conditions else ""
        room = [f"bit_count_lt(_, {most})"] if most is not None else []
        heads, tails = [f'""{done}'], [f'""{done}']
        for i, pair in enumerate(pairs):
            condition = _all([f"bit_clear({i})", *room])
            heads.append(f"{pair} {more}::set_bit({i}) %if {condition}")
            tails.append(f'"," {pair} {more}::set_bit({i}) %if {condition}')
        if extra:
            heads.append(f"{extra} {more}::_")
            tails.append(f'"," {extra} {more}::_')
        self.lines.append(f"{first}::_: " + "\n  | ".join(heads))
        self.lines.append(f"{more}::_: " + "\n  | ".join(tails))
        return f'"{{" {first}::0x0 "}}"'

    def _ordered(self, pairs: Sequence[str], required: int, extra: str) -> str:
        """Return the body of an object with members in the given order, required ones first."""
        more = f'("," {extra})*' if extra else ""
        for pair in reversed(pairs[max(required, 1) :]):
            more = self.add(f'("," {pair})? {more}')
        body = self._join(pairs[:required])
        if not required:  # begin with any member and continue after it
            return f'"{{" ({self._optional_members(pairs, extra)})? "}}"'
        return f'"{{" {body} {more} "}}"'

    def _optional_members(self, pairs: Sequence[str], extra: str) -> str:
        more = self.add(f'("," {extra})*' if extra else '""')
        begun = [f"{extra} {more}"] if extra else []
        for pair in reversed(pairs):
            begun.append(f"{pair} {more}")
            more = self.add(f'("," {pair})? {more}')
        return " | ".join(begun)

    def _extra(self, others: Sequence[tuple[str | None, Any]], names: Sequence[str]) -> str:
        """Add the rule of unlisted members; return "" if none are allowed.

        Args:
            others: key patterns (None: any key) with the schemas of their values.
            names: listed keys, which are excluded.
        """
        rules = []
        for pattern, schema in others:
            terminal = "KEY"
            parts = [] if pattern is None else [patterns.search_terminal(pattern)]
            if None in parts:
                self._resolver.unsupported("patternProperties", {"patternProperties": pattern})
                continue
            parts += [f"~({' | '.join(map(_quoted, names))})"] if names else []
            if parts:
                terminal = self.add(" & ".join(["KEY", *map(str, parts)]), "K")
            rules.append(self.add(f'{terminal} ":" {self._value(schema)}'))
        return self._alternatives(rules) if rules else ""

    def _key(self, name: str) -> str:
        if _PLAIN_KEY.fullmatch(name):
            return _quoted(name + ":")
        return f'{self.delimited(_quoted(name))} ":"'


_COMMA = '","'


def _all(conditions: Sequence[str]) -> str:
    text = conditions[-1]
    for condition in reversed(conditions[:-1]):
        text = f"and({condition}, {text})"
    return text


def _quoted(text: str) -> str:
    """Return a Lark string literal, or "" for an empty text."""
    return json.dumps(text) if text else ""
