"""Constraints on answers, under the names of OpenAI, llama.cpp, vLLM and SGLang."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import openai
import pytest

from g4spec.server import completions, constraints, fields, grammar
from tests.server.mixed_requests import TOOLS
from tests.server.running_server import Served

BYTES = llguidance.LLTokenizer("byte")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
SPACED = {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}
EBNF = 'root ::= "x" digit\ndigit ::= [0-9]\n'
LARK = 'start: "x" DIGIT\nDIGIT: /[0-9]/'
ODD = ['a"b\\', "\x7f\x00\n", "😀/", ""]

# fields of a request -> texts that match, texts that do not
MATCHED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a":1}'], ['{"a":3}', "{}", '{"a": 1}']),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ['{"a":2}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ['{"b":[0]}', "{}"], ["[]", "x"]),
    ({"structured_outputs": {"regex": r"^\d{2}/[a-c]+\n$"}}, ["12/ab\n"], ["1/a\n", "12/ab"]),
    ({"structured_outputs": {"choice": ["yes", "yes!"]}}, ["yes", "yes!"], ["y", "yes!!", ""]),
    ({"structured_outputs": {"choice": ODD}}, ODD, ["a", "/"]),
    ({"structured_outputs": {"grammar": EBNF}}, ["x1"], ["x", "1"]),
    ({"structured_outputs": {"grammar": LARK}}, ["x1"], ["x"]),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}},
        ['{"a": 1}', '{"a":1}'],
        ['{"a":  1}'],
    ),
    (
        {"structured_outputs": {"regex": "a", "json": None, "disable_any_whitespace": True}},
        ["a"],
        ["b"],
    ),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "guidance"}, ['{"a":1}'], ["{}"]),
    (SPACED, ['{ "a": 1 }', '{"a":1}'], ['{"a":\n1}']),
    ({"guided_regex": "a|b"}, ["a", "b"], ["ab"]),
    ({"guided_choice": ["a", "b"]}, ["a", "b"], ["ab"]),
    ({"guided_grammar": "%llguidance {}\n" + LARK}, ["x7"], ["x"]),
    ({"regex": r"[^\s]+@\w+", "ebnf": "", "guided_json": None}, ["a@b"], ["a@é"]),
    ({"ebnf": EBNF}, ["x9"], ["y"]),
    ({"json_schema": json.dumps(SCHEMA)}, ['{"a":1}'], ["1"]),
    ({"json_schema": SCHEMA, "response_format": {"type": "text"}}, ['{"a":1}'], ["1"]),
    ({"response_format": {"type": "json_object"}}, ["{}"], ["1"]),
    ({"grammar": EBNF}, ["x1"], ["1"]),
]


@pytest.mark.parametrize("model", [fields.ChatRequest, completions.CompletionRequest])
def test_answers_match_what_is_asked_for(model: type[fields.OpenAI]) -> None:
    needed = {"prompt": "x"} if model is completions.CompletionRequest else {"messages": [USER]}
    for more, matching, others in MATCHED:
        wanted = constraints.of(fields.check(model, {**needed, **more}))
        text = grammar.whole_text(None, answer=wanted.answer, user=wanted.user).text
        assert not llguidance.LLMatcher.validate_grammar(text, BYTES), more
        for each in (*matching, *others):
            matcher, ids = llguidance.LLMatcher(BYTES, text, log_level=0), list(each.encode())
            whole = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert whole is (each in matching), (more, each)


USER = {"role": "user", "content": "Hi"}
NAMED = {"type": "function", "function": {"name": "clock"}}
OUTPUTS = "structured_outputs"

# fields of a request, the field that the error names, and what it says
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({OUTPUTS: {}}, OUTPUTS, "expected json, regex, choice, grammar or json_object"),
    ({OUTPUTS: {"json_object": False}}, OUTPUTS, "expected json, regex, choice"),
    (
        {OUTPUTS: {"regex": "a", "choice": ["a"]}},
        f"{OUTPUTS}.regex",
        f"^{OUTPUTS}.regex and {OUTPUTS}.choice exclude each other",
    ),
    ({"regex": "a", "ebnf": EBNF}, "regex", "^regex and ebnf exclude each other"),
    (
        {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
        "response_format",
        "^response_format and guided_json exclude each other",
    ),
    ({OUTPUTS: {"regex": "a"}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
    ({OUTPUTS: {"structural_tag": "{}"}}, f"{OUTPUTS}.structural_tag", "not supported"),
    ({OUTPUTS: {"json": "["}}, f"{OUTPUTS}.json", "expected a JSON schema, .* found '\\['"),
    ({OUTPUTS: {"json": "[1]"}}, f"{OUTPUTS}.json", "expected a JSON schema"),
    ({OUTPUTS: {"choice": []}}, f"{OUTPUTS}.choice", "at least 1"),
    ({OUTPUTS: {"choice": [1]}}, f"{OUTPUTS}.choice[0]", "expected a string, found 1"),
    ({OUTPUTS: {"json": {"uniqueItems": True, "type": "array"}}}, "", "uniqueItems"),
    (
        {OUTPUTS: {"json": SCHEMA, "disable_additional_properties": True}},
        f"{OUTPUTS}.disable_additional_properties",
        "expected false",
    ),
    (
        {OUTPUTS: {"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": " "}},
        f"{OUTPUTS}.whitespace_pattern",
        "disable_any_whitespace",
    ),
    ({OUTPUTS: {"fo": 1}}, f"{OUTPUTS}.fo", "unknown field"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "'auto' or 'guidance'"),
    (
        {"guided_regex": "a", "guided_whitespace_pattern": " "},
        "guided_whitespace_pattern",
        "only with a JSON schema",
    ),
    ({**SPACED, "guided_whitespace_pattern": "["}, "", "unclosed character class"),
    ({"regex": "(?=a)b"}, "", "look-around"),
    ({"ebnf": "root ::= x\n"}, "", "not valid GBNF"),
    ({"ebnf": "start: ("}, "", "cannot be used"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.type", "tag"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_cannot_be_honoured_is_named(busy: Served, path: str) -> None:
    needed = {"prompt": "x"} if path == "/v1/completions" else {"messages": [USER]}
    for more, field, message in REFUSED:
        error = busy.refused(path, {**needed, "max_tokens": 2, **more})
        assert re.search(message, error["message"]), (more, error)
        assert (error["param"] or "") == field and "\n" not in error["message"]
    assert busy.idle()


def test_a_forced_call_excludes_a_constraint(busy: Served) -> None:
    """Only response_format may be sent with it, which applies to later answers without a call."""
    chat = {"messages": [USER], "tools": TOOLS, "max_tokens": 4}
    for choice in ("required", NAMED):
        for more in ({"regex": "a"}, {OUTPUTS: {"choice": ["a"]}}, {"grammar": EBNF}):
            error = busy.refused("/v1/chat/completions", {**chat, "tool_choice": choice, **more})
            assert "tool_choice" in error["message"] and error["param"].startswith(min(more))
        busy.post(
            "/v1/chat/completions",
            **chat,
            tool_choice=choice,
            response_format={"type": "json_object"},
        )
    answer = busy.post("/v1/chat/completions", **chat, tool_choice="none", regex="ab")
    assert answer["choices"][0]["message"]["content"] == "ab"


def test_clients_of_vllm_and_sglang(busy: Served) -> None:
    client = openai.OpenAI(base_url=f"{busy.url}/v1", api_key="none", max_retries=0)
    given: Any = {"model": "tiny", "max_tokens": 24, "seed": 1}
    for extra in (
        {OUTPUTS: {"choice": ["a b", "a c"]}},
        {"guided_regex": "a [bc]"},
        {"ebnf": 'root ::= "a " [bc]\n', "chat_template_kwargs": {"enable_thinking": False}},
        {"regex": "a (b|c)", "reasoning_effort": "low", "thinking_budget_tokens": 4},
    ):
        whole = client.chat.completions.create(messages=[USER], extra_body=extra, **given)
        stream = client.chat.completions.create(
            messages=[USER], extra_body=extra, stream=True, **given
        )
        text = whole.choices[0].message.content
        assert text in ("a b", "a c") and whole.choices[0].finish_reason == "stop"
        assert "".join(c.choices[0].delta.content or "" for c in stream) == text
    listed = client.completions.create(prompt=["x", "y"], extra_body={"regex": "a [bc]"}, **given)
    assert {choice.text for choice in listed.choices} <= {"a b", "a c"}
    ask: Any = {"model": "tiny", "input": "Hi", "max_output_tokens": 9}
    answer = client.responses.create(**ask, extra_body={OUTPUTS: {"choice": ["a b"]}})
    assert answer.output_text == "a b" and answer.status == "completed"
    both = {OUTPUTS: {"choice": ["a"]}, "text": {"format": {"type": "json_object"}}}
    error = busy.refused("/v1/responses", {**ask, **both})
    assert "exclude each other" in error["message"]
