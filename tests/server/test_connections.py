"""Connections whose clients stop: nothing is sent, or nothing is read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from g4spec.runtime.engine import Engine
from g4spec.server import run
from tests.server.running_server import Served, wait


@pytest.fixture
def served(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with short limits of connections."""
    monkeypatch.setattr(run, "UNREAD_SECONDS", 1, raising=False)
    monkeypatch.setattr(run, "IDLE_SECONDS", 1, raising=False)
    server = Served(engines(None, parallel=2))
    yield server
    server.stop()


def connect(served: Served) -> socket.socket:
    """Return a connection with little room for what its client does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.settimeout(20)
    client.connect(served.listeners[0].getsockname()[:2])
    return client


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
