"""What `serve` and `chat --url` meet in place of a network; all else of them is real."""

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


class Here:
    """An engine in this process, as `EngineClient` is made; fields of the engine are its own."""

    def __init__(
        self,
        target: Path,
        draft: Path | str | None = None,
        *,
        make: Callable[..., Engine] = Engine.load,
        hang_limit: float | None = None,
        **options: Any,
    ) -> None:
        """Load the engine. `hang_limit` is for a process of its own, which this is not."""
        self._engine = make(target=target, draft=draft, **options)
        self.title, self.failed = self._engine.backend.title, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *args: object) -> None:
        self._engine.close()


async def _answer(self: Any, request: httpx.Request) -> httpx.Response:
    """Answer with a file of the working folder."""
    name = ANSWERS.get(request.url.path)
    if name is None or not Path(name).is_file():
        return httpx.Response(404, content=b'{"error": {"message": "nothing\x1b here"}}')
    return httpx.Response(200, content=Path(name).read_bytes())


async def _nobody_asks(self: uvicorn.Server) -> None:
    """Stand in for the time in which requests come."""


@contextmanager
def installed() -> Iterator[None]:
    """Put them in."""
    places = (
        (engine_client, "EngineClient", Here),
        (uvicorn.Server, "main_loop", _nobody_asks),
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
