"""A server in a thread, on its own port, and requests to it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from g4spec.server import addresses, run
from g4spec.server.app import create_app
from g4spec.server.engine_client import EngineLike
from g4spec.server.service import Service
from g4spec.server.settings import Settings

TEMPLATE = (Path(__file__).parent / "template.jinja").read_text()


class Served:
    """An engine behind HTTP, until `stop`."""

    def __init__(
        self,
        engine: EngineLike,
        settings: Settings | None = None,
        *,
        hosts: tuple[str, ...] = ("127.0.0.1",),
        **more: Any,
    ) -> None:
        engine.tokenizer.template = TEMPLATE
        self.engine: Any = engine  # tests look into both kinds
        self.service = Service(engine, settings or Settings("tiny", ("small",)))
        ready = threading.Event()
        address = addresses.ServerAddress(hosts, port=0)
        self.listeners = addresses.listen(address)
        self.url = addresses.url(address, self.listeners)
        application = create_app(self.service, **more)
        self.server = run.create_server(application, self.service, address, ready.set)
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": self.listeners}, daemon=True
        )
        self._thread.start()
        assert ready.wait(20)
        self.http = httpx.Client(base_url=self.url, timeout=120, verify=False)

    def stop(self) -> None:
        """Stop the server and keep the engine."""
        self.http.close()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer to a request that must succeed."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """Return the error of a request that must be refused."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = self.http.post(path, content=content)
        assert response.status_code == status, (response.status_code, response.text)
        error: dict[str, Any] = response.json()["error"]
        assert error["message"] and error["type"]
        return error

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Return the events of a stream, up to its end."""
        out, named = [], None
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    out.append(json.loads(line[6:]))
                    assert named is None or named == out[-1]["type"]
                    named = None
                elif line.startswith("event: "):
                    named = line[7:]
                elif line:
                    assert line in ("data: [DONE]", ": ping"), line
        return out

    def idle(self) -> bool:
        """Return True if no resources are held for any request."""
        return self.engine.stats().idle and self.service.open == 0


def wait(until: Callable[[], object], seconds: float = 20) -> None:
    """Wait until the condition is true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.005)
