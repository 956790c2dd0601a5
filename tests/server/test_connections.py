"""Connections whose clients stop: nothing is sent, or nothing is read."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from g4spec.runtime.engine import Engine
from g4spec.server import addresses, run, sse
from g4spec.server.middleware import JsonLogFormatter
from g4spec.server.settings import Settings
from tests.server.running_server import Served, wait


@pytest.fixture
def served(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with short limits of connections."""
    monkeypatch.setattr(addresses, "UNREAD_SECONDS", 1)
    monkeypatch.setattr(run, "IDLE_SECONDS", 1, raising=False)
    server = Served(engines(None, parallel=2))
    yield server
    server.stop()


@pytest.mark.parametrize("begin", ["http://example.com", "HTTPS://[::1]:8080", ""])
def test_proxies_may_send_whole_addresses(plain: Served, begin: str) -> None:
    connection = http.client.HTTPConnection(*plain.listeners[0].getsockname()[:2], timeout=20)
    statuses = []
    for target in (f"{begin}/health?a=http://x", f"{begin}/v1/models/tiny", begin or "/"):
        connection.request("GET", target)
        response = connection.getresponse()
        assert response.read()
        statuses.append(response.status)
    connection.close()
    assert statuses == [200, 200, 200]


def connect(served: Served) -> socket.socket:
    """Return a connection with little room for what its client does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.settimeout(20)
    client.connect(served.listeners[0].getsockname()[:2])
    return client


def test_no_part_of_an_answer_waits_for_its_client(served: Served) -> None:
    """The body, and each event of a stream, was held back until the client acknowledged what was
    sent before, which it does after 40 ms."""
    assert served.http.get("/health").status_code == 200
    for connection in served.server.server_state.connections:
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert served.server.server_state.connections


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_a_client_that_does_not_read_delays_no_shutdown(served: Served) -> None:
    body = json.dumps({"tokens": [5] * 1_000_000}).encode()
    with connect(served) as client:
        head = f"POST /detokenize HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        state = served.server.server_state
        wait(lambda: state.total_requests == 1)
        began = time.monotonic()
        served.stop()
        assert time.monotonic() - began < 10 and not state.connections


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [b"GET /health HT", b"TP/1.1\r\n", *[b"x: y\r\n"] * 20],
        [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"G", *[b"E"] * 20],
    ],
)
def test_a_connection_without_a_request_ends(served: Served, sent: list[bytes]) -> None:
    """Its client may send nothing, or the head of a request too slowly."""
    began = time.monotonic()
    with connect(served) as client, contextlib.suppress(ConnectionError):
        for part in sent:
            client.sendall(part)
            time.sleep(0.2)
        while client.recv(4096):
            pass
    assert time.monotonic() - began < 10
    wait(lambda: not served.server.server_state.connections, seconds=2)


def test_a_request_may_take_longer_than_its_head(served: Served) -> None:
    body = b'{"content": "abc"}'
    head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with connect(served) as client:
        for _ in range(2):
            client.sendall(head[:30])
            time.sleep(0.3)
            client.sendall(head[30:])
            for i in range(0, len(body), 6):
                time.sleep(0.4)
                client.sendall(body[i : i + 6])
            answer = b""
            while not answer.endswith(b"]}"):
                answer += client.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/v1/live", "/v1/stream?conv_id=x"])
def test_head_of_a_stream_has_an_end(served: Served, path: str) -> None:
    """A probe gets the headers, and keeps no watcher."""
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
    kept = {"x-conversation-id": "x"}
    with served.http.stream("POST", "/v1/completions", json=body, headers=kept) as response:
        next(response.iter_lines())
    head = f"HEAD {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    with connect(served) as client:
        client.sendall(head)
        client.settimeout(5)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200") and b"text/event-stream" in answer
    assert not served.service.live._watchers
    assert served.service.open == 1, "the stream goes on"
    assert served.http.delete("/v1/stream?conv_id=x").status_code == 204


def test_the_log_names_the_request_of_an_unread_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def events() -> sse.Events:
        yield "data: x\n\n"

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(20)

    async def receive() -> Any:
        await asyncio.sleep(20)

    source = SimpleNamespace(id="words of a client", close=lambda: None)
    stream = sse.EventStream(source, events(), Settings("", send_limit=0.05))
    asyncio.run(stream({"method": "GET", "state": {"id": "abc"}}, receive, send))
    (line,) = [json.loads(JsonLogFormatter().format(record)) for record in caplog.records]
    assert line["event"] == "client does not read its stream" and line["id"] == "abc"
    assert "words of a client" not in str(line)


def test_an_unread_stream_is_logged_once(
    engines: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """Uvicorn reported each as an error of the application, too."""
    served = Served(engines(None, parallel=2), Settings("tiny", send_limit=0.05))
    body = json.dumps({"input": "x", "user": "x" * 1_000_000, "stream": True}).encode()
    served.listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with connect(served) as client:
        head = f"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait(lambda: "ASGI callable returned without completing response." in caplog.messages)
    served.stop()
    news = [r for r in caplog.records if run.is_news(r) and r.levelno >= logging.WARNING]
    written = [record.getMessage() for record in news]
    assert written == ["client does not read its stream"]


def test_a_message_of_the_event_loop_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without free file descriptors asyncio writes the same traceback 4,000 times a second."""
    loggers = [logging.getLogger(name) for name in ("g4spec.server", "uvicorn", "asyncio")]
    for log in loggers:
        for name in ("handlers", "filters", "level", "propagate"):
            value = getattr(log, name)
            monkeypatch.setattr(log, name, [*value] if isinstance(value, list) else value)
    now = [0.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run.configure_logging()
    for now[0] in (0.0, 1.0, 59.0, 61.0):
        message = f"socket.accept() out of system resource\nsocket: {now[0]}"
        loggers[-1].error(message, exc_info=OSError(24, "full"))
    loggers[-1].error("another")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["event"][-12:] for line in lines] == ["\nsocket: 0.0", "socket: 61.0", "another"]
    assert "full" in lines[0]["error"]


def test_an_error_of_a_stream_is_not_blamed_on_its_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full disk or a lost process also raise OSError or TimeoutError."""

    sent, counted = list[Any](), list[int]()
    app = SimpleNamespace(state=SimpleNamespace(count_error=counted.append))

    async def events() -> sse.Events:
        yield "data: x\n\n"
        raise OSError("the fault of the server")

    async def send(message: Any) -> None:
        sent.append(message.get("body"))

    async def receive() -> Any:
        await asyncio.sleep(20)

    stream = sse.EventStream(SimpleNamespace(close=lambda: None), events(), Settings(""), str)
    asyncio.run(stream({"method": "GET", "app": app, "state": {"id": "abc"}}, receive, send))
    assert b"internal server error" in sent[-2] and sent[-1] == b"" and counted == [500]
    assert [record.getMessage() for record in caplog.records] == ["internal server error"]
