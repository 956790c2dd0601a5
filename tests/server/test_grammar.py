"""Grammar masks: allowed texts are valid, and the mask's state follows the tokens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch

from g4spec.errors import InputError, Unsupported
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server import grammar
from g4spec.server.call_grammar import Function
from g4spec.server.grammar import Vocabulary
from g4spec.server.output_parser import ArgumentEvent, CallEvent, Marks, Parser
from tests.server.random_texts import random_text
from tests.support.processor_time import processor_time_below

MARKS = Marks(105, 106, 100, 101, 48, 49, 50, 52)


@pytest.fixture(scope="module")
def tokenizer(engines: Callable[..., Engine]) -> Tokenizer:
    return engines(None, parallel=2).tokenizer


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, 4096)


@pytest.fixture(scope="module")
def ends(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that may end a text."""
    wanted = ['"', "}", "]", '"}', '"]', ":"]
    ids = [i for i in range(4096) if tokenizer.piece(i).decode(errors="replace") in wanted]
    return [1, 49, 52, 106, *ids]


def arguments(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[str, Any]]:
    """Return the tool calls of a text: names and arguments."""
    parser = Parser(tokenizer, MARKS)
    out: list[tuple[str, str]] = []
    for event in [*parser.push(ids), *parser.finish(whole=False)]:
        assert isinstance(event, (CallEvent, ArgumentEvent)), event
        if isinstance(event, CallEvent):
            out.append((event.name, ""))
        else:
            out[-1] = (out[-1][0], out[-1][1] + event.json)
    return [(name, json.loads(text)) for name, text in out]


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": objects(
            value={"type": "integer", "minimum": 0, "maximum": 9},
            left={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        )
    },
}
SCHEMAS: dict[str, Any] = {
    "nothing": objects(),
    "free": {"type": "object"},
    "text": {**objects(city={"type": "string"}), "required": ["city"]},
    "references": {
        **objects(
            a={"$ref": "#/components/X"},
            b={"$ref": "#/definitions/List%3Cnumber%3E"},
            c={"$ref": "#/definitions/x~1y"},
        ),
        "required": ["a", "b", "c"],
        "components": {"X": {"type": "integer"}},
        "definitions": {"List<number>": {"enum": [[], [1]]}, "x/y": {"type": "boolean"}},
    },
    "many": {
        **objects(
            a={"type": "string"},
            b={"type": "boolean"},
            c={"type": "null"},
            d={"type": "number"},
            e={"type": "integer"},
        ),
        "required": ["e", "b"],
    },
    "ranges": {
        **objects(
            i={"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
            x={"type": "number", "minimum": 0.5, "maximum": 2},
            m={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
        ),
        "required": ["i", "x", "m"],
    },
    "enums": {
        **objects(
            u={"enum": ['cel"sius', "", "é😀", 3, None, True, {"k": ["v", 1]}]},
            v={"type": "string", "enum": ["a", "b", 7]},
            w={"const": "only"},
        ),
        "required": ["u", "v", "w"],
    },
    "exclusive": {
        **objects(
            e={"enum": [1, 2, 3, 4, 5], "minimum": 1, "exclusiveMinimum": 1.5},
            a={"allOf": [{"type": "integer", "minimum": 4}, {"exclusiveMaximum": 7}]},
        ),
        "required": ["e", "a"],
    },
    "lengths": {
        **objects(
            s={"type": "string", "minLength": 3, "maxLength": 5},
            t={"type": "string", "maxLength": 2},
        ),
        "required": ["s", "t"],
    },
    "patterns": {
        **objects(
            p={"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
            q={"type": "string", "pattern": "x|^y$", "maxLength": 8},
        ),
        "required": ["p", "q"],
    },
    "formats": {
        **objects(
            d={"type": "string", "format": "date"},
            u={"type": "string", "format": "uuid"},
            t={"type": "string", "format": "date-time"},
            o={"type": "string", "format": "x"},
        ),
        "required": ["d", "u", "t"],
    },
    "arrays": {
        **objects(
            a={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
            b={"type": "array", "maxItems": 0},
            c={
                "type": "array",
                "prefixItems": [{"type": "string"}, {"type": "null"}],
                "items": {"type": "boolean"},
                "minItems": 1,
                "maxItems": 4,
            },
            d={"type": "array", "items": {"type": "string"}},
            e={"type": "array", "prefixItems": [{"type": "null"}], "minItems": 2},
        ),
        "required": ["a", "b", "c", "e"],
    },
    "maps": objects(
        m={"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        n={**objects(k={"type": "string"}), "additionalProperties": {"type": "boolean"}},
        o={
            "type": "object",
            "patternProperties": {"^x-": {"type": "null"}},
            "additionalProperties": False,
        },
    ),
    "counts": objects(
        o={
            **objects(a={"type": "null"}, b={"type": "null"}, c={"type": "null"}),
            "minProperties": 1,
            "maxProperties": 2,
            "additionalProperties": False,
        },
    ),
    "unlisted": {**objects(), "required": ["seen"]},
    "odd keys": {
        **objects(
            **{
                "a:b": {"type": "null"},
                "": {"type": "null"},
                "with space": {"type": "null"},
                'q"': {"type": "null"},
                "}": {"type": "null"},
                "$f.x-y": {"type": "null"},
            }
        ),
        "required": ["a:b", "", "with space", 'q"', "}", "$f.x-y"],
    },
    "tree": TREE,
    "all": objects(
        x={
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {
                    "properties": {"b": {"type": "integer"}, "a": {"maxLength": 2}},
                    "required": ["b"],
                },
            ]
        },
        y={"type": ["string", "null"], "maxLength": 1},
        z={"minimum": 3, "anyOf": [{"type": "integer", "maximum": 5}, {"type": "null"}]},
        one={"oneOf": [{"type": "string", "enum": ["a"]}, {"enum": ["b", 1]}]},
    ),
    "values with bounds": objects(
        a={
            "enum": [1, 5, 12, "a", "abc", [], [1], {}, {"k": 1}, None, True],
            "maximum": 5,
            "minLength": 2,
            "maxItems": 0,
            "minProperties": 1,
            "multipleOf": 5,
        }
    ),
    "a key without a value": {
        **objects(
            a={"type": "boolean", "enum": ["True", "False"]},
            b={"type": "null"},
            c={"type": "integer", "enum": [1, 2], "minimum": 2},
        ),
        "required": ["c"],
        "additionalProperties": False,
    },
    "wide": {
        **objects(**{f"k{i}": {"type": "null"} for i in range(70)}),
        "required": [f"k{i}" for i in range(0, 70, 9)],
        "additionalProperties": False,
    },
    "wide, none required": objects(**{f"k{i}": {"type": "null"} for i in range(66)}),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_calls_are_valid_against_their_schema(
    vocabulary: Vocabulary, tokenizer: Tokenizer, ends: list[int], name: str
) -> None:
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    functions = [Function("f-1.x", parameters=schema), Function("other")]
    seen = set()
    for seed in range(16):
        wanted = grammar.whole_text(MARKS, calls=functions[: 1 + seed % 2])
        text = random_text(vocabulary.mask(wanted), random.Random(f"{name} {seed}"), ends, 6 * seed)
        for called, value in arguments(tokenizer, text):
            jsonschema.validate(value, schema if called == "f-1.x" else objects())
            seen.add((called, json.dumps(value, sort_keys=False)))
    found = {value for called, value in seen if called == "f-1.x"}
    assert len(found) > 1 or (found and name == "nothing")


ONE_OF_TWO = {"allOf": [{**objects(a={}), "additionalProperties": False}, objects(a={}, b={})]}
JUDGED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"minProperties": 1}, {"{a:1}": "yes", "{}": "no"}),
    (
        {**objects(a={}), "patternProperties": {"^a": {"type": "null"}}},
        {"{a:null}": "yes", "{a:1}": "no"},
    ),
    (objects(x=ONE_OF_TWO), {"{x:{a:1}}": "yes", "{x:{b:1}}": "no"}),
    (
        objects(x={"anyOf": [{"type": "null"}, {"type": "array", "enum": ["x"]}]}),
        {"{x:null}": "yes", "{x:1}": "no"},
    ),
]


@pytest.mark.parametrize("schema, texts", JUDGED)
def test_arguments_are_judged_as_by_jsonschema(
    vocabulary: Vocabulary, tokenizer: Tokenizer, schema: dict[str, Any], texts: dict[str, str]
) -> None:
    functions = [Function("f", parameters={"properties": {}, **schema, "type": "object"})]
    for text, judged in texts.items():
        mask = vocabulary.mask(grammar.inside_calls(MARKS, functions, parallel=False))
        ids = [MARKS.call, *tokenizer.encode(f"call:f{text}", bos=False), MARKS.call_end]
        fits = all(
            (allowed := mask(ids[:i])) is not None and allowed[ids[i]] for i in range(1, len(ids))
        )
        value = json.loads(re.sub("[a-z](?=:)", r'"\g<0>"', text))
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert (fits, valid) == ((True, True) if judged == "yes" else (False, False)), text


REFUSED = {
    "uniqueItems": objects(a={"type": "array", "uniqueItems": True}),
    "not": objects(a={"not": {"type": "null"}}),
    "if": objects(a={"if": {"type": "null"}, "then": False}),
    "dependentRequired": {**objects(), "dependentRequired": {"a": ["b"]}},
    "pattern": objects(a={"type": "string", "pattern": "a(?=b)"}),
    "oneOf": objects(a={"oneOf": [{"type": "string"}, {"maxLength": 3}]}),
    "format": objects(a={"type": "string", "format": "iri"}),
    "exclusiveMinimum": objects(a={"type": "integer", "exclusiveMinimum": True}),
    "exclusiveMaximum": objects(a={"enum": [1, 2], "exclusiveMaximum": True}),
}


def test_a_function_that_cannot_be_called_is_refused() -> None:
    schema = {**objects(a={"type": "array", "enum": ["x"]}), "required": ["a"]}
    for strict in (False, True):
        with pytest.raises(InputError, match="schema of f: no value is valid"):
            grammar.whole_text(MARKS, calls=[Function("f", parameters=schema, strict=strict)])
    schema = objects(a={"enum": ["x"], "pattern": "y"})
    grammar.whole_text(MARKS, calls=[Function("f", parameters=schema)])
    with pytest.raises(Unsupported, match="pattern cannot be enforced"):
        grammar.whole_text(MARKS, calls=[Function("f", parameters=schema, strict=True)])


@pytest.mark.parametrize("keyword", REFUSED)
def test_unenforceable_schemas_are_refused_when_strict(
    vocabulary: Vocabulary, keyword: str
) -> None:
    schema = REFUSED[keyword]
    with pytest.raises(Unsupported, match=f"schema of f: {keyword}.*cannot be enforced"):
        grammar.whole_text(MARKS, calls=[Function("f", parameters=schema, strict=True)])
    vocabulary.mask(grammar.whole_text(MARKS, calls=[Function("f", parameters=schema)]))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "object", "properties": []},
        {"$ref": "#/nowhere"},
        objects(a=3),
        objects(a={"$ref": "http://x/y"}),
        {**objects(a={"$ref": "#X"}), "$defs": {"X": {"$anchor": "X", "type": "integer"}}},
        objects(a={"anyOf": []}),
        objects(a={"enum": 3}),
        {**objects(a=False), "required": ["a"]},
        {**objects(), "required": ["a"], "additionalProperties": False},
        objects(a={"type": "array", "minItems": 3, "maxItems": 1}),
        objects(a={"type": "array", "minItems": -1}),
        {**objects(a={}), "minProperties": 2, "additionalProperties": False},
        {**objects(a={}), "maxProperties": 0, "required": ["a"]},
        objects(a={"allOf": 3}),
        objects(a={"allOf": [{"minLength": "x"}, {"minLength": 3}]}),
        objects(a={"allOf": [{"properties": 3}, {"properties": {}}]}),
        objects(a={"const": 1, "enum": 3}),
        objects(a={"type": "string", "format": ["date"]}),
        {**objects(a={"enum": [1], "multipleOf": 0}), "required": ["a"]},
        objects(a={"enum": [1], "multipleOf": "x"}),
        {"type": "object", "patternProperties": []},
        {"$defs": {"a": objects(b={"$ref": "#/$defs/a", "maxItems": 1})}, "$ref": "#/$defs/a"},
        objects(a={"allOf": [{"anyOf": [{"minimum": i} for i in range(9)]}] * 12}),
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"},
    ],
)
def test_invalid_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(InputError, match="f"):
        grammar.whole_text(MARKS, calls=[Function("f", parameters=schema)])


def test_patterns_of_keys_are_matched_in_linear_time() -> None:
    """The server answers nothing else meanwhile; 2 to the power of 40 steps with Python's `re`."""
    schema = {**objects(**{"a" * 40 + "!": {}}), "patternProperties": {"^(a+)+$": {}}}
    schema["additionalProperties"] = False
    with processor_time_below(5):
        grammar.whole_text(MARKS, calls=[Function("f", parameters=schema)])


def test_alternatives_that_multiply_are_refused_at_once() -> None:
    """The server answers nothing else meanwhile."""
    chain: dict[str, Any] = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 8} for i in range(12)
    }
    schema = {"$defs": {**chain, "a12": {"type": "string"}}, "$ref": "#/$defs/a0"}
    with processor_time_below(5):
        with pytest.raises(InputError, match="too many alternatives"):
            grammar.whole_text(MARKS, calls=[Function("f", parameters=schema)])
        constants = objects(a={"oneOf": [{"const": f"{i}"} for i in range(3000)]})
        # 12 seconds if the constants are compared pairwise
        grammar.whole_text(MARKS, calls=[Function("f", parameters=constants, strict=True)])


def test_invalid_function_names_are_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(InputError, match="invalid function name"):
        grammar.whole_text(MARKS, calls=[Function("f{")])


# ---- answers


@pytest.mark.parametrize("name", ["text", "enums", "arrays", "tree", "ranges"])
def test_json_is_compact_and_valid(
    vocabulary: Vocabulary, tokenizer: Tokenizer, ends: list[int], name: str
) -> None:
    wanted = grammar.whole_text(MARKS, answer=grammar.json_answer(SCHEMAS[name], strict=True))
    for seed in range(6):
        text = tokenizer.decode(random_text(vocabulary.mask(wanted), random.Random(seed), ends))
        value = json.loads(text)
        jsonschema.validate(value, SCHEMAS[name])
        assert not any(c.isspace() for c in text.replace(" ", "")) or "\\n" not in text
        assert len(text.encode()) <= len(json.dumps(value, separators=(",", ":"), indent=None)) + 64


def test_exclusive_bounds_of_draft_4(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """They are booleans, which the library would ignore in answers."""
    schema = {
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5},
                {"enum": [3, 7], "exclusiveMaximum": False},
            ]
        },
    }
    numbers = objects(
        a={
            "allOf": [
                {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
                {"maximum": 5, "exclusiveMaximum": True},
            ]
        },
        b={"enum": [1, 3, 5], "maximum": 5, "exclusiveMaximum": True},
    )
    numbers["required"] = ["a", "b"]
    for strict in (False, True):
        answer = grammar.json_answer(schema, strict=strict)
        for text, valid in (("[4]", True), ("[5,4]", True), ("[7]", True), ("[6]", False)):
            matcher = vocabulary.compile(grammar.whole_text(None, answer=answer).text)
            ids = tokenizer.encode(text, bos=False)
            assert (matcher.try_consume_tokens(ids) == len(ids)) is valid, text
        calls = [Function("f", parameters=numbers, strict=strict)]
        for text, valid in (("a:4,b:3", True), ("a:3,b:3", False), ("a:4,b:5", False)):
            ids = [48, *tokenizer.encode("call:f{" + text + "}", bos=False), 49]
            matcher = vocabulary.compile(grammar.whole_text(MARKS, calls=calls).text)
            assert (matcher.try_consume_tokens(ids) == len(ids)) is valid, text
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        alone = objects(a={"type": "integer", keyword: True}, **{keyword: {"const": True}})
        with pytest.raises(Unsupported, match=f"{keyword} without .* cannot be enforced"):
            grammar.json_answer(alone, strict=True)
        answer = grammar.json_answer(alone, strict=False)
        vocabulary.compile(grammar.whole_text(None, answer=answer).text)
        assert '"const": true' in answer and f'"{keyword}": true' not in answer


def test_a_schema_of_references_to_itself_is_refused(vocabulary: Vocabulary) -> None:
    loop = {"a": {"$ref": "#/$defs/b"}, "b": {"title": "b", "$ref": "#/$defs/a"}}
    for schema in (
        {"$ref": "#"},
        {"$ref": "#", "title": "x"},
        {"$ref": "#/$defs/a", "$defs": loop},
    ):
        with pytest.raises(
            InputError, match=r"refers to itself: expected content, found only \$ref"
        ):
            grammar.json_answer(schema, strict=True)
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    answer = grammar.json_answer(tree, strict=True)
    assert vocabulary.mask(grammar.whole_text(MARKS, answer=answer))([]) is not None


def test_user_grammars(vocabulary: Vocabulary, tokenizer: Tokenizer, ends: list[int]) -> None:
    for text in ('root ::= "yes" | "no" [0-9]\n', '%llguidance {}\nstart: "yes" | "no" /[0-9]/'):
        wanted = grammar.whole_text(MARKS, user=grammar.to_lark(text), thinking="may")
        seen = set()
        for seed in range(30):
            ids = random_text(vocabulary.mask(wanted), random.Random(seed), [101, *ends])
            if ids[0] == 100:
                assert tokenizer.decode(ids).startswith("<|channel>thought\n")
                ids = ids[ids.index(101) + 1 :]
                seen.add("thought")
            seen.add(tokenizer.decode(ids)[:3].rstrip("0123456789"))
        assert seen == {"thought", "yes", "no"}
    with pytest.raises(InputError, match=r"not valid GBNF.*'foo' not found"):
        grammar.to_lark("root ::= foo\n")
    with pytest.raises(InputError, match="cannot be used"):
        vocabulary.mask(grammar.whole_text(MARKS, user="start: )"))
    with pytest.raises(InputError, match=r"cannot be used.*uniqueItems"):
        schema = {"type": "array", "uniqueItems": True}
        vocabulary.mask(grammar.whole_text(MARKS, answer=grammar.json_answer(schema, strict=True)))


def test_an_answer_or_calls(vocabulary: Vocabulary, tokenizer: Tokenizer, ends: list[int]) -> None:
    tools = [Function("f", parameters=SCHEMAS["text"])]
    rule = grammar.json_answer({"type": "boolean"}, strict=True)
    for wanted in (
        grammar.whole_text(MARKS, answer=rule, calls=tools, most=1),
        grammar.whole_text(MARKS, user='start: "true" | "false"', calls=tools, most=1),
    ):
        seen = set()
        for seed in range(12):
            ids = random_text(vocabulary.mask(wanted), random.Random(seed), ends)
            if ids[0] == MARKS.call:
                [(name, value)] = arguments(tokenizer, ids)
                jsonschema.validate(value, SCHEMAS["text"])
                seen.add(name)
            else:
                seen.add(tokenizer.decode(ids))
        assert "f" in seen and seen <= {"f", "true", "false"} and len(seen) > 1


def test_an_open_thought_ends_before_the_answer(
    vocabulary: Vocabulary, tokenizer: Tokenizer, ends: list[int]
) -> None:
    answer = grammar.json_answer({"type": "boolean"}, strict=True)
    mask = vocabulary.mask(grammar.whole_text(MARKS, answer=answer, thinking="open"))
    ids = random_text(mask, random.Random(1), [101, *ends])
    assert tokenizer.decode(ids[ids.index(101) + 1 :]) in ("true", "false")


# ---- state


def test_calls_in_a_free_text(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    tools = [Function("f", parameters=SCHEMAS["text"])]
    call = tokenizer.encode('<|tool_call>call:f{city:<|"|>x<|"|>}<tool_call|>', bos=False)
    for parallel in (True, False):
        mask = vocabulary.mask(grammar.inside_calls(MARKS, tools, parallel=parallel))
        text = [*tokenizer.encode("Hi", bos=False), *call]
        start = text.index(48)
        for n in [*range(len(text) + 1), 3, len(text), 0, len(text) - 1, start + 1]:
            allowed = mask(text[:n])
            if n <= start:
                assert allowed is None
            elif n < len(text):
                assert allowed is not None and allowed[text[n]] and not allowed[106]
            elif parallel:
                assert allowed is None
            else:
                assert allowed is not None
                assert allowed.nonzero().flatten().tolist() == [1, 50, 106]
        if parallel:  # the next call has its own state, and the first one is kept
            two = [*text, *tokenizer.encode(" and ", bos=False), *call]
            for n in (len(two) - 2, len(text) - 2, len(two) - 1, len(two)):
                allowed = mask(two[:n])
                assert (allowed is None) == (n == len(two))
                assert allowed is None or allowed[two[n]]
        assert mask([*text, 106]) is None and mask([*text, 106, 5, 6]) is None
        assert (mask(text) is None) == parallel


def test_a_dead_end_is_an_error(vocabulary: Vocabulary) -> None:
    mask = vocabulary.mask(grammar.whole_text(MARKS, user='start: A "c"\nA: /x+/ & /y+/'))
    with pytest.raises(InputError, match=r"parser failed|no continuation"):
        mask([])


def test_compiled_grammars_are_kept(vocabulary: Vocabulary) -> None:
    wanted = grammar.whole_text(MARKS, user='start: "a" "b"')
    first, second = vocabulary.mask(wanted), vocabulary.mask(wanted)
    before = len(vocabulary._cache)
    allowed = first([])
    assert allowed is not None
    first([int(allowed.nonzero()[0])])
    again = second([])
    assert again is not None and again.equal(allowed)
    assert len(vocabulary._cache) == before <= grammar.CACHED_GRAMMARS


@pytest.mark.parametrize("name", ["arrays", "tree"])
def test_a_draft_does_not_change_masked_texts(
    engines: Callable[..., Engine], tokenizer: Tokenizer, vocabulary: Vocabulary, name: str
) -> None:
    from g4spec.ops.sampling import Sampler

    tools = [Function("f", parameters=SCHEMAS[name])]
    prompt = tokenizer.encode("def main():")
    texts = []
    for draft, count in ((None, 0), ("dflash.gguf", 3), ("ngram", 4)):
        engine = engines(draft, parallel=2)
        free = grammar.inside_calls(MARKS, tools, parallel=True)
        for wanted in (grammar.whole_text(MARKS, calls=tools), free):
            options = Options(
                16,
                Sampler(1.0, seed=7),
                count,
                mask=vocabulary.mask(wanted),
                stream=lambda: tokenizer.stream(special=True),
            )
            request = engine.submit(prompt, options)
            for _ in request:
                pass
            texts.append(request.ids)
    assert texts[0::2] == [texts[0]] * 3 and texts[1::2] == [texts[1]] * 3
    assert tokenizer.decode(texts[0], special=True).startswith("<|tool_call>call:f{")


def test_thoughts_have_a_budget(vocabulary: Vocabulary) -> None:
    channel, end, call = MARKS.channel, MARKS.channel_end, MARKS.call
    budget = grammar.ThinkingBudget(2, MARKS, 4096)

    def only(allowed: torch.Tensor | None) -> list[int]:
        assert allowed is not None
        return allowed.nonzero().flatten().tolist()

    thought = [300, channel, 301, 302]
    for ids in ([], [300], thought[:2], thought[:3], [300, channel, call, 301, 302]):
        assert budget(ids) is None, ids
    assert only(budget(thought)) == [end]
    after = only(budget([*thought, end]))
    assert len(after) == 4095 and channel not in after
    assert budget(thought[:3]) is None and only(budget(thought)) == [
        end
    ]  # rejected tokens are undone
    assert only(grammar.ThinkingBudget(1, MARKS, 4096, open_thought=True)([300])) == [end]
    # The budget waits until the grammar allows the thought to end.
    inner = vocabulary.mask(grammar.whole_text(MARKS, user='start: "x"', thinking="may"))
    under = grammar.ThinkingBudget(0, MARKS, 4096, inner=inner)
    alone = vocabulary.mask(grammar.whole_text(MARKS, user='start: "x"', thinking="may"))
    assert only(under([channel])) == only(alone([channel])) != [end]
    ids = [channel]
    while (allowed := only(under(ids))) != [end]:
        ids.append(allowed[0])
    assert len(ids) > 1 and only(under([*ids, end])) == only(alone([*ids, end]))
