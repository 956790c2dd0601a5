"""Random requests of every kind, and their answers in one common form.

`test_load.py` sends some, `benchmarks/serve_exactness.py` and `serve_aborts.py` thousands.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

import httpx

CHAT, RAW, LLAMA = "/v1/chat/completions", "/v1/completions", "/completion"

LONG = "Tell me of numbers. " * 100
"""A prompt longer than one prompt block, so that a second request hits the prefix cache."""

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["days", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "Time",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
QUESTIONS = (
    "What is 2 + 3?",
    "Hi",
    "Write a function that adds.",
    "Count: 1, 2, 3,",
    "Ünïcode 😀?",
)
STARTS = ("import os\n", "def main(", "class A:", "x", "Once upon a time", "1 2 3 4 5 6 7 8")


@dataclass(frozen=True)
class RandomRequest:
    """A request: path, body, and the name of its kind."""

    path: str
    body: dict[str, Any]
    kind: str

    def drafted(self, draft_max: int | str, stream: bool) -> RandomRequest:
        """Return the same request with another draft length, streamed or not."""
        more: dict[str, Any] = {"draft_max": draft_max, "stream": stream}
        if stream and self.path != LLAMA:
            more["stream_options"] = {"include_usage": True}
        return replace(self, body={**self.body, **more})


KINDS = (
    "chat",
    "chat",
    "long",
    "n",
    "logprobs",
    "stop",
    "required",
    "named",
    "auto",
    "schema",
    "json",
    "thinking",
    "penalties",
    "raw",
    "raw logprobs",
    "echo",
    "llama",
    "grammar",
)


def draw(rng: random.Random, longest: int = 16) -> RandomRequest:
    """Return a random request of at most `longest` new tokens; tool calls and JSON may take twice
    that."""
    kind = rng.choice(KINDS)
    body: dict[str, Any] = {"seed": rng.randrange(2**32), "max_tokens": rng.randint(1, longest)}
    body["temperature"] = rng.choice([0, 0.5, 0.9, 1.0, 1.5])
    for key, values in (("top_p", [0.8, 0.95]), ("top_k", [3, 40]), ("min_p", [0.02, 0.1])):
        if rng.random() < 0.2:
            body[key] = rng.choice(values)
    if kind in ("raw", "raw logprobs", "echo"):
        body["prompt"] = rng.choice((*STARTS, LONG))
        more: dict[str, Any] = {
            "raw logprobs": {"logprobs": rng.randint(0, 3)},
            "echo": {"echo": True},
        }.get(kind, {})
        return RandomRequest(RAW, body | more, kind)
    if kind in ("llama", "grammar"):
        body["prompt"] = rng.choice(STARTS)
        body["return_tokens"] = True
        more = {"n_probs": rng.randint(0, 3)}
        if kind == "grammar":
            more = {"grammar": 'root ::= ("a" | "bc" | "é")+ "."\n'}
        return RandomRequest(LLAMA, body | more, kind)
    question = LONG if kind == "long" or rng.random() < 0.15 else rng.choice(QUESTIONS)
    body["messages"] = [{"role": "user", "content": question}]
    if rng.random() < 0.3:
        body["messages"].insert(0, {"role": "system", "content": "Be brief."})
    if kind in ("required", "named", "schema", "json"):
        body["max_tokens"] *= 2
    named = {"type": "function", "function": {"name": "weather"}}
    return RandomRequest(
        CHAT,
        body
        | {
            "n": {"n": rng.randint(2, 4)},
            "logprobs": {"logprobs": True, "top_logprobs": rng.randint(0, 3)},
            "stop": {"stop": rng.sample(["e", " the", "\n", "1", "="], 2)},
            "required": {"tools": TOOLS, "tool_choice": "required"},
            "named": {"tools": TOOLS, "tool_choice": named, "parallel_tool_calls": False},
            "auto": {"tools": TOOLS, "logprobs": True},
            "schema": {"response_format": SCHEMA},
            "json": {"response_format": {"type": "json_object"}, "logprobs": True},
            "thinking": {"reasoning_effort": "low"},
            "penalties": {
                "presence_penalty": 1,
                "frequency_penalty": 0.5,
                "logit_bias": {str(rng.randrange(300, 400)): 3},
            },
        }.get(kind, {}),
        kind,
    )


@dataclass(frozen=True)
class Answer:
    """The content of an answer, without ids and times.

    Attributes:
        texts: for each choice: content, thought, calls as (name, arguments), log-probabilities and
            finish reason.
        usage: token counts.
        cached: prompt tokens of a prefix cache hit.
    """

    texts: list[dict[str, Any]]
    usage: dict[str, Any]
    cached: int

    @property
    def comparable(self) -> Any:
        """Return the parts that must not depend on other requests."""
        return self.texts, self.usage


def _empty() -> dict[str, Any]:
    return {"content": "", "thought": "", "calls": [], "logprobs": [], "finish": None}


def _chat(text: dict[str, Any], message: dict[str, Any]) -> None:
    text["content"] += message.get("content") or ""
    text["thought"] += message.get("reasoning_content") or ""
    for i, call in enumerate(message.get("tool_calls") or []):
        if call.get("id"):
            assert call.get("index", i) == len(text["calls"])
            text["calls"].append([call["function"]["name"], ""])
        text["calls"][call.get("index", i)][1] += call["function"].get("arguments") or ""


def _choice(texts: list[dict[str, Any]], choice: dict[str, Any]) -> None:
    while len(texts) <= choice["index"]:
        texts.append(_empty())
    text = texts[choice["index"]]
    if "text" in choice:
        text["content"] += choice["text"]
    else:
        _chat(text, choice.get("delta") or choice.get("message") or {})
    logprobs = choice.get("logprobs")
    if logprobs and "content" in logprobs:
        text["logprobs"] += logprobs["content"]
    elif logprobs:
        text["logprobs"] += zip(
            logprobs["tokens"],
            logprobs["token_logprobs"],
            logprobs["top_logprobs"],
            logprobs["text_offset"],
            strict=True,
        )
    text["finish"] = choice["finish_reason"] or text["finish"]


def read_answer(events: list[dict[str, Any]]) -> Answer:
    """Combine an answer from one body or from the events of a stream."""
    texts: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    cached = 0
    for event in events:
        assert "error" not in event, event
        if "choices" not in event:  # llama.cpp's
            texts = texts or [_empty()]
            texts[0]["content"] += event["content"]
            texts[0]["logprobs"] += event.get("completion_probabilities", [])
            texts[0].setdefault("ids", []).extend(event["tokens"])
            if event["stop"]:
                texts[0]["finish"] = event["stop_type"], event["stopping_word"]
                usage = {key: event[key] for key in ("tokens_predicted", "tokens_evaluated")}
                cached = event["timings"]["cache_n"]
            continue
        for choice in event["choices"]:
            _choice(texts, choice)
        if event.get("usage"):
            usage = dict(event["usage"])
            cached = usage.pop("prompt_tokens_details")["cached_tokens"]
    return Answer(texts, usage, cached)


async def ask(client: httpx.AsyncClient, request: RandomRequest) -> Answer:
    """Send a request and read its answer."""
    if not request.body.get("stream"):
        response = await client.post(request.path, json=request.body)
        assert response.status_code == 200, (response.status_code, response.text[:500])
        return read_answer([response.json()])
    events = []
    async with client.stream("POST", request.path, json=request.body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line[6:]))
    return read_answer(events)


async def hang_up(client: httpx.AsyncClient, request: RandomRequest, rng: random.Random) -> None:
    """Send a request and disconnect after a while: in the queue, in prefill or while decoding."""
    patience, pieces = rng.choice([0.01, 0.03, 0.1, 0.3, 1]), rng.randint(0, 6)
    body = {**request.body, "stream": rng.random() < 0.6}
    try:
        async with client.stream("POST", request.path, json=body, timeout=patience) as response:
            async for _ in response.aiter_lines():
                pieces -= 1
                if pieces < 0:
                    return
    except httpx.TimeoutException:
        pass
