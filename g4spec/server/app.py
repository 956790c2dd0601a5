"""The ASGI application of one model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware

from g4spec.server.endpoints import Endpoints, routes
from g4spec.server.exception_handlers import EXCEPTION_HANDLERS
from g4spec.server.middleware import BODY_LIMIT, WakeMiddleware, create_middleware
from g4spec.server.replay import ReplayStore
from g4spec.server.response_store import ResponseStore
from g4spec.server.service import Service


def create_app(
    service: Service,
    *,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    body_limit: int = BODY_LIMIT,
    disabled: Mapping[str, str] | None = None,
    mounted: bool = False,
    store: ResponseStore | None = None,
) -> Starlette:
    """Create the ASGI application of a service.

    Args:
        keys: accepted API keys; empty: requests need none.
        origins: allowed origins of cross-origin requests (CORS); see `OriginMiddleware`.
        body_limit: maximum size of a request body, in bytes.
        disabled: see `DisabledPathsMiddleware`.
        mounted: True if an outer application already applies the middleware.
        store: stored responses, shared with other applications; None: of this one alone.
    """

    responses, replays = store or ResponseStore(), ReplayStore()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        service.engine.start()
        sleeper = None
        if service.settings.sleep_seconds is not None:
            sleeper = asyncio.ensure_future(service.sleep_when_idle())
        yield
        service.draining = True
        if sleeper is not None:
            sleeper.cancel()
        await responses.close(service)
        await replays.close()
        await service.close()

    middleware = [] if mounted else create_middleware(keys, origins, body_limit, disabled)
    if service.settings.sleep_seconds is not None:
        middleware.append(Middleware(WakeMiddleware, wake=service.wake))
    app = Starlette(
        routes=routes(Endpoints(service, responses, replays)),
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router.redirect_slashes = False  # behind a proxy, its address would be wrong
    app.state.count_error, app.state.replays = service.metrics.count_error, replays
    return app
