"""`EngineClient` with a process that the test plays: what happens between two of its messages."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest

from g4spec.core import Cycle
from g4spec.runtime.engine import Engine
from g4spec.runtime.engine_stats import EngineStats
from g4spec.runtime.request import Options, Stats
from g4spec.server import engine_client
from g4spec.server.engine_client import EngineClient
from g4spec.server.engine_process import EngineInfo, engine_info
from tests.server.running_server import wait


class Played:
    """A process and the channel to it. It ends when it is killed or asked to close."""

    pid = 1

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.on_send: Callable[[], object] = lambda: None

    def get_ready(self, info: EngineInfo) -> None:
        """Be loaded, and make steps from now on."""
        self.received.put(("figures", EngineStats(0, 0, 1, 1, (), last_step=inf)))
        self.received.put(("ready", info))

    def send(self, *message: Any) -> None:
        self.sent.append(message)
        self.on_send()
        if message == ("close",):
            self.kill()

    def messages(self) -> Iterator[Any]:
        while (message := self.received.get()) is not None:
            yield message

    def kill(self) -> None:
        self.received.put(None)

    def wait(self) -> int:
        return -9

    def close(self) -> None:
        pass

    def names(self) -> list[tuple[Any, ...]]:
        """Return name and number of each message about a request."""
        return [message[:2] for message in self.sent if message[0] in ("submit", "cancel")]


@pytest.fixture(scope="module")
def info(engines: Callable[..., Engine]) -> EngineInfo:
    return engine_info(engines(None, n_ctx=2048))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, info: EngineInfo) -> list[Played]:
    """Return the processes so far. The first is ready at once, others when the test says so."""
    made: list[Played] = []

    def start() -> tuple[Played, Played]:
        made.append(Played())
        if len(made) == 1:
            made[0].get_ready(info)
        return made[-1], made[-1]

    monkeypatch.setattr(engine_client, "start_process", start)
    return made


@pytest.fixture
def client(played: list[Played], family: Path) -> Iterator[EngineClient]:
    with EngineClient(family / "target.gguf", hang_limit=0.04) as made:
        yield made


def test_a_request_that_is_cancelled_while_it_is_submitted_again_ends(
    client: EngineClient, played: list[Played], info: EngineInfo
) -> None:
    """A finalizer may do so in the thread that submits: the process got "cancel" before "submit",
    and generated the whole text for nobody."""
    first, second = (client.submit([2, 9], Options(4)) for _ in range(2))
    played[0].kill()
    wait(lambda: len(played) == 2)
    played[1].on_send = second.cancel
    played[1].get_ready(info)
    wait(lambda: len(played[1].names()) >= 3)
    assert played[1].names()[-1] == ("cancel", 1)
    assert not first.cancelled


def test_a_cancelled_request_has_no_error_of_a_lost_process(
    client: EngineClient, played: list[Played]
) -> None:
    request = client.submit([2, 9], Options(4))
    request.cancel()  # the process ends before it reads that
    played[0].kill()
    assert list(request) == [] and request.stats.stop_reason == "cancelled"


def test_a_cancelled_request_ends_although_its_process_hangs(
    client: EngineClient, played: list[Played]
) -> None:
    """On a CPU no process is killed because it hangs: the time limit of a request ended nothing."""
    request, other = (client.submit([2, 9], Options(4)) for _ in range(2))
    request.cancel()
    assert request.done and request.stats.stop_reason == "cancelled"
    for number in range(2):
        stats = Stats(2, tokens=1, stop_reason="length")
        played[0].received.put(("cycle", number, Cycle([7], [0.0]), Stats(2, tokens=1), 0, "x"))
        played[0].received.put(("done", number, stats, [], None, 1, ""))
    assert [cycle.tokens for cycle in other] == [[7]]
    assert list(request) == [] and request.stats.stop_reason == "cancelled" and not request.text
    request = client.submit([2, 9], Options(4))
    request.cancel()
    played[0].received.put(("figures", EngineStats(1, 0, 1, 1, (), last_step=0)))
    wait(lambda: len(played) == 2)  # where a hanging process is killed, it still is


def test_a_listener_that_fails_ends_no_other_request(
    client: EngineClient, played: list[Played], caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the thread that reads the messages of the process, and with it the engine."""
    first, second = (client.submit([2, 9], Options(4)) for _ in range(2))
    first.listen(lambda: 1 // 0)
    for number in range(2):
        played[0].received.put(("done", number, Stats(2, stop_reason="length"), [], None, 0, "x"))
    for request in (first, second):
        assert list(request) == [] and request.text == "x"
    assert client.failed is None and len(played) == 1
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("again", ["wakes", "restarts"])
def test_a_process_whose_load_hangs_is_replaced(
    again: str,
    client: EngineClient,
    played: list[Played],
    info: EngineInfo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was reported (503), but requests waited for it for good."""
    with monkeypatch.context() as patch:
        patch.setattr(engine_client, "WAKE_SECONDS", 0.05)
        if again == "wakes":
            assert client.sleep()
        else:
            played[0].kill()
        request = client.submit([2, 9], Options(4))
        wait(lambda: len(played) >= 3)
    played[-1].get_ready(info)
    wait(played[-1].names)
    assert not request.done and client.failed is None
    played[-1].received.put(("done", 0, Stats(2, stop_reason="length"), [], None, 0, "x"))
    assert list(request) == [] and request.text == "x"
