"""OpenAI's Responses API, tested with OpenAI's client, which validates every answer."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from g4spec.runtime.engine import Engine
from g4spec.server.generation import Delta
from g4spec.server.output_parser import ArgumentEvent, CallEvent, Event, ThoughtEvent
from g4spec.server.output_parser import TextEvent as Words
from g4spec.server.request_errors import RequestError
from g4spec.server.response_fields import ResponsesRequest
from g4spec.server.response_items import chat_request, items
from g4spec.server.response_store import Record, ResponseStore
from g4spec.server.responses import Writer
from g4spec.server.settings import Settings
from tests.server.running_server import Served, wait
from tests.server.test_openai import SCHEMAS, WEATHER
from tests.support.processor_time import processor_time_below
from tests.support.selection import sample

if TYPE_CHECKING:
    import openai

TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True},
    {
        "type": "function",
        "name": "clock",
        "description": "Time",
        "parameters": SCHEMAS["clock"],
        "strict": None,
    },
]
HELLO = "What is 2 + 3?"
CALLED: Any = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": HELLO}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "encrypted_content": "x",
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    },
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "parsed": None}],
    },
    {
        "type": "function_call",
        "call_id": "c1",
        "name": "weather",
        "arguments": '{"days":2}',
        "parsed_arguments": {"days": 2},
    },
    {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": ""},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "noon"}],
    },
    {"role": "user", "content": "Well?"},
]


def connect(served: Served, **more: Any) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, **more)


@pytest.fixture(scope="module")
def client(busy: Served) -> Iterator[openai.OpenAI]:
    with connect(busy, _strict_response_validation=True) as client:
        yield client


@pytest.fixture(scope="module")
def undrafted_client(plain: Served) -> Iterator[openai.OpenAI]:
    with connect(plain) as client:
        yield client


def given(**more: Any) -> Any:
    extra = {"draft_max": 3, "seed": 5, **more.pop("extra_body", {})}
    return {"model": "tiny", "input": HELLO, "max_output_tokens": 16, **more, "extra_body": extra}


def flat(response: Any) -> Any:
    """Return a response without the ids and times that differ between answers."""
    out = response.model_dump(exclude={"id", "created_at", "completed_at", "usage", "timings"})
    for item in out["output"]:
        for name in ("id", "call_id", "parsed", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return out


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "instructions": "Be brief."},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "named": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 40,
    },
    "cut": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 8,
    },
    "results": {"tools": TOOLS, "input": CALLED, "tool_choice": "none"},
    "schema": {
        "max_output_tokens": 60,
        "text": {
            "verbosity": "medium",
            "format": {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True},
        },
    },
    "thinking": {
        "reasoning": {"effort": "low", "summary": "auto"},
        "service_tier": "auto",
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
        "prompt_cache_key": "x",
        "user": "u",
        "extra_body": {"client_metadata": {"session": "x"}},
    },
}


@pytest.mark.parametrize("name", sample(VARIANTS, 4))
def test_responses_whole_streamed_and_undrafted(
    client: openai.OpenAI, undrafted_client: openai.OpenAI, name: str
) -> None:
    body = given(**VARIANTS[name])
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}" and flat(last.response) == flat(whole)
    assert assemble(events) == last.response.output
    usage, again = whole.usage, last.response.usage
    assert usage and usage.output_tokens == again.output_tokens > 0
    assert usage.total_tokens == again.total_tokens == usage.input_tokens + usage.output_tokens
    assert flat(undrafted_client.responses.create(**body)) == flat(whole)
    check(name, whole)


def assemble(events: list[Any]) -> list[Any]:
    """Return the items of a stream; check that the deltas add up to the final items."""
    grown: dict[tuple[int, str], str] = {}
    logprobs: list[Any] = []
    ended = []
    for event in events:
        kind = event.type.removeprefix("response.")
        if kind.endswith(".delta"):
            key = (event.output_index, kind[:-6])
            grown[key] = grown.get(key, "") + event.delta
            logprobs += getattr(event, "logprobs", [])
        elif (event_text := getattr(event, "text", getattr(event, "arguments", None))) is not None:
            assert grown[event.output_index, kind.removesuffix(".done")] == event_text
        elif kind == "output_item.done":
            assert event.output_index == len(ended)
            ended.append(event.item)
            if event.item.type == "message":
                item_logprobs = event.item.content[0].logprobs
                assert [t.token for t in item_logprobs] == [t.token for t in logprobs]
    return ended


def check(name: str, response: Any) -> None:
    """Check that the answer has the requested content."""
    calls = [item for item in response.output if item.type == "function_call"]
    if name == "named":
        assert len(calls) == len(response.output) == 1 and calls[0].status == "completed"
        jsonschema.validate(json.loads(calls[0].arguments), SCHEMAS[calls[0].name])
    if name == "cut":
        assert response.status == "incomplete" and calls[0].status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
    if name == "schema":
        jsonschema.validate(json.loads(response.output_text), WEATHER)
        assert response.status == "completed"
    if name == "logprobs":
        logprobs = response.output[0].content[0].logprobs
        assert "".join(t.token for t in logprobs) == response.output_text
        assert all(len(t.top_logprobs) == 2 for t in logprobs)
    if name == "results":
        assert not calls


def test_items_follow_the_model(busy: Served) -> None:
    pieces: list[Event] = [
        ThoughtEvent("Hm"),
        ThoughtEvent("."),
        Words("a"),
        CallEvent(0, "f"),
        ArgumentEvent(0, "{"),
        ArgumentEvent(0, "}"),
        CallEvent(1, "g"),
        ArgumentEvent(1, '{"a'),
    ]
    request = ResponsesRequest.model_validate({"input": "x"})
    writer = Writer(busy.service, ResponseStore(), request, None)
    events = [*writer._pieces(Delta(pieces, finish="length"))]
    kinds = [(e["output_index"], e["type"].removeprefix("response.")) for e in events]
    added, done = "output_item.added", "output_item.done"
    part, parted = "content_part.added", "content_part.done"
    arguments = "function_call_arguments"
    assert kinds == [
        (0, added),
        (0, part),
        (0, "reasoning_text.delta"),
        (0, "reasoning_text.delta"),
        (0, "reasoning_text.done"),
        (0, parted),
        (0, done),
        (1, added),
        (1, part),
        (1, "output_text.delta"),
        (1, "output_text.done"),
        (1, parted),
        (1, done),
        (2, added),
        (2, f"{arguments}.delta"),
        (2, f"{arguments}.delta"),
        (2, f"{arguments}.done"),
        (2, done),
        (3, added),
        (3, f"{arguments}.delta"),
        (3, f"{arguments}.done"),
        (3, done),
    ]
    output = writer.response["output"]
    assert [i["status"] for i in output] == ["completed"] * 3 + ["incomplete"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert [i["arguments"] for i in output[2:]] == ["{}", '{"a']
    assert [i["id"].split("_")[0] for i in output] == ["rs", "msg", "fc", "fc"]
    assert len({i["id"] for i in output}) == 4


def test_the_conversation_as_the_model_reads_it(client: openai.OpenAI, busy: Served) -> None:
    request = ResponsesRequest.model_validate({"input": CALLED})
    chat = chat_request(request, items(request))
    turns = [m.model_dump(exclude_none=True) for m in chat.messages]
    assert [t["role"] for t in turns] == ["developer", "user", "assistant", "tool", "tool", "user"]
    assert turns[2]["reasoning_content"] == "Hm." and len(turns[2]["tool_calls"]) == 2
    prompt = busy.post("/apply-template", messages=turns)["prompt"]
    assert prompt == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nWhat is 2 + 3?<turn|>\n<|turn>model\n"
        "I look.<|tool_call>call:weather{days:2}<tool_call|><|tool_call>call:clock{}<tool_call|>"
        '<|tool_response>response:weather{value:<|"|>sunny<|"|>}<tool_response|>'
        '<|tool_response>response:clock{value:<|"|>noon<|"|>}<tool_response|>'
        "<|turn>user\nWell?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    )
    counted = client.responses.input_tokens.count(model="tiny", input=CALLED).input_tokens
    assert counted == len(busy.service.tokenizer.encode(prompt))


def test_the_time_for_reasoning_is_linear_in_its_items() -> None:
    n = 30_000  # while a request is converted, the server does nothing else
    thought = {"type": "reasoning", "content": "x" * 400}
    turns = [thought] * n + [{"role": "assistant", "content": "Hi"}]
    request = ResponsesRequest.model_validate({"input": turns})
    with processor_time_below(10):
        converted = chat_request(request, items(request)).messages
    assert converted[0].reasoning_content == "\n".join(["x" * 400] * n)


def test_a_stored_response_can_be_continued(client: openai.OpenAI) -> None:
    import openai

    first = client.responses.create(**given(instructions="Be kind.", metadata={"a": "b"}))
    assert flat(client.responses.retrieve(first.id)) == flat(first)
    whole: Any = [
        {"role": "user", "content": HELLO},
        *first.output,
        {"role": "user", "content": "And now?"},
    ]
    by_hand = client.responses.create(**given(input=whole, store=False))
    second = client.responses.create(**given(input="And now?", previous_response_id=first.id))
    assert second.output_text == by_hand.output_text
    assert second.usage and by_hand.usage
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    count = client.responses.input_tokens.count
    assert count(input="And now?", previous_response_id=first.id).input_tokens == (
        second.usage.input_tokens
    )

    listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in listed] == ["message"] * 3  # two pages of them
    page = client.responses.input_items.list(second.id, limit=1)
    assert page.data[0].content[0].text == "And now?" and page.has_more  # type: ignore[union-attr,index]
    refer: Any = [{"type": "item_reference", "id": item.id} for item in listed]
    referred = client.responses.create(**given(input=refer))
    assert referred.output_text == second.output_text

    client.responses.delete(first.id)
    for do in (
        client.responses.retrieve,
        client.responses.delete,
        client.responses.input_items.list,
        client.responses.cancel,
    ):
        for name in (first.id, by_hand.id, "x"):  # deleted, never stored, unknown
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                do(name)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.create(**given(previous_response_id=first.id))
    assert client.responses.retrieve(second.id).id == second.id
    for name in ("tiny", "small"):
        kept = client.responses.retrieve(second.id, extra_query={"model": name})
        assert kept.id == second.id
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.responses.retrieve(second.id, extra_query={"model": "other"})


def test_in_the_background(client: openai.OpenAI, busy: Served) -> None:
    import openai

    body = given(temperature=0, background=True)
    begun = client.responses.create(**body)
    assert begun.status == "in_progress" and not begun.output
    end = time.monotonic() + 30
    while (now := client.responses.retrieve(begun.id)).status == "in_progress":
        assert time.monotonic() < end
        time.sleep(0.02)
    whole = client.responses.create(**given(temperature=0))
    assert now.output_text == whole.output_text and now.background
    assert client.responses.cancel(begun.id).status == now.status  # too late

    long = given(background=True, max_output_tokens=1500, extra_body={"ignore_eos": True})
    begun = client.responses.create(**long)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.responses.create(**given(previous_response_id=begun.id))
    assert client.responses.cancel(begun.id).status == "cancelled"
    metrics = busy.service.metrics
    errors = metrics.value(metrics.errors, "503")
    deleted = client.responses.create(**long)
    client.responses.delete(deleted.id)
    while not busy.idle():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert metrics.value(metrics.errors, "503") == errors, "no request failed"
    with pytest.raises(openai.BadRequestError, match="only a response with background"):
        client.responses.cancel(whole.id)


def test_a_dropped_stream_is_resumed(client: openai.OpenAI, busy: Served) -> None:
    """A returning client gets the events after its last one, and then the new ones."""
    body = given(temperature=0, background=True, stream=True)
    stream = client.responses.create(**body)
    first = next(iter(stream))
    seen = [first, next(iter(stream))]
    stream.close()
    name = first.response.id
    with client.responses.retrieve(name, stream=True, starting_after=1) as rest:
        seen += list(rest)
    assert [e.sequence_number for e in seen] == list(range(len(seen)))
    assert seen[-1].type in ("response.completed", "response.incomplete")
    again = list(client.responses.retrieve(name, stream=True))
    assert [e.model_dump() for e in again] == [e.model_dump() for e in seen]
    assert list(client.responses.retrieve(name, stream=True, starting_after=len(seen))) == []
    whole = client.responses.create(**given(temperature=0))
    text = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
    assert text == whole.output_text == client.responses.retrieve(name).output_text

    long = given(
        background=True, stream=True, max_output_tokens=1500, extra_body={"ignore_eos": True}
    )
    stream = client.responses.create(**long)
    first = next(iter(stream))
    client.responses.cancel(first.response.id)
    kinds = [event.type for event in stream]
    assert kinds[0] == "response.in_progress" and "response.completed" not in kinds
    assert busy.idle()


def test_stored_responses_are_bounded_and_private() -> None:
    def record(i: int, owner: str | None = None, text: str = "") -> Record:
        item = {"id": f"m{i}", "type": "message", "text": text}
        return Record(owner, {"id": f"r{i}", "output": [], "background": False}, [item])

    store = ResponseStore(most=3, most_bytes=2000)
    for i in range(4):
        store.put(record(i))
    with pytest.raises(RequestError):
        store.get("r0", None)
    store.get("r1", None)  # used last
    store.put(record(4))
    assert store.get("r1", None)
    with pytest.raises(RequestError):
        store.get("r2", None)
    store.put(record(5, text="x" * 1880))  # takes nearly all memory
    with pytest.raises(RequestError):
        store.get("r1", None)
    store.put(record(5))
    store.put(record(6, "a"))
    assert store.get("r6", "a")
    for owner in ("b", None):
        with pytest.raises(RequestError):
            store.get("r6", owner)
    refer = [{"type": "item_reference", "id": "m6"}]
    assert store.find(refer, "a")[0]["id"] == "m6"
    with pytest.raises(RequestError):
        store.find(refer, "b")
    with pytest.raises(RequestError, match="refer to each item once"):  # the text could be long
        store.find([*refer, *refer], "a")


def test_all_references_are_found_in_one_pass() -> None:
    n = 10_000  # while they are found, the server does nothing else
    listed = [{"id": f"m{i}", "type": "message"} for i in range(n)]
    store = ResponseStore()
    store.put(Record(None, {"id": "r", "output": [], "background": False}, listed))
    refer = [{"type": "item_reference", "id": f"m{i}"} for i in range(n)]
    with processor_time_below(1):
        assert store.find(refer, None) == listed


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"fo": 1}, "unknown field fo"),
    "unknown inside": (
        {"input": [{"role": "user", "content": "x", "fo": 1}]},
        r"unknown field input\[0\].fo",
    ),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        r"input\[0\].content\[0\].type: 'input_image' is not supported",
    ),
    "item": ({"input": [{"type": "computer_call"}]}, r"input\[0\].type: 'computer_call'"),
    "nothing": ({"input": []}, "there is no content"),
    "stray": (
        {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
        "no function_call before it with the call_id 'x'",
    ),
    "arguments": (
        {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "[1]"}]},
        r"input\[0\].arguments: expected a JSON",
    ),
    "reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "no item 'x'"),
    "tool": ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type: 'web_search'"),
    "choice": ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    "no tool": ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "no tool 'x'"),
    "format": ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    "truncation": ({"truncation": "auto"}, "truncation: .*'disabled'"),
    "include": ({"include": ["file_search_call.results"]}, r"include\[0\]"),
    "conversation": ({"conversation": "x"}, "conversation"),
    "background": ({"background": True, "store": False}, "background: only with store"),
    "summary": ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
    "max": ({"max_output_tokens": 0}, "max_output_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_requests_get_one_sentence(busy: Served, name: str) -> None:
    more, message = REFUSED[name]
    error = busy.refused("/v1/responses", {"model": "tiny", "input": "x", **more})
    assert re.search(message, error["message"]) and error["type"] == "invalid_request_error", error
    assert busy.idle()


def test_unsupported_storage_options_are_refused(client: openai.OpenAI, busy: Served) -> None:
    name = client.responses.create(**given()).id
    for path in (
        f"{name}?stream=true",
        f"{name}/input_items?limit=0",
        f"{name}/input_items?limit=0050123",
        f"{name}/input_items?limit=0001{'0' * 5000}",
        f"{name}/input_items?fo=1",
        f"{name}/input_items?order=x",
        f"{name}/input_items?after=x",
    ):
        assert busy.http.get(f"/v1/responses/{path}").status_code == 400


def test_an_error_in_a_stream_is_an_event(engines: Callable[..., Engine]) -> None:
    served = Served(engines(None, parallel=2), Settings("tiny", time_limit=0.2))
    try:
        body = given(max_output_tokens=4000, extra_body={"ignore_eos": True, "draft_max": 0})
        with connect(served) as client:
            last: Any = list(client.responses.create(**body, stream=True))[-1]
            slow = client.responses.create(**body, background=True)
            wait(lambda: client.responses.retrieve(slow.id).status == "failed")
        assert last.type == "response.failed" and last.response.status == "failed"
        assert "more than 0.2 seconds" in last.response.error.message
        metrics = served.service.metrics
        assert metrics.value(metrics.errors, "408") == 2
    finally:
        served.stop()
