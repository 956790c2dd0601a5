"""Anthropic's endpoints, tested with Anthropic's client, which validates every answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from g4spec.runtime.engine import Engine
from g4spec.server import chat, messages
from g4spec.server.fields import read
from g4spec.server.generation import Delta
from g4spec.server.message_fields import MessagesRequest, chat_request
from g4spec.server.output_parser import ArgumentEvent, CallEvent, Event, ThoughtEvent
from g4spec.server.output_parser import TextEvent as Words
from g4spec.server.request_errors import RequestError
from g4spec.server.settings import Settings
from tests.server.running_server import Served
from tests.server.test_openai import SCHEMAS, WEATHER
from tests.support.processor_time import processor_time_below
from tests.support.selection import sample

if TYPE_CHECKING:
    import anthropic

TOOLS: Any = [
    {"name": "weather", "input_schema": WEATHER, "strict": True},
    {
        "name": "clock",
        "description": "Time",
        "input_schema": SCHEMAS["clock"],
        "type": "custom",
        "cache_control": {"type": "ephemeral"},
    },
]
HELLO: Any = [{"role": "user", "content": "What is 2 + 3?"}]
CALLED: Any = [
    *HELLO,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"unit": "C", "days": 2}},
            {"type": "tool_use", "id": "t2", "name": "clock", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [
                    {"type": "text", "text": "sunny"},
                    {"type": "text", "text": "and warm"},
                ],
            },
            {"type": "text", "text": "Well?"},
            {"type": "tool_result", "tool_use_id": "t2", "content": "broken", "is_error": True},
        ],
    },
]


def connect(served: Served, key: str = "none", **more: Any) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, **more)


@pytest.fixture(scope="module")
def client(busy: Served) -> Iterator[anthropic.Anthropic]:
    with connect(busy, _strict_response_validation=True) as client:
        yield client


@pytest.fixture(scope="module")
def undrafted_client(plain: Served) -> Iterator[anthropic.Anthropic]:
    with connect(plain) as client:
        yield client


def given(**more: Any) -> Any:
    extra = {"draft_max": 3, "seed": 5, **more.pop("extra_body", {})}
    extra |= {k: more.pop(k) for k in ("temperature", "top_p", "top_k") if k in more}
    return {"model": "tiny", "messages": HELLO, "max_tokens": 16, **more, "extra_body": extra}


def flat(message: Any) -> dict[str, Any]:
    """Return a message without the ids that differ between answers."""
    out: dict[str, Any] = message.model_dump(exclude={"id", "usage", "timings"})
    for block in out["content"]:
        block.pop("id", None)
    return out


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 2},
    "sampled": {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 40,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"},
        "service_tier": "auto",
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
    },
    "stop": {"temperature": 0, "stop_sequences": ["zzz", "e"]},
    "any": {
        "tools": TOOLS,
        "tool_choice": {"type": "any"},
        "max_tokens": 24,
        "thinking": {"type": "enabled", "budget_tokens": 6},
    },
    "one": {"tools": TOOLS[1:], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "tool": {"tools": TOOLS, "max_tokens": 40, "tool_choice": {"type": "tool", "name": "weather"}},
    "cut": {"tools": TOOLS, "max_tokens": 12, "tool_choice": {"type": "tool", "name": "weather"}},
    "auto": {"tools": TOOLS, "tool_choice": {"type": "auto"}, "max_tokens": 8},
    "results": {"tools": TOOLS, "messages": CALLED, "tool_choice": {"type": "none"}},
    "thinking": {"thinking": {"type": "adaptive"}, "max_tokens": 8},
    "schema": {
        "max_tokens": 60,
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": WEATHER}},
    },
    "begun": {"messages": [*HELLO, {"role": "assistant", "content": "2 + 3"}], "temperature": 0},
}


@pytest.mark.parametrize("name", sample(VARIANTS, 6))
def test_messages_whole_streamed_and_undrafted(
    client: anthropic.Anthropic, undrafted_client: anthropic.Anthropic, name: str
) -> None:
    body = given(**VARIANTS[name])
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        pieces = stream.get_final_message()
    assert flat(pieces) == flat(whole)
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert kinds.count("content_block_start") == len(whole.content)

    usage, again = whole.usage, pieces.usage
    assert usage.output_tokens == again.output_tokens > 0
    assert usage.output_tokens_details == again.output_tokens_details
    read = (usage.cache_read_input_tokens or 0, again.cache_read_input_tokens or 0)
    assert usage.input_tokens + read[0] == again.input_tokens + read[1] > 0
    undrafted = undrafted_client.messages.create(**body)
    assert flat(undrafted) == flat(whole) and undrafted.usage.output_tokens == usage.output_tokens
    check(name, whole)


def check(name: str, message: Any) -> None:
    """Check that the answer has the requested content."""
    blocks = {
        kind: [b for b in message.content if b.type == kind]
        for kind in ("text", "thinking", "tool_use")
    }
    if name == "stop":
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "e")
        assert not any("e" in block.text for block in blocks["text"])
    else:
        assert message.stop_sequence is None
    if name == "schema":
        jsonschema.validate(json.loads(blocks["text"][0].text), WEATHER)
        assert message.stop_reason == "end_turn"
    if name in ("any", "one", "tool"):
        assert blocks["tool_use"] and not blocks["text"]
        whole = blocks["tool_use"][: -1 if message.stop_reason == "max_tokens" else None]
        for call in whole:
            jsonschema.validate(call.input, SCHEMAS[call.name])
    if name in ("one", "tool"):
        assert len(blocks["tool_use"]) == 1 and message.stop_reason == "tool_use"
    if name in ("greedy", "cut"):
        assert message.stop_reason == "max_tokens"
    if name == "results":
        assert not blocks["tool_use"]


def test_blocks_follow_the_model() -> None:
    pieces: list[Event] = [
        ThoughtEvent("Hm"),
        ThoughtEvent("."),
        Words("a"),
        CallEvent(0, "f"),
        ArgumentEvent(0, "{"),
        ArgumentEvent(0, "}"),
        CallEvent(1, "g"),
        ArgumentEvent(1, "{}"),
        Words("b"),
    ]

    def kinds(**thinking: Any) -> list[tuple[int, str]]:
        request = MessagesRequest.model_validate({"messages": HELLO, "max_tokens": 1, **thinking})
        events = [*messages._Blocks(request).events(Delta(pieces, finish="stop"))]
        return [(e["index"], e.get("delta", e.get("content_block", e))["type"]) for e in events]

    shown = [
        (0, "thinking"),
        (0, "thinking_delta"),
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (0, "content_block_stop"),
        (1, "text"),
        (1, "text_delta"),
        (1, "content_block_stop"),
        (2, "tool_use"),
        (2, "input_json_delta"),
        (2, "input_json_delta"),
        (2, "content_block_stop"),
        (3, "tool_use"),
        (3, "input_json_delta"),
        (3, "content_block_stop"),
        (4, "text"),
        (4, "text_delta"),
        (4, "content_block_stop"),
    ]
    assert kinds() == shown
    hidden = kinds(thinking={"type": "adaptive", "display": "omitted"})
    assert hidden == [each for each in shown if each[1] != "thinking_delta"]


def test_thoughts_end_when_their_budget_is_spent(
    client: anthropic.Anthropic, undrafted_client: anthropic.Anthropic
) -> None:
    # The small model never starts a thought by itself, so a bias forces it.
    def ask(client: anthropic.Anthropic, **thinking: Any) -> Any:
        more = {"max_tokens": 24, "extra_body": {"logit_bias": {"100": 100}}}
        return client.messages.create(**given(thinking={"type": "enabled", **thinking}, **more))

    without = ask(client)
    assert without.usage.output_tokens_details.thinking_tokens == 23 and not without.content
    short = ask(client, budget_tokens=6)
    assert (
        short.usage.output_tokens_details.thinking_tokens == 7
    )  # the end marker counts as one token
    assert [b.type for b in short.content] == ["text"] and short.content[0].text
    assert flat(ask(undrafted_client, budget_tokens=6)) == flat(short)


def test_the_conversation_as_the_model_reads_it(busy: Served) -> None:
    body = given(
        messages=[*CALLED, {"role": "user", "content": "Now?"}],
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f2e3;"},
            {"type": "text", "text": "Be brief."},
        ],
    )
    del body["extra_body"]
    request = chat_request(read(MessagesRequest, json.dumps(body).encode()))
    turns = [m.model_dump(exclude_none=True) for m in request.messages]
    assert turns[2]["reasoning_content"] == "Hm."
    prompt = busy.post("/apply-template", messages=turns)["prompt"]
    assert prompt == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nWhat is 2 + 3?<turn|>\n<|turn>model\n"
        'I look.<|tool_call>call:weather{days:2,unit:<|"|>C<|"|>}<tool_call|>'
        '<|tool_call>call:clock{}<tool_call|><|tool_response>response:weather{value:<|"|>sunny\n'
        'and warm<|"|>}<tool_response|><|tool_response>response:clock{value:<|"|>Error: broken'
        '<|"|>}<tool_response|>'
        "<|turn>user\nWell?\nNow?<turn|>\n"
        "<|turn>model\n<|channel>thought\n<channel|>"
    )
    assert chat.thinks(request) is False


def test_deferred_tools_are_shown_once_a_result_refers_to_them() -> None:
    # Claude Code 2.1.332 defers a tool in its first request of every conversation.
    search = {"name": "search", "input_schema": {"type": "object"}}
    deferred = {**TOOLS[1], "defer_loading": True}
    body: Any = {"messages": HELLO, "max_tokens": 1, "tools": [search, deferred]}

    def shown(*turns: Any) -> list[str]:
        request = MessagesRequest.model_validate({**body, "messages": [*HELLO, *turns]})
        return [tool.function.name for tool in chat_request(request).tools or []]

    assert shown() == ["search"]
    call = {"type": "tool_use", "id": "t1", "name": "search", "input": {}}
    found = {"type": "tool_reference", "tool_name": "clock"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [found]}
    turns = ({"role": "assistant", "content": [call]}, {"role": "user", "content": [result]})
    assert shown(*turns) == ["search", "clock"]
    request = MessagesRequest.model_validate({**body, "messages": [*HELLO, *turns]})
    assert chat_request(request).messages[-1].content == "clock"
    found["tool_name"] = "clocks"
    with pytest.raises(RequestError, match=r"content\[0\]\.tool_name: there is no tool 'clocks'"):
        shown(*turns)


def test_a_header_that_changes_with_every_request_keeps_the_prefix(busy: Served) -> None:
    text = "You are careful. " * 80

    def ask(mark: str, blocks: bool) -> Any:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={mark};"
        system: Any = f"{header}\n{text}"
        if blocks:
            system = [{"type": "text", "text": header}, {"type": "text", "text": text}]
        return busy.post("/v1/messages", messages=HELLO, system=system, max_tokens=2, temperature=0)

    first = ask("00000", True)
    for mark, blocks in (("11111", True), ("22222", False)):
        again = ask(mark, blocks)
        usage = again["usage"]
        assert again["content"] == first["content"]
        assert usage["cache_read_input_tokens"] > usage["input_tokens"] > 0
        total = usage["cache_read_input_tokens"] + usage["input_tokens"]
        before = first["usage"]
        assert total == before["cache_read_input_tokens"] + before["input_tokens"]


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    for more in (
        {},
        {"system": "Be brief."},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"messages": CALLED},
        {"thinking": {"type": "adaptive"}},
    ):
        body: Any = {"model": "tiny", "messages": HELLO, **more}
        counted = client.messages.count_tokens(**body).input_tokens
        usage = client.messages.create(**body, max_tokens=1).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"fo": 1}, "unknown field fo"),
    "unknown inside": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "fo": 1}]}]},
        r"unknown field messages\[0\].content\[0\].fo",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        r"messages\[0\].content\[0\].type: 'image' is not supported here",
    ),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role"),
    "nothing": ({"messages": [{"role": "user", "content": []}]}, "there is no content"),
    "block": ({"messages": [{"role": "user", "content": ["x"]}]}, "expected a JSON object"),
    "kind": ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "not supported"),
    "server tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        r"tools\[0\].type: 'web_search_20250305' is not supported here, only custom",
    ),
    "no tools": ({"tool_choice": {"type": "any"}}, "there are no tools"),
    "no tool": ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "no tool 'x'"),
    "no name": ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "stray": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        "no tool_use 'x' in the turn before",
    ),
    "late": (
        {
            "messages": [
                *CALLED,
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
            ]
        },
        "no tool_use 't1' in the turn before",
    ),
    "budget": ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "budget_tokens: only with"),
    "begun": ({"messages": [{"role": "assistant", "content": "x"}]}, "can be continued only"),
    "begun-schema": (
        {
            "messages": [*HELLO, {"role": "assistant", "content": '{"a":'}],
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        },
        "cannot follow a schema or grammar",
    ),
    "max": ({"max_tokens": 0}, "max_tokens: .*greater"),
    "stops": ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    "long": ({"system": "word " * 4000}, r"^prompt is too long: \d{4,} tokens > 2048 maximum$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_requests_get_one_sentence(busy: Served, name: str) -> None:
    more, message = REFUSED[name]
    for stream in (False, True):
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 4, **more, "stream": stream}
        response = busy.http.post("/v1/messages", json=body)
        answer = response.json()
        assert response.status_code == 400 and answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["request_id"] == response.headers["request-id"]
        assert re.search(message, answer["error"]["message"]), answer
    assert busy.idle()


def test_threads_are_refused_as_the_sdk_expects(busy: Served) -> None:
    # Its tool runner asks for a thread first, and after this error sends all messages instead.
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "thread": {"type": "create"}}
    response = busy.http.post("/v1/messages", json=body)
    assert response.status_code == 400
    error, code = response.json()["error"], "thread_unsupported_request"
    assert error["details"] == {"error_code": code, "unsupported": ["thread"]}
    assert "send all messages" in error["message"]


def test_the_time_for_blocks_is_linear_in_their_number() -> None:
    n = 30_000  # while a request is converted, the server does nothing else
    thoughts = [{"type": "thinking", "thinking": "x" * 400}] * n
    calls = [{"type": "tool_use", "id": f"t{i}", "name": "f", "input": {}} for i in range(n)]
    results = [{"type": "tool_result", "tool_use_id": f"t{i}"} for i in range(n)]
    turns = [
        *HELLO,
        {"role": "assistant", "content": thoughts + calls},
        {"role": "user", "content": results},
    ]
    request = MessagesRequest.model_validate({"messages": turns, "max_tokens": 1})
    with processor_time_below(10):
        converted = chat_request(request).messages
    assert converted[1].reasoning_content == "\n".join(["x" * 400] * n)
    assert [m.tool_call_id for m in converted[2:]] == [f"t{i}" for i in range(n)]


def test_errors_have_anthropics_form(
    client: anthropic.Anthropic, busy: Served, engines: Callable[..., Engine]
) -> None:
    import anthropic

    old = client.with_options(default_headers={"anthropic-version": "2023-06-01"})
    assert old.messages.create(**given()).content
    with pytest.raises(anthropic.NotFoundError, match="not served here") as found:
        client.messages.create(**{**given(), "model": "claude"})
    assert found.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert found.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="only 2023-06-01 or"):
        client.messages.create(**given(), extra_headers={"anthropic-version": "2023-01-01"})
    assert busy.http.get("/v1/messages").json()["type"] == "error"

    served = Served(
        engines(None, parallel=2),
        Settings("tiny", queue=0, ping=0.001),
        keys=["secret"],
        body_limit=100_000,
    )
    try:
        with (
            connect(served, "wrong") as other,
            pytest.raises(anthropic.AuthenticationError) as wrong,
        ):
            other.messages.create(**given())
        assert wrong.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        with connect(served, "secret") as other:
            with pytest.raises(anthropic.RequestTooLargeError):
                other.messages.create(**given(system="x" * 100_001))
            body = given(extra_body={"ignore_eos": True})
            raw = other.messages.with_streaming_response.create
            with raw(**body, stream=True) as response:
                lines = list(response.iter_lines())
            assert "event: ping" in lines and 'data: {"type":"ping"}' in lines
            with other.messages.stream(**body) as stream:  # the client ignores this event
                assert stream.get_final_message().usage.output_tokens == 16
    finally:
        served.stop()


def test_an_error_in_a_stream_is_an_event(engines: Callable[..., Engine]) -> None:
    import anthropic

    served = Served(engines(None, parallel=2), Settings("tiny", time_limit=0.2))
    try:
        body = given(max_tokens=4000, extra_body={"ignore_eos": True, "draft_max": 0})
        wrong = pytest.raises(anthropic.APIStatusError, match=r"more than 0\.2 seconds")
        with connect(served) as other, other.messages.create(**body, stream=True) as stream, wrong:
            list(stream)
    finally:
        served.stop()
