"""Many requests at once, with clients that hang up: each gets what it would have got alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.server.served import Served
from tests.server.test_openai import HELLO, TOOLS, WEATHER

LONG = [{"role": "user", "content": "Tell me of numbers. " * 100}]


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of every kind."""
    chat, raw, llama = "/v1/chat/completions", "/v1/completions", "/completion"
    told = {"logprobs": True, "top_logprobs": 1}
    schema = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    out: list[tuple[str, dict[str, Any]]] = [
        (chat, {"messages": HELLO, "temperature": 0, "max_tokens": 14}),
        (chat, {"messages": HELLO, "n": 2, "max_tokens": 6}),
        (chat, {"messages": LONG, "max_tokens": 8, **told}),
        (chat, {"messages": LONG, "max_tokens": 8, "stop": ["e"]}),
        (chat, {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 20}),
        (chat, {"messages": LONG, "tools": TOOLS, "max_tokens": 8}),
        (chat, {"messages": HELLO, "response_format": schema, "max_tokens": 20}),
        (chat, {"messages": HELLO, "reasoning_effort": "low", "max_tokens": 8}),
        (chat, {"messages": HELLO, "presence_penalty": 1, "frequency_penalty": 1,
                "max_tokens": 10}),
        (raw, {"prompt": "import os\n", "max_tokens": 12, "logprobs": 1}),
        (raw, {"prompt": "def main(", "max_tokens": 10, "top_k": 5, "echo": True}),
        (llama, {"prompt": "class A:", "n_predict": 10, "n_probs": 1, "return_tokens": True}),
        (llama, {"prompt": "x", "n_predict": 6, "grammar": 'root ::= ("a" | "b")+\n'}),
    ]  # fmt: skip
    for i, (_, body) in enumerate(out):
        body.update(seed=i, draft_max=i % 5)
        body.setdefault("temperature", 0.9)
    return out


def essence(answer: dict[str, Any]) -> Any:
    """What an answer says, without what names or times it."""
    answer = json.loads(json.dumps(answer))
    for key in ("id", "created", "timings", "id_slot", "tokens_cached"):
        answer.pop(key, None)
    answer.get("usage", {}).pop("prompt_tokens_details", None)
    for choice in answer.get("choices", []):
        for call in choice.get("message", {}).get("tool_calls", []):
            del call["id"]
    return answer


async def hang_up(client: httpx.AsyncClient, path: str, body: Any, rng: random.Random) -> None:
    """Ask, and go away after a while: while it waits, reads the prompt, or writes."""
    stream = rng.random() < 0.6
    try:
        async with client.stream(
            "POST", path, json={**body, "stream": stream}, timeout=rng.choice([0.01, 0.05, 0.2])
        ) as response:
            async for _ in response.aiter_lines():
                if rng.random() < 0.3:
                    return
    except httpx.TimeoutException:
        pass


def wait(until: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_company_and_drafts_change_nothing(plain: Served, busy: Served) -> None:
    todo = requests()
    alone = [essence(plain.post(path, **{**body, "draft_max": 0})) for path, body in todo]
    rng = random.Random(1)

    async def run() -> list[Any]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=busy.url, timeout=120, limits=limits) as client:

            async def ask(i: int) -> tuple[int, Any]:
                response = await client.post(todo[i][0], json=todo[i][1])
                assert response.status_code == 200, response.text
                return i, essence(response.json())

            order = [*range(len(todo)), *range(len(todo))]  # the second time on kept prefixes
            rng.shuffle(order)
            jobs: list[Any] = [ask(i) for i in order]
            jobs += [hang_up(client, *rng.choice(todo), rng) for _ in range(12)]
            rng.shuffle(jobs)
            return await asyncio.gather(*jobs)

    answers = [found for found in asyncio.run(run()) if found is not None]
    assert len(answers) == 2 * len(todo)
    for i, answer in answers:
        assert answer == alone[i], todo[i]
    wait(busy.idle)
    assert len(busy.engine.pool.free_slots) == 3
    assert busy.service.metrics.value(busy.service.metrics.hits) > 0  # blocks of the long prompt


def test_memory_of_who_hangs_up_is_free_within_two_steps(busy: Served) -> None:
    engine, scheduler = busy.engine, busy.engine.scheduler
    busy.engine.prefix.clear()
    wait(busy.idle)
    free = engine.pool.free
    for stream in (True, False):
        for when in ("waiting", "reading", "writing"):
            steps = 0

            async def go(stream: bool, when: str) -> None:
                prompt = [2] + [300] * (1100 if when == "reading" else 20)
                body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "draft_max": 2,
                        "n": 6 if when == "waiting" else 1, "stream": stream}  # fmt: skip
                async with httpx.AsyncClient(base_url=busy.url, timeout=60) as client:
                    task = asyncio.ensure_future(client.post("/v1/completions", json=body))
                    while not reached(when):
                        await asyncio.sleep(0.001)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

            def reached(when: str) -> bool:
                live = list(scheduler.live)
                if when == "waiting":
                    return len(scheduler.waiting) >= 3
                if when == "reading":
                    return bool(live)
                return bool(live) and live[0].request.stats.tokens > 4

            asyncio.run(go(stream, when))
            # The server sees it at once; from then on the engine has two steps.
            wait(lambda: all(t.request.cancelled for t in [*scheduler.live, *scheduler.waiting]))
            step = engine.stepped
            while not scheduler.idle:
                if engine.stepped != step:
                    steps, step = steps + 1, engine.stepped
                time.sleep(0.0005)
            assert steps <= 2
            wait(busy.idle)
            engine.prefix.clear()  # what was read may be kept, for the next one
            assert engine.pool.free == free and len(engine.pool.free_slots) == 3


def test_a_full_queue_says_when_to_come_again(busy: Served) -> None:
    settings = busy.service.settings
    object.__setattr__(settings, "queue", 0)
    try:
        with busy.http.stream("POST", "/v1/completions", json={
            "prompt": "x", "max_tokens": 300, "ignore_eos": True, "n": 3, "stream": True,
        }) as response:  # fmt: skip
            assert response.status_code == 200
            refused = busy.http.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
    finally:
        object.__setattr__(settings, "queue", 64)
    wait(busy.idle)
    assert busy.post("/v1/completions", prompt="x", max_tokens=1)


def test_a_request_that_takes_too_long_ends(busy: Served) -> None:
    settings = busy.service.settings
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "draft_max": 0}
    object.__setattr__(settings, "time_limit", 0.1)
    try:
        error = busy.refused("/v1/completions", body, 408)
        assert error["code"] == "timeout" and "0.1 seconds" in error["message"]
        last = busy.stream("/v1/completions", **body)[-1]
        assert last["error"]["code"] == "timeout"
    finally:
        object.__setattr__(settings, "time_limit", 600.0)
    wait(busy.idle)
