"""Numbers of schemas: answers have exactly those, or the schema is refused."""

from __future__ import annotations

import json
import operator
from decimal import Decimal
from typing import Any

import llguidance
import pytest

from g4spec.errors import Unsupported
from g4spec.server import grammar
from g4spec.server.call_grammar import Function
from tests.server.test_grammar import MARKS

INT64 = 2**63
BYTES = llguidance.LLTokenizer("byte")


def accepts(schema: Any, value: str) -> bool:
    """Return True if the real library accepts the text of a value."""
    text = grammar.whole_text(None, answer=grammar.json_answer(schema, strict=True)).text
    assert not llguidance.LLMatcher.validate_grammar(text, BYTES)
    matcher = llguidance.LLMatcher(BYTES, text, log_level=0)
    ids = list(value.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


EXACT = [
    0,
    -1,
    7,
    2**31,
    2**53 - 1,
    2**53,
    -(2**53),
    2**53 + 2,
    2**60,
    -(2**60),
    10**18,
    INT64 - 1024,
]
EXACT_FLOATS = [0.5, -2.25, 0.1, 3.14, 0.30000000000000004, 3.141592653589793, 12345678.1234567]
CHANGED = [
    *(2**53 + 1, -(2**53) - 1, 1234567890123456789, 1234567890123456790, 2**60 + 1),
    *(INT64, INT64 + 1, 2 * INT64 - 1, 10**20 + 1, 10**40, 10**400),
    *(-INT64, 1 - INT64, 512 - INT64),  # these three ended the process
    *(123456789.12345679, 1e-30, -float(INT64)),
]


@pytest.mark.parametrize("value", [*EXACT, *EXACT_FLOATS])
def test_constants_that_stay_as_they_are(value: float) -> None:
    text, other = json.dumps(value), json.dumps(value + 2 if value != 2**53 else 5)
    assert accepts({"const": value}, text) and not accepts({"const": value}, other)
    nested = {"enum": [[value], {"a": {"b": value}}, "x"]}
    for wanted in (f"[{text}]", f'{{"a":{{"b":{text}}}}}', '"x"'):
        assert accepts(nested, wanted)
    assert not accepts(nested, f"[{other}]")


@pytest.mark.parametrize("value", [1e15, 1e22, 1e23, 1e30, 1.5e300, 5e-324, 1e-10])
def test_constants_that_are_written_without_an_exponent(value: float) -> None:
    assert accepts({"const": value}, f"{Decimal(repr(value)):f}".removesuffix(".0"))


def within(**keywords: Any) -> list[Any]:
    """Return schemas in which the same keywords are at different places."""
    return [
        keywords,
        {"type": "object", "properties": {"const": keywords}, "required": ["const"]},
        {"type": "array", "items": {"anyOf": [{"type": "null"}, keywords]}},
        {"type": "array", "prefixItems": [keywords]},
        {"type": "object", "additionalProperties": {"allOf": [keywords]}},
        {"$defs": {"default": keywords}, "$ref": "#/$defs/default"},
        {"components": {"X": {"a": [keywords]}}, "$ref": "#/components/X/a/0"},
    ]


@pytest.mark.parametrize("value", CHANGED)
def test_constants_that_would_change_are_refused(value: float) -> None:
    for keywords in ({"const": value}, {"enum": [1, value]}, {"const": {"a": [True, [value]]}}):
        for schema in within(**keywords):
            for strict in (False, True):
                with pytest.raises(Unsupported) as refused:
                    grammar.json_answer(schema, strict=strict)
    message = str(refused.value)
    assert message.startswith("schema of the answer: const has a number that cannot be enforced")
    assert json.dumps(value)[:100] in message and "Make it a string" in message


def test_annotations_may_have_any_number() -> None:
    big = [{"const": 2**53 + 1}]
    schema = {"type": "integer", "default": 2**53 + 1, "examples": big, "example": big[0]}
    assert accepts(schema, str(2**53 + 1)) and accepts(schema, str(10**20 + 1))
    schema = {"type": "object", "properties": {"enum": {"type": "integer", "minimum": 3}}}
    assert accepts(schema, '{"enum":3}') and not accepts(schema, '{"enum":2}')


COMPARE = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}


@pytest.mark.parametrize("keyword", COMPARE)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_that_are_exact(keyword: str, kind: str) -> None:
    for limit in (0, -7, 1000, 2**31, 2**53 - 1, 1 - 2**53):
        for value in range(limit - 2, limit + 3):
            wanted = COMPARE[keyword](value, limit)
            assert accepts({"type": kind, keyword: limit}, str(value)) is wanted, (limit, value)
    if kind == "number":
        for value in (0.4, 0.5, 0.6):
            assert accepts({"type": kind, keyword: 0.5}, str(value)) is COMPARE[keyword](value, 0.5)


@pytest.mark.parametrize("limit", [2**53, 2**60, INT64 - 1024, INT64 - 1, 2 * INT64 - 1])
def test_large_maxima_of_integers(limit: int) -> None:
    """Accept those of int64 and uint64, which are frequent; none above 2^63 - 1 is written."""
    schema = {"type": "integer", "minimum": 0, "maximum": limit}
    for value in (0, 2**53 + 1, limit - 1, limit, limit + 1, 10 * limit):
        if accepts(schema, str(value)) is not (value <= limit):
            assert INT64 <= value <= limit


@pytest.mark.parametrize(
    ("keyword", "limit", "kind"),
    [
        *((k, 2**53 + 1, t) for k in COMPARE for t in ("integer", "number", ["integer", "null"])),
        *((k, -(2**53) - 1, "integer") for k in COMPARE),
        *((k, 123456789.12345679, "number") for k in COMPARE),
        *((k, 2**60, "number") for k in COMPARE),  # accepted 2^60 + 1
        *((k, 2**53, "integer") for k in ("exclusiveMinimum", "exclusiveMaximum")),
        *((k, 2**60, "integer") for k in ("exclusiveMinimum", "exclusiveMaximum")),
        *((k, -INT64, "integer") for k in COMPARE),
        *(("minimum", INT64, "integer"), ("maximum", INT64 - 1, "number")),
        *(("multipleOf", 2**53 + 1, "integer"), ("multipleOf", 123456789.12345679, "number")),
    ],
)
def test_bounds_that_would_change_are_refused(keyword: str, limit: float, kind: Any) -> None:
    for schema in within(**{"type": kind, keyword: limit}):
        for strict in (False, True):
            with pytest.raises(Unsupported) as refused:
                grammar.json_answer(schema, strict=strict)
    message = str(refused.value)
    assert message.startswith(f"schema of the answer: {keyword} has a number that cannot be")
    assert json.dumps(limit) in message and "fewer digits" in message


@pytest.mark.parametrize("step", [2**18 + 1, 2**31, 1e9, 300000.5])
def test_steps_that_would_not_compile_in_time_are_refused(step: float) -> None:
    """2^31 stopped the server for minutes."""
    with pytest.raises(Unsupported, match="multipleOf takes too long to compile"):
        grammar.json_answer({"type": "integer", "multipleOf": step}, strict=False)
    assert accepts({"type": "integer", "multipleOf": 2**10}, "2048")


@pytest.mark.parametrize(
    "bounds", [{"multipleOf": 2**31}, {"exclusiveMinimum": 2**53}, {"minimum": -(2**64)}]
)
def test_bounds_of_arguments_are_exact_or_ignored(bounds: dict[str, int]) -> None:
    """The last one, with a maximum of -2^63, ended the process."""
    number = {"type": "integer", "maximum": -(2**63), **bounds}
    schema = {"type": "object", "properties": {"a": number}, "required": ["a"]}
    text = grammar.whole_text(MARKS, calls=[Function("f", parameters=schema)]).text
    assert not any(f'"{keyword}"' in text for keyword in number if keyword != "type")
    with pytest.raises(Unsupported, match="cannot be enforced"):
        grammar.whole_text(MARKS, calls=[Function("f", parameters=schema, strict=True)])


@pytest.mark.parametrize(
    "schema", ['{"const": -9223372036854775808}', '{"type": "integer", "multipleOf": 2147483648}']
)
def test_schemas_in_grammars_of_users_are_checked(schema: str) -> None:
    """They ended or stopped the process that compiled them."""
    for lark in (f"start: %json {schema}", f'start: "a" b\nb: %json  {{}} | %json\n{schema}'):
        with pytest.raises(Unsupported, match=r"schema of the grammar: (const|multipleOf) "):
            grammar.to_lark("%llguidance {}\n" + lark)
    for lark in ("start: %json {", "start: %json", "start: %json 1" + "[" * 9999, "start: /a/"):
        assert grammar.to_lark("%llguidance {}\n" + lark).endswith(lark)
