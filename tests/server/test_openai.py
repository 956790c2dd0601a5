"""OpenAI's endpoints, tested with OpenAI's client, which validates every answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from tests.server.mixed_requests import TOOLS, WEATHER
from tests.server.running_server import Served
from tests.support.selection import sample

if TYPE_CHECKING:
    import openai

CLOCK = {"type": "object", "properties": {}}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
HELLO: Any = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def client(busy: Served) -> openai.OpenAI:
    import openai

    return openai.OpenAI(
        base_url=f"{busy.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )


def ask(client: openai.OpenAI, **more: Any) -> Any:
    extra = {"draft_max": 3, **more.pop("extra_body", {})}
    given = {"model": "tiny", "messages": HELLO, "max_tokens": 16, "seed": 5, **more}
    return client.chat.completions.create(**given, extra_body=extra)


def assemble(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Return the messages of a stream, by the index of their choice."""
    out: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            empty = {"content": "", "calls": [], "tokens": [], "thought": "", "finish": None}
            m = out.setdefault(choice.index, empty)
            delta = choice.delta
            m["content"] += delta.content or ""
            m["thought"] += getattr(delta, "reasoning_content", None) or ""
            m["finish"] = choice.finish_reason or m["finish"]
            if choice.logprobs:
                m["tokens"] += choice.logprobs.content
            for call in delta.tool_calls or []:
                if call.id:
                    assert call.index == len(m["calls"]) and call.type == "function"
                    m["calls"].append([call.function.name, ""])
                m["calls"][call.index][1] += call.function.arguments
    return out


def flat(choice: Any) -> dict[str, Any]:
    """Return a message that was not streamed, in the same form."""
    message = choice.message
    calls = [[c.function.name, c.function.arguments] for c in message.tool_calls or []]
    return {
        "content": message.content or "",
        "calls": calls,
        "finish": choice.finish_reason,
        "thought": getattr(message, "reasoning_content", None) or "",
        "tokens": choice.logprobs.content if choice.logprobs else [],
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "extra_body": {"top_k": 40, "min_p": 0.01}},
    "several": {"n": 3, "temperature": 1.5},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "temperature": 0.7},
    "stop": {"temperature": 0, "stop": [" +", "zzz"]},
    "penalties": {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"300": -50},
        "extra_body": {"repetition_penalty": 1.2},
    },
    "json": {"response_format": {"type": "json_object"}},
    "schema": {
        "max_tokens": 60,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "w", "schema": WEATHER, "strict": True},
        },
    },
    "grammar": {"extra_body": {"grammar": 'root ::= "yes" | "no"\n'}},
    "lark": {"extra_body": {"grammar": '%llguidance {}\nstart: "yes" | "no"'}},
    "required": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60},
    "named": {
        "tools": TOOLS,
        "max_tokens": 60,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
    "auto": {"tools": TOOLS, "temperature": 1.2},
    "none": {"tools": TOOLS, "tool_choice": "none"},
    "thinking": {"reasoning_effort": "low", "extra_body": {"thinking_budget_tokens": 8}},
    "thinking json": {"reasoning_effort": "high", "response_format": {"type": "json_object"}},
    "hints": {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "max_completion_tokens": 9,
        "parallel_tool_calls": True,
        "top_p": 0,
    },
}


@pytest.mark.parametrize("name", sample(VARIANTS, 5))
def test_chat_whole_streamed_and_undrafted(client: openai.OpenAI, plain: Served, name: str) -> None:
    import openai

    more = VARIANTS[name]
    whole = ask(client, **more)
    stream = list(ask(client, **more, stream=True, stream_options={"include_usage": True}))
    pieces = assemble(stream)
    messages = {c.index: flat(c) for c in whole.choices}
    assert pieces == messages and len(messages) == more.get("n", 1)
    assert stream[-1].choices == []
    same = {"prompt_tokens_details"}  # the second request hits the prefix cache
    assert stream[-1].usage.model_dump(exclude=same) == whole.usage.model_dump(exclude=same)
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    alone = openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none")
    undrafted = ask(alone, **more)
    assert {c.index: flat(c) for c in undrafted.choices} == messages
    assert undrafted.usage.completion_tokens == usage.completion_tokens
    check(name, messages)


def check(name: str, messages: dict[int, dict[str, Any]]) -> None:
    """Check that the answer has the requested content."""
    m = messages[0]
    if name == "several":
        assert len({m["content"] for m in messages.values()}) == 3
    if name == "logprobs":
        assert "".join(t.token for t in m["tokens"]) == m["content"]
        assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in m["tokens"])
    if name == "stop":
        assert m["finish"] == "stop" and " +" not in m["content"] and m["content"]
    if name in ("grammar", "lark"):
        assert m["content"] in ("yes", "no") and m["finish"] == "stop"
    if name == "schema":
        assert m["finish"] == "stop"
        jsonschema.validate(json.loads(m["content"]), WEATHER)
    if name in ("required", "named"):
        assert m["calls"] and not m["content"]
        for function, arguments in m["calls"][: -1 if m["finish"] == "length" else None]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[function])
    if name == "named":
        assert [c[0] for c in m["calls"]] == ["weather"] and m["finish"] == "tool_calls"
    if name == "none":
        assert not m["calls"]


def test_drafts_are_counted(client: openai.OpenAI) -> None:
    timings = ask(client, temperature=0, max_tokens=24).timings
    assert timings["draft_n"] >= timings["draft_n_accepted"] > 0
    assert sum(timings["draft_n_accepted_per_pos"]) == timings["draft_n_accepted"]
    assert ask(client, extra_body={"draft_max": 0}).timings["draft_n"] == 0
    assert "timings" not in ask(client, n=2).model_extra


def speculation(header: str) -> dict[str, list[float]]:
    """Parse an x-speculation header: numbers, and lists of numbers in parentheses."""
    pairs = [each.split("=") for each in header.split(", ")]
    return {name: [float(x) for x in value.strip("()").split()] for name, value in pairs}


CHAT: Any = {"messages": [{"role": "user", "content": "Write a function."}], "max_tokens": 20}
SPECULATION: Any = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "def main():", "max_tokens": 20},
    "/completion": {"prompt": "def main():", "n_predict": 20},
    "/v1/responses": {"input": "Write a function.", "max_output_tokens": 20},
    "/v1/messages": {"model": "tiny", **CHAT},
}


@pytest.mark.parametrize("path", SPECULATION)
def test_each_api_tells_what_was_drafted(busy: Served, path: str) -> None:
    body = {**SPECULATION[path], "temperature": 0, "draft_max": 3, "ignore_eos": True}
    response = busy.http.post(path, json=body)
    timings = response.json()["timings"]
    drafted, accepted = timings["draft_n_per_pos"], timings["draft_n_accepted_per_pos"]
    assert 1 <= len(drafted) == len(accepted) <= 3
    assert sum(drafted) == timings["draft_n"] > 0 and sum(accepted) == timings["draft_n_accepted"]
    assert 0 < timings["draft_ms"] < timings["predicted_ms"]
    header = speculation(response.headers["x-speculation"])
    assert header.pop("draft_ms") == [pytest.approx(timings["draft_ms"], abs=1e-3)]
    assert header.pop("predicted_ms") == [pytest.approx(timings["predicted_ms"], abs=1e-3)]
    assert header == {
        "drafted": [sum(drafted)],
        "accepted": [sum(accepted)],
        "drafted_per_pos": drafted,
        "accepted_per_pos": accepted,
    }
    last = [each for each in busy.stream(path, **body) if "timings" in each][-1]["timings"]
    assert last["draft_n_per_pos"] == drafted and last["draft_n_accepted_per_pos"] == accepted
    plain = speculation(
        busy.http.post(path, json={**body, "draft_max": 0}).headers["x-speculation"]
    )
    assert plain["drafted"] == [0] and plain["drafted_per_pos"] == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_several_texts_tell_what_was_drafted(busy: Served, path: str) -> None:
    body = {**SPECULATION[path], "temperature": 0, "draft_max": 3, "n": 2}
    header = speculation(busy.http.post(path, json=body).headers["x-speculation"])
    events = busy.stream(path, **body)
    ends = [e for e in events if e["choices"] and e["choices"][0]["finish_reason"]]
    drafted = [e["timings"]["draft_n_per_pos"] for e in ends]
    assert len(drafted) == 2
    assert header["drafted_per_pos"] == [sum(each) for each in zip(*drafted, strict=True)]


def test_only_a_seed_repeats_a_text(client: openai.OpenAI) -> None:
    def text(**more: Any) -> str:
        answer = ask(client, temperature=2.0, max_tokens=8, **more)
        return str(answer.choices[0].message.content)

    assert text(seed=3) == text(seed=3) != text(seed=-4)
    assert len({text(seed=None) for _ in range(3)}) > 1
    # Choice i uses seed + i.
    several = ask(client, temperature=2.0, max_tokens=8, seed=3, n=2)
    assert [c.message.content for c in several.choices] == [text(seed=3), text(seed=4)]


def test_a_conversation_continues_after_tool_results(client: openai.OpenAI, busy: Served) -> None:
    given = {"unit": "C", "days": 2}
    call = {
        "id": "c1",
        "type": "function",
        # The helpers of OpenAI's SDKs add parsed_arguments, and parsed to the message.
        "function": {"name": "weather", "arguments": json.dumps(given), "parsed_arguments": given},
    }
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": t} for t in ("Be", "brief")]},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "parsed": None},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert ask(client, messages=messages, tools=TOOLS).choices[0].finish_reason
    prompt = busy.post("/apply-template", messages=messages, tools=TOOLS)["prompt"]
    assert "<|turn>system\nBe\nbrief<|tool>declaration:weather{" in prompt
    assert prompt.endswith(
        '<|tool_call>call:weather{days:2,unit:<|"|>C<|"|>}<tool_call|>'
        '<|tool_response>response:weather{value:<|"|>sunny<|"|>}'
        "<tool_response|>"
    )


def test_parallel_calls_can_be_switched_off(client: openai.OpenAI) -> None:
    many = ask(
        client,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=90,
        temperature=3.0,
        extra_body={"top_k": 8},
    )
    one = ask(
        client,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=90,
        temperature=3.0,
        parallel_tool_calls=False,
        extra_body={"top_k": 8},
    )
    assert len(one.choices[0].message.tool_calls) == 1 <= len(many.choices[0].message.tool_calls)
    assert one.choices[0].finish_reason == "tool_calls"


NAMES = ("tokens", "token_logprobs", "top_logprobs")

COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"temperature": 0},
    "several": {"n": 2, "best_of": 2},
    "logprobs": {"logprobs": 2, "temperature": 0.5},
    "echo": {"echo": True, "stop": "\n\n"},
    "ids": {"prompt": [2, 300, 301], "echo": True},
    "list": {"prompt": ["def main():"], "suffix": ""},
    "ids in a list": {"prompt": [[2, 300, 301]]},
    "grammar": {"extra_body": {"grammar": 'root ::= "yes" | "no"\n'}},
}


def test_completions_of_no_tokens(busy: Served) -> None:
    """Return the prompt with `echo`, as OpenAI's API and vLLM do."""
    for echo, text in ((False, ""), (True, "The cat")):
        body = {"prompt": "The cat", "max_tokens": 0, "echo": echo}
        answer = busy.post("/v1/completions", **body)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert answer["usage"]["completion_tokens"] == 0
        events = busy.stream("/v1/completions", **body)
        assert "".join(event["choices"][0]["text"] for event in events) == text


@pytest.mark.parametrize("name", sample(COMPLETIONS, 4))
def test_completions_whole_streamed_and_undrafted(
    client: openai.OpenAI, plain: Served, name: str
) -> None:
    import openai

    more = dict(COMPLETIONS[name])
    extra = {"draft_max": 3, **more.pop("extra_body", {})}
    given: Any = {"model": "small", "prompt": "def main():\n", "max_tokens": 12, "seed": 1, **more}
    whole = client.completions.create(**given, extra_body=extra)
    # The client's chunk type does not allow null as finish_reason, but OpenAI sends it.
    loose = client.with_options()
    loose._strict_response_validation = False
    stream = list(
        loose.completions.create(
            **given, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [c.text for c in whole.choices]
    for choice in whole.choices:
        parts = [c for chunk in stream for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        if choice.logprobs:
            logprobs = [c.logprobs for c in parts if c.logprobs]
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                merge_events = [x for t in logprobs for x in getattr(t, key)]
                assert merge_events == getattr(choice.logprobs, key)
            assert "".join(choice.logprobs.tokens) == choice.text
    assert stream[-1].usage and whole.usage
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    alone = openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none")
    assert [c.text for c in alone.completions.create(**given, extra_body=extra).choices] == texts
    if more.get("echo"):
        assert texts[0].startswith("def main()" if name == "echo" else "")
    if name == "grammar":
        assert texts[0] in ("yes", "no")


def test_echoed_prompts_have_log_probabilities(busy: Served, plain: Served) -> None:
    """Send token ids and ask for no new tokens, as evaluation programs do."""
    begin = plain.post("/tokenize", content="def main():", add_special=True)["tokens"]
    n, n_all = len(begin), len(begin) + 6
    asked: dict[str, Any] = {"prompt": begin, "n_predict": 6, "temperature": 0, "n_probs": 2}
    told = plain.post("/completion", **asked, return_tokens=True, ignore_eos=True)
    body: dict[str, Any] = {"prompt": begin + told["tokens"], "temperature": 0, "seed": 1}
    body |= {"echo": True, "logprobs": 1}
    whole = busy.post("/v1/completions", **body, max_tokens=0)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length" and choice["text"].endswith(told["content"])
    assert whole["usage"]["completion_tokens"] == 0 and whole["usage"]["total_tokens"] == n_all
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    values = [p["logprob"] for p in told["completion_probabilities"]]
    assert found["token_logprobs"][n:] == pytest.approx(values, abs=1e-4)
    for name, value, top in list(zip(*map(found.get, NAMES), strict=True))[1:]:
        assert top[name] == value and len(top) == 1 + (max(top.values()) > value)
    ends = [*found["text_offset"][1:], len(choice["text"])]
    parts = [choice["text"][a:b] for a, b in zip(found["text_offset"], ends, strict=True)]
    assert parts[0] == "" and parts[1:] == found["tokens"][1:]

    pieces = busy.stream("/v1/completions", **body, max_tokens=3, stream_options={})
    more = busy.post("/v1/completions", **body, max_tokens=3)["choices"][0]
    streamed = [c["choices"][0] for c in pieces]
    assert "".join(c["text"] for c in streamed) == more["text"]
    for name, entries in more["logprobs"].items():
        assert entries == [x for c in streamed if c["logprobs"] for x in c["logprobs"][name]]
        assert entries[:n_all] == found[name] and len(entries) == n_all + 3


@pytest.mark.parametrize("begin", ["", "<bos>"])
def test_control_tokens_of_an_echoed_text_have_their_length(busy: Served, begin: str) -> None:
    """Clients take the answer from the first offset after the prompt."""
    prompt = f"{begin}<|turn>user\nThe cat<turn|>\n"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3, "ignore_eos": True}
    answer = busy.post("/v1/completions", **body)
    starts = answer["choices"][0]["logprobs"]["text_offset"]
    assert starts[:2] == [0, len(begin)]
    assert starts[answer["usage"]["prompt_tokens"]] == len(prompt)
    streamed = [c["choices"][0]["logprobs"] for c in busy.stream("/v1/completions", **body)]
    assert [at for part in streamed if part for at in part["text_offset"]] == starts


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})],
)
def test_each_chunk_has_the_usage_so_far(busy: Served, path: str, body: dict[str, Any]) -> None:
    """Ask as programs that measure load do (a field of vLLM)."""
    body = {**body, "max_tokens": 5, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = busy.stream(path, **body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 5
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    total = chunks[0]["usage"]["prompt_tokens"] + counts[0]
    assert chunks[0]["usage"]["total_tokens"] == total and not chunks[-1]["choices"]


def test_models(client: openai.OpenAI) -> None:
    import openai

    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("small").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="not served here, only tiny, small"):
        client.models.retrieve("gpt-4")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"fo": 1}, "unknown field fo; remove it"),
    "unknown in a part": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
                        {"type": "text", "text": "x", "fo": 1},
                    ],
                }
            ]
        },
        r"unknown field messages\[0\].content\[1\].fo; remove it",
    ),
    "misspelled": ({"temprature": 1}, r"unknown field temprature; did you mean temperature\?"),
    "unknown inside": (
        {"messages": [{"role": "user", "content": "x", "fo": 1}]},
        r"unknown field messages\[0\].fo",
    ),
    "type": ({"temperature": "1"}, "temperature: .*number"),
    "range": ({"top_p": 2}, "top_p: .*less than or equal to 1"),
    "no messages": ({"messages": []}, "messages: .*at least 1"),
    "role": ({"messages": [{"role": "x", "content": "x"}]}, r"messages\[0\].role"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "image_url is not supported",
    ),
    "bias": (
        {"logit_bias": {"99999": 1}},
        "logit_bias: expected token ids from 0 to 4095, found '99999'",
    ),
    "bias of many digits": ({"logit_bias": {"1" * 5000: 1}}, "logit_bias: expected token ids"),
    "top": ({"top_logprobs": 2}, "top_logprobs: set"),
    "many": ({"n": 999}, "n: at most 128 texts"),
    "stops": ({"stop": ["a"] * 17}, "stop: expected at most 16 texts"),
    "choice": ({"tool_choice": "required"}, "there are no tools"),
    "tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "there is no tool 'x'",
    ),
    "twice": ({"tools": [TOOLS[0], TOOLS[0]]}, "two functions have the same name"),
    "schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "strict": True,
                    "schema": {"type": "array", "uniqueItems": True},
                },
            }
        },
        "cannot be used: found.*uniqueItems",
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "json_schema: missing"),
    "strict": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "strict": True,
                        "parameters": {"type": "object", "not": {}},
                    },
                }
            ]
        },
        "not cannot be enforced",
    ),
    "grammar": ({"grammar": "root ::= x\n"}, "not valid GBNF"),
    "pattern": (
        {"json_schema": {"type": "string", "pattern": "["}},
        "regex parse error: unclosed character class$",
    ),
    "both": (
        {"grammar": 'root ::= "x"\n', "response_format": {"type": "json_object"}},
        "exclude each other",
    ),
    "eos": ({"grammar": 'root ::= "x"\n', "ignore_eos": True}, "cannot be combined with a grammar"),
    **{
        f"begun-{name}": (
            {
                "messages": [*HELLO, {"role": "assistant", "content": '{"a":'}],
                "continue_final_message": True,
                name: value,
            },
            "cannot follow a schema or grammar",
        )
        for name, value in (
            ("response_format", {"type": "json_object"}),
            ("json_schema", {"type": "object"}),
            ("grammar", 'root ::= "x"\n'),
        )
    },
    "budget": ({"thinking_budget_tokens": 9}, "thinking is off"),
    "continued": ({"continue_final_message": True}, "can be continued only"),
    "thinking": (
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        "contradict each other",
    ),
    "arguments": (
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                },
            ]
        },
        r"tool_calls\[0\].*a JSON object",
    ),
    "long": ({"messages": [{"role": "user", "content": "word " * 4000}]}, "context size of 2048"),
    "without-content": (
        {"messages": [{"role": "user"}]},
        r"messages\[0\].content is missing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_requests_get_one_sentence(busy: Served, name: str) -> None:
    more, message = REFUSED[name]
    import re

    body = {"model": "tiny", "messages": HELLO, "max_tokens": 4, **more}
    for stream in (False, True):
        error = busy.refused("/v1/chat/completions", {**body, "stream": stream})
        kind = "exceed_context_size_error" if name == "long" else "invalid_request_error"
        assert re.search(message, error["message"]) and error["type"] == kind
        assert "\n" not in error["message"]
    assert busy.idle()


def test_another_model_is_not_found(busy: Served) -> None:
    body = {"model": "gpt-4", "messages": HELLO}
    assert busy.refused("/v1/chat/completions", body, 404)["code"] == "model_not_found"


def test_the_query_of_a_get_may_name_the_model(busy: Served) -> None:
    for path in ("/props", "/slots", "/metrics", "/v1/live", "/v1/stream"):
        response = busy.http.get(path, params={"model": "gpt-4", "conv_id": "x"})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found"), path
    for name in ("tiny", "small", ""):
        assert busy.http.get("/props", params={"model": name}).status_code == 200


def test_an_empty_grammar_is_none(busy: Served) -> None:
    """Test what llama.cpp does, too: front ends send it."""
    chat = {"messages": HELLO, "max_tokens": 6, "temperature": 0}
    raw = {"prompt": "x", "max_tokens": 6, "temperature": 0}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", raw),
        ("/completion", raw),
    ):
        plain, empty = busy.post(path, **body), busy.post(path, **body, grammar="")
        assert empty.get("choices", empty.get("content")) == plain.get(
            "choices", plain.get("content")
        )
    form = {"type": "json_object", "schema": {"const": 1}}
    answer = busy.post("/v1/chat/completions", **chat, grammar="", response_format=form)
    assert answer["choices"][0]["message"]["content"] == "1"
    answer = busy.post("/v1/chat/completions", **chat, grammar="", json_schema={"const": 1})
    assert answer["choices"][0]["message"]["content"] == "1"
    answer = busy.post("/v1/completions", **raw, grammar="", ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 6


def test_an_empty_beginning_can_have_a_schema(busy: Served) -> None:
    begun = [*HELLO, {"role": "assistant", "content": ""}]
    body = {"messages": begun, "continue_final_message": True, "max_tokens": 6}
    answer = busy.post("/v1/chat/completions", **body, json_schema={"const": 1})
    assert answer["choices"][0]["message"]["content"] == "1"


def test_empty_stop_strings_are_ignored(busy: Served) -> None:
    """They are in every text, so they would end all of them at once."""
    body = {"prompt": "import os\n", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    (plain,) = busy.post("/v1/completions", **body)["choices"]
    assert plain["finish_reason"] == "length" and len(plain["text"]) > 3
    stop = plain["text"][3]
    for empty in ("", [""], ["", ""]):
        assert busy.post("/v1/completions", **body, stop=empty)["choices"] == [plain]
    (cut,) = busy.post("/v1/completions", **body, stop=["", stop])["choices"]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == plain["text"][: plain["text"].index(stop)]
    native = busy.post("/completion", **body, stop=["", stop])
    assert (native["stopping_word"], native["generation_settings"]["stop"]) == (stop, [stop])
    ask = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "messages": HELLO}
    answer = busy.post("/v1/messages", **ask, stop_sequences=[""])
    assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("path", SPECULATION)
def test_the_seed_minus_one_is_random(busy: Served, path: str) -> None:
    """Test that it is in every API what it is in llama.cpp and vLLM."""
    body = {**SPECULATION[path], "temperature": 2, "seed": -1, "ignore_eos": True}
    body |= {name: 8 for name in body if name.startswith(("max_", "n_predict"))}
    answers = [busy.post(path, **body) for _ in range(3)]
    texts = [
        a.get("choices") or a.get("content") or [item["content"] for item in a["output"]]
        for a in answers
    ]
    assert all(texts[i] != texts[i - 1] for i in range(3))


def test_unsupported_completions_are_refused(busy: Served) -> None:
    for more, message in (
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix: Gemma 4 has no tokens for infilling"),  # was: expected ''
        ({"prompt": ["a"] * 99, "n": 2}, "at most 128 texts"),
        ({"prompt": []}, "empty"),
        ({"prompt": [99999]}, "outside the vocabulary"),
        ({"prompt": [2] * 3000}, "3000 exceeds the available context size of 2048"),
        ({"prompt": "\ud800"}, "JSON"),
    ):
        body = {"prompt": "x", "max_tokens": 1, **more}
        assert message in busy.refused("/v1/completions", body)["message"]


def test_errors_about_draft_lengths_name_both_forms(busy: Served) -> None:
    for value in (99, -1, "long", 2.5):
        error = busy.refused("/v1/completions", {"prompt": "x", "draft_max": value})
        assert error["message"] == f'draft_max: expected "auto" or 0 to 15, found {value!r}'
