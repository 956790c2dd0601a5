"""Resuming streams after a client has disconnected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from g4spec.server.replay import RecordedStream, ReplayStore
from g4spec.server.request_errors import RequestError
from tests.server.running_server import Served, wait

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Count: 1, 2, 3,"}], "seed": 3}
ASKED = [
    ("/v1/chat/completions", {**CHAT, "max_tokens": 24}),
    ("/v1/completions", {"prompt": "def area(r):", "seed": 3, "max_tokens": 24}),
    (
        "/v1/messages",
        {"model": "tiny", "messages": CHAT["messages"], "temperature": 0, "max_tokens": 24},
    ),
]


def read(response: httpx.Response, most: int | None = None) -> list[tuple[int, str]]:
    """Return the first `most` events with their numbers."""
    out: list[tuple[int, str]] = []
    number = 0
    for line in response.iter_lines():
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            out.append((number, line[6:]))
            if len(out) == most:
                break
    return out


def text(events: list[tuple[int, str]]) -> str:
    out = ""
    for _, data in events:
        event = json.loads(data) if data != "[DONE]" else {}
        for choice in event.get("choices", []):
            out += choice.get("text") or choice.get("delta", {}).get("content") or ""
        out += event.get("delta", {}).get("text", "")
    return out


@pytest.mark.parametrize("path, body", ASKED, ids=[path for path, _ in ASKED])
def test_a_dropped_stream_can_be_resumed(busy: Served, path: str, body: dict[str, Any]) -> None:
    """By `from` or `Last-Event-ID`; the text is the same as without interruption."""
    whole, name = busy.post(path, **body), {"X-Conversation-Id": f"a/b {path}"}
    with busy.http.stream("POST", path, json={**body, "stream": True}, headers=name) as response:
        first = read(response, 2)
    assert [number for number, _ in first] == [1, 2]
    params = {"conv_id": f"a/b {path}"}
    with busy.http.stream("GET", "/v1/stream", params={**params, "from": 2}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        rest = read(response)
    assert [number for number, _ in rest] == list(range(3, len(rest) + 3))
    choice = whole["choices"][0] if "choices" in whole else {"text": whole["content"][0]["text"]}
    assert text(first + rest) == (choice.get("text") or choice["message"]["content"])
    headers = {"Last-Event-ID": "1"}
    with busy.http.stream("GET", "/v1/stream", params=params, headers=headers) as response:
        assert read(response) == (first + rest)[1:]
    wait(busy.idle)


@pytest.mark.parametrize(
    "error, message",
    [
        (RequestError(408, "too long"), "too long"),
        (ValueError("secret"), "internal server error"),
    ],
)
def test_a_failure_is_the_last_event(error: Exception, message: str) -> None:
    closed = []

    class Source:
        id = "x"

        def close(self) -> None:
            closed.append(self)

    async def events() -> AsyncGenerator[str, None]:
        yield "data: 1\n\n"
        raise error

    async def main() -> list[str]:
        replay = RecordedStream(
            "x", Source(), events(), lambda refused: f"data: {refused.message}\n\n"
        )
        found = [each async for each in replay.follow(0)]
        stopped = RecordedStream("y", Source(), events(), str)
        await stopped.stop()  # before it has begun
        assert [each async for each in stopped.follow(0)] == [] and len(closed) == 2
        return found

    first, last = asyncio.run(main())
    assert first == "id: 1\ndata: 1\n\n" and last.startswith("id: 2\n") and message in last
    assert "secret" not in last


def test_streams_that_begin_together_replace_each_other() -> None:
    """While the first is stopped, another with the same id begins; only one stream is left."""
    running = set[int]()

    class Source:
        def __init__(self, number: int) -> None:
            self.id = str(number)
            running.add(number)

        def close(self) -> None:
            running.discard(int(self.id))

    async def events() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "data: 1\n\n"
                await asyncio.sleep(0.01)
        finally:
            await asyncio.sleep(0.01)

    async def main() -> None:
        store = ReplayStore()

        async def begin(number: int) -> None:
            await store.begin(None, "x", Source(number), events(), str)

        await begin(0)
        await asyncio.sleep(0.05)  # it has to end its events
        await asyncio.gather(begin(1), begin(2))
        assert len(running) == 1 and store.get(None, "x").id == "x"
        await store.close()
        assert not running

    asyncio.run(main())


def test_a_stream_is_ended_by_delete_or_its_id(busy: Served) -> None:
    long = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    name = {"X-Conversation-Id": "long"}
    for _ in range(2):  # the second takes the place of the first
        with busy.http.stream("POST", "/v1/completions", json=long, headers=name) as response:
            assert read(response, 1)
    assert busy.service.open == 1
    assert busy.http.delete("/v1/stream?conv_id=long").status_code == 204
    wait(busy.idle)
    for query, status in (
        ("conv_id=long", 404),
        ("", 400),
        ("conv_id=", 400),
        ("conv_id=long&from=x", 400),
        ("conv_id=long&to=1", 400),
    ):
        assert busy.http.get(f"/v1/stream?{query}").status_code == status
    for method in ("GET", "DELETE"):
        error = busy.http.request(method, "/v1/stream?from=0").json()["error"]
        assert error["message"].startswith("conv_id: missing") and error["param"] == "conv_id"
    response = busy.http.post("/v1/completions", json=long, headers={"X-Conversation-Id": ""})
    assert response.status_code == 400
