"""Many requests at once, with clients that disconnect: each answer equals that of a single
request."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from g4spec.runtime.engine import Engine
from g4spec.server.service import Generation, Job
from g4spec.server.settings import Settings
from tests.server.mixed_requests import KINDS, Answer, RandomRequest, ask, draw, hang_up
from tests.server.running_server import Served, wait


def test_batching_and_drafts_do_not_change_answers(plain: Served, busy: Served) -> None:
    rng = random.Random(3)
    found: dict[str, RandomRequest] = {}
    while len(found) < len(set(KINDS)):
        request = draw(rng, longest=12)
        found.setdefault(request.kind, request)
    requests = list(found.values())

    async def alone() -> list[Answer]:
        async with httpx.AsyncClient(base_url=plain.url, timeout=120) as client:
            return [await ask(client, request.drafted(0, False)) for request in requests]

    async def run() -> list[tuple[int, Answer] | None]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=busy.url, timeout=120, limits=limits) as client:

            async def one(i: int) -> tuple[int, Answer]:
                request = requests[i].drafted(rng.choice(["auto", 1, 3, 7]), rng.random() < 0.5)
                return i, await ask(client, request)

            jobs: list[Any] = [one(i) for i in range(len(requests)) for _ in range(2)]
            jobs += [hang_up(client, rng.choice(requests), rng) for _ in range(12)]
            rng.shuffle(jobs)
            return await asyncio.gather(*jobs)

    wanted = asyncio.run(alone())
    answers = [found for found in asyncio.run(run()) if found is not None]
    assert len(answers) == 2 * len(requests)
    for i, answer in answers:
        assert answer.comparable == wanted[i].comparable, requests[i]
    wait(busy.idle)
    assert len(busy.engine.pool.free_slots) == 3
    assert busy.service.metrics.value(busy.service.metrics.hits) > 0  # blocks of the long prompt


def test_memory_of_disconnected_clients_is_free_within_two_steps(busy: Served) -> None:
    engine, scheduler = busy.engine, busy.engine.scheduler
    busy.engine.prefix.clear()
    wait(busy.idle)
    free = engine.pool.n_free
    for stream in (True, False):
        for when in ("waiting", "reading", "writing"):
            steps = 0

            async def go(stream: bool, when: str) -> None:
                prompt = [2] + [300] * (1100 if when == "reading" else 20)
                body = {
                    "prompt": prompt,
                    "max_tokens": 400,
                    "ignore_eos": True,
                    "draft_max": 2,
                    "n": 6 if when == "waiting" else 1,
                    "stream": stream,
                }
                async with httpx.AsyncClient(base_url=busy.url, timeout=60) as client:
                    task = asyncio.ensure_future(client.post("/v1/completions", json=body))
                    while not reached(when):
                        await asyncio.sleep(0.001)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

            def reached(when: str) -> bool:
                live = list(scheduler.running)
                if when == "waiting":
                    return len(scheduler.waiting) >= 3
                if when == "reading":
                    return bool(live)
                return bool(live) and live[0].request.stats.tokens > 4

            asyncio.run(go(stream, when))
            # The server notices at once; after that the engine may take two steps.
            wait(lambda: all(t.request.cancelled for t in [*scheduler.running, *scheduler.waiting]))
            step = engine.last_step
            while not scheduler.idle:
                if engine.last_step != step:
                    steps, step = steps + 1, engine.last_step
                time.sleep(0.0005)
            assert steps <= 2
            wait(busy.idle)
            engine.prefix.clear()  # prompt blocks may stay in the prefix cache
            assert engine.pool.n_free == free and len(engine.pool.free_slots) == 3


def test_a_full_queue_sends_retry_after(busy: Served) -> None:
    settings = busy.service.settings
    object.__setattr__(settings, "queue", 0)
    try:
        with busy.http.stream(
            "POST",
            "/v1/completions",
            json={
                "prompt": "x",
                "max_tokens": 300,
                "ignore_eos": True,
                "n": 3,
                "stream": True,
            },
        ) as response:
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
        metrics = busy.service.metrics
        before = metrics.value(metrics.errors, "408")
        for head in ({}, {"x-conversation-id": "slow"}):
            sent = {**body, "stream": True}
            text = busy.http.post("/v1/completions", json=sent, headers=head).text
            assert json.loads(text.split("data: ")[-1])["error"]["code"] == "timeout"
        assert "timeout" in busy.http.get("/v1/stream?conv_id=slow").text
        assert metrics.value(metrics.errors, "408") - before == 2
    finally:
        object.__setattr__(settings, "time_limit", 600.0)
    wait(busy.idle)


def test_the_sdks_do_not_repeat_a_request_that_takes_too_long(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default they repeat 408 twice, and every generation would end in the same error."""
    import anthropic
    import openai

    served = Served(engines(None, parallel=2), Settings("tiny", time_limit=0.1))
    n_jobs, submit = 0, served.service.submit

    async def counted(job: Job) -> Generation:
        nonlocal n_jobs
        n_jobs += 1
        return await submit(job)

    monkeypatch.setattr(served.service, "submit", counted)
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    body |= {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    try:
        with (
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
            pytest.raises(openai.APIStatusError, match="took more than"),
        ):
            client.chat.completions.create(**body)
        with (
            anthropic.Anthropic(base_url=served.url, api_key="none") as other,
            pytest.raises(anthropic.APIStatusError, match="took more than"),
        ):
            other.messages.create(**body)
    finally:
        served.stop()
    assert n_jobs == 2
