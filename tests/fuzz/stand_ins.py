"""Replacements of the network for `serve` and `chat --url`; everything else is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from g4spec.runtime.engine import Engine
from g4spec.server import engine_client

ANSWERS = {
    "/v1/models": "models.json",
    "/v1/chat/completions": "answer.sse",
    "/v1/live": "live.sse",
}


class LocalEngineClient:
    """An engine in this process with the interface of `EngineClient`."""

    def __init__(
        self,
        target: Path,
        draft: Path | str | None = None,
        *,
        make: Callable[..., Engine] = Engine.load,
        hang_limit: float | None = None,
        **options: Any,
    ) -> None:
        """Load the engine. `hang_limit` only applies to a separate process and is ignored."""
        self._engine = make(target=target, draft=draft, **options)
        self.title, self.failed = self._engine.backend.title, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __enter__(self) -> LocalEngineClient:
        return self

    def __exit__(self, *args: object) -> None:
        self._engine.close()


async def _answer(self: Any, request: httpx.Request) -> httpx.Response:
    """Return a file of the working folder as response."""
    name = ANSWERS.get(request.url.path)
    if name is None or not Path(name).is_file():
        return httpx.Response(404, content=b'{"error": {"message": "nothing\x1b here"}}')
    return httpx.Response(200, content=Path(name).read_bytes())


async def _no_clients(self: uvicorn.Server) -> None:
    """Replace the loop that serves requests by one that returns at once."""


@contextmanager
def installed() -> Iterator[None]:
    """Install the replacements."""
    places = (
        (engine_client, "EngineClient", LocalEngineClient),
        (uvicorn.Server, "main_loop", _no_clients),
        (httpx.AsyncHTTPTransport, "handle_async_request", _answer),
    )
    before = [(where, name, getattr(where, name)) for where, name, _ in places]
    for where, name, new in places:
        setattr(where, name, new)
    try:
        yield
    finally:
        for where, name, old in before:
            setattr(where, name, old)
