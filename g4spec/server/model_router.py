"""Serve several models on one port: load on demand, unload the least recently used.

The folder is scanned once for targets and their matching drafts. A request selects a model by
`model`, in its body or query; without it, the most recently used model answers. Each loaded model
has its own application (`app.create_app`), to which requests are forwarded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from g4spec.errors import EnvironmentProblem, G4Error
from g4spec.server import app as single_model
from g4spec.server import bodies, fields, page, server_info
from g4spec.server.conversations import Conversations
from g4spec.server.endpoints import Endpoints, routes
from g4spec.server.exception_handlers import EXCEPTION_HANDLERS
from g4spec.server.json_response import JsonResponse
from g4spec.server.middleware import create_middleware, error_response
from g4spec.server.model_folder import Load, Model, open_model
from g4spec.server.openapi import described, document
from g4spec.server.replay import is_valid_name
from g4spec.server.request_errors import RequestError
from g4spec.server.response_parts import SYSTEM_FINGERPRINT
from g4spec.server.sse import ClientDisconnected, cancel_on_disconnect, event, unowned_stream

log = logging.getLogger("g4spec.server")

Wait = Callable[[Awaitable[None]], Awaitable[None]]
"""Waits for the load of a model; raises if the request ends before."""

EVENT_POLL_SECONDS = 0.2
"""Seconds between two polls of `ModelRouter.events`."""


class ModelRouter:
    """An ASGI application that forwards requests to the model that they name.

    Args:
        found: models, from `model_folder.find_models`.
        load: see `model_folder.Load`.
        max_loaded: maximum number of loaded models.
        max_wait: seconds that a request waits for a busy model to be unloaded.
        autoload: load a model when a request names it, not only with /models/load.
        sleep_seconds: seconds without requests after which a model is unloaded; None: never.
    """

    def __init__(
        self,
        found: Sequence[Model],
        load: Load,
        max_loaded: int,
        max_wait: float = 600.0,
        *,
        autoload: bool = True,
        sleep_seconds: float | None = None,
    ) -> None:
        self.all = {model.name: model for model in found}
        self._load_service, self._max_loaded, self._max_wait = load, max_loaded, max_wait
        self._autoload, self.sleep_seconds = autoload, sleep_seconds
        self._conversations = Conversations()
        self._draining = False
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def draining(self) -> bool:
        """True while new requests are rejected; applies to all models."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        for model in self.all.values():
            if model.service is not None:
                model.service.draining = value

    async def close(self) -> None:
        """Unload all models."""
        loads = [model.loading for model in self.all.values() if model.loading is not None]
        await asyncio.gather(*loads, return_exceptions=True)
        for model in self.all.values():
            await self._unload(model)

    # ---- requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        name = query["model"][-1] if query.get("model") else None
        conversation = query["conv_id"][-1] if query.get("conv_id") else ""
        client, streams = receive, False
        try:
            if scope["method"] == "POST":
                body, receive = await bodies.read_body(receive)
                named, streams = bodies.model_and_stream(body)
                name = named or name
            answer = await self._answer(scope["method"], scope["path"], name)
            if answer is not None:
                await JsonResponse(answer)(scope, receive, send)
                return
            if scope["path"] == "/":
                await page.response()(scope, receive, send)
                return
            if (scope["method"], scope["path"]) == ("GET", "/models/events"):
                await unowned_stream("models", self.events())(scope, receive, send)
                return
            resumes = scope["path"] == "/v1/stream" and scope["method"] != "POST"
            if resumes and name is None:
                if scope["method"] == "DELETE" and self._conversations.cancel(scope, conversation):
                    await Response(status_code=204)(scope, receive, send)
                    return
                name = self._conversations.model_name(scope, conversation, self.all)
            model = self._select(name)
            await self._wait_until_loaded(model, self._way_to_wait(model, scope, client, streams))
            # A watcher does not keep a model loaded; its stream ends when the model is unloaded.
            watching = scope["path"] == "/v1/live"
            with nullcontext(model.app) if watching else self._using(model) as app:
                assert app is not None
                await app(scope, receive, send)
        except ClientDisconnected:
            await Response(status_code=499)(scope, receive, send)
        except RequestError as refused:
            await error_response(refused, scope)(scope, receive, send)

    def _way_to_wait(self, model: Model, scope: Scope, client: Receive, streams: bool) -> Wait:
        """Return how a request waits for its model.

        A client that disconnects ends the wait, unless its stream can be resumed.

        Raises:
            RequestError: the model is not loaded, and requests do not load models.
        """
        if model.status == "unloaded" and not self._autoload:
            raise RequestError(
                400,
                f"the model {model.name!r} is not loaded; POST /models/load loads it",
                param="model",
                code="not_loaded",
            )
        conversation = Headers(scope=scope).get("x-conversation-id", "")
        if streams and is_valid_name(conversation):
            self._conversations.begin(scope, conversation, model.name, self.all)
            return partial(self._conversations.wait, scope, conversation)
        return partial(cancel_on_disconnect, client)

    async def _answer(self, method: str, path: str, name: str | None) -> Any:
        """Return the response of a router endpoint, or None if a model must answer."""
        route = next((each for each in ROUTER_ROUTES if path == each.path), None)
        if route is not None and method not in (route.methods or ()):
            raise RequestError(405, f"{path} does not accept {method}; see GET /openapi.json")
        if method == "GET":
            return self._answer_get(path, name)
        if route is None or method != "POST":
            return None
        if name is None:
            raise RequestError(400, "model: name the model to load or unload", param="model")
        await route.endpoint(self, self._named(name))
        return {"success": True, "model": self._named(name).json()}

    def _answer_get(self, path: str, name: str | None) -> Any:
        """Return the response of a GET endpoint of the router, or None."""
        if path in ("/v1/models", "/models"):
            return {"object": "list", "data": [model.json() for model in self.all.values()]}
        if path.startswith("/v1/models/"):
            return self._named(path.removeprefix("/v1/models/")).json()
        if path in ("/health", "/v1/health") and self._current() is None:
            return {"status": "ok"}
        if path == "/props" and name is None:
            return self._props()
        if path == "/openapi.json":
            return document([*routes(Endpoints), *ROUTER_ROUTES])
        return None

    def _props(self) -> dict[str, Any]:
        """Return the response of /props: of the router, and of the most recently used model."""
        current = self._current()
        service = current.service if current is not None else None
        return {
            "build_info": SYSTEM_FINGERPRINT,
            **(server_info.props(service) if service is not None else {}),
            "role": "router",
            "max_instances": self._max_loaded,
            "models_autoload": self._autoload,
        }

    @described("text/event-stream")
    async def events(self) -> AsyncGenerator[str, None]:
        """Answer GET /models/events: the /v1/models entry of each model, first and on changes.

        While a model is loading, its entry includes the bytes read.
        """
        sent: dict[str, Any] = {}
        while not self._draining:
            for model in self.all.values():
                now = model.json()
                if sent.get(model.name) != now:
                    sent[model.name] = now
                    yield event(now, "model")
            await asyncio.sleep(EVENT_POLL_SECONDS)

    @described(body=fields.ModelRequest)
    async def load(self, model: Model) -> None:
        """Answer POST /models/load: load a model now."""
        await self._wait_until_loaded(model)

    @described(body=fields.ModelRequest)
    async def unload(self, model: Model) -> None:
        """Answer POST /models/unload: unload a model once its requests have ended."""
        end = time.monotonic() + self._max_wait
        with self._no_new_requests(model):
            while True:
                await self._wait_until_idle(model, end, f"{model.name} is in use; retry later")
                async with self._lock:
                    if not model.is_used:  # else it was loaded for requests that begin now
                        await self._unload(model)
                        return

    def _named(self, name: str) -> Model:
        if name not in self.all:
            raise RequestError(
                404,
                f"the model {name!r:.80} is not served here, only {', '.join(self.all)}",
                param="model",
                code="model_not_found",
            )
        return self.all[name]

    def _select(self, name: str | None) -> Model:
        if name is not None:
            return self._named(name)
        return self._current() or next(iter(self.all.values()))

    def _current(self) -> Model | None:
        """Return the most recently used loaded model, or None."""
        loaded = [m for m in self.all.values() if m.status == "loaded"]
        return max(loaded, key=lambda m: m.used, default=None)

    @contextmanager
    def _using(self, model: Model) -> Iterator[ASGIApp]:
        assert model.app is not None
        model.n_requests += 1
        model.used = time.monotonic()
        try:
            yield model.app
        finally:
            model.n_requests -= 1
            model.used = time.monotonic()
            self._changed.set()

    # ---- loading

    async def _wait_until_loaded(self, model: Model, wait: Wait | None = None) -> None:
        """Load the model if needed. There is no await between the last check and the return, so
        that it is still loaded when the caller uses it.

        Args:
            wait: awaits the load, or raises if the request ends before.
        """
        if model.is_ready:
            return
        model.n_waiting += 1
        n_loads = model.n_loads
        try:
            while not (model.is_ready or (model.status == "loaded" and model.n_loads > n_loads)):
                loading = self._loading(model)
                await (loading if wait is None else wait(loading))
        finally:
            model.n_waiting -= 1
            if model.n_promised and model.n_loads > n_loads:
                model.n_promised -= 1
                self._changed.set()
            elif not model.n_waiting and model.loading is not None and not model.opening:
                model.loading.cancel()  # nobody waits any more
                model.loading = None

    async def _loading(self, model: Model) -> None:
        """Wait for the load of a model; begin it if it has not begun."""
        if model.loading is None:
            model.loading = asyncio.ensure_future(self._load_in_turn(model))
        await asyncio.shield(model.loading)

    async def _load_in_turn(self, model: Model) -> None:
        """Load a model when the loads before it have ended."""
        try:
            await self._wait_until(lambda: not model.unloading)
            async with self._lock:
                if model.status != "loaded":
                    await self._load(model)
        finally:
            if model.loading is asyncio.current_task():
                model.loading = None

    async def _load(self, model: Model) -> None:
        """Load a model; unload others, least recently used first, until there is room."""
        if self._draining:
            raise RequestError(503, "the server is shutting down; retry later", retry_after=5)
        model.status, model.problem, model.read = "loading", None, None
        began = time.perf_counter()
        log.info("loading a model", extra={"facts": {"model": model.name}})
        try:
            while sum(m.status == "loaded" for m in self.all.values()) >= self._max_loaded:
                await self._make_room()
            model.opening = True
            while True:
                try:
                    service = await asyncio.to_thread(open_model, model, self._load_service)
                    break
                except EnvironmentProblem:
                    if not await self._make_room():
                        raise
            app = single_model.create_app(service, mounted=True)
            await model.exit_stack.enter_async_context(app.router.lifespan_context(app))
            model.service, model.app = service, app
            model.n_promised, model.n_loads = model.n_waiting, model.n_loads + 1
            model.used = time.monotonic()
        except G4Error as error:
            model.problem = str(error)
            raise RequestError(
                503, f"{model.name} cannot be loaded: {error}", code="not_loaded", retry_after=5
            ) from None
        finally:
            model.opening = False
            model.status = "loaded" if model.service is not None else "unloaded"
            log.info(
                "model " + model.status,
                extra={
                    "facts": {
                        "model": model.name,
                        "draft": model.draft.name if model.draft else None,
                        "seconds": round(time.perf_counter() - began, 3),
                        "problem": model.problem,
                    }
                },
            )

    async def _make_room(self) -> bool:
        """Unload the least recently used model; return False if none is loaded."""
        loaded = [m for m in self.all.values() if m.status == "loaded"]
        if not loaded:
            return False
        model = min(loaded, key=lambda m: (m.is_used, not m.unloading, m.used))
        end = time.monotonic() + self._max_wait
        with self._no_new_requests(model):
            await self._wait_until_idle(
                model, end, f"no memory for another model while {model.name} is in use; retry later"
            )
            await self._unload(model)
        return True

    @contextmanager
    def _no_new_requests(self, model: Model) -> Iterator[None]:
        """Let requests of a model wait until it is unloaded."""
        model.n_unloads += 1
        try:
            yield
        finally:
            model.n_unloads -= 1
            self._changed.set()

    async def _wait_until_idle(self, model: Model, end: float, message: str) -> None:
        """Wait until a model's requests have ended; raise RequestError (503) at the time `end`."""
        if model.is_used:
            idle = self._wait_until(lambda: not model.is_used)
            try:
                await asyncio.wait_for(idle, end - time.monotonic())
            except asyncio.TimeoutError:
                raise RequestError(503, message, retry_after=10) from None

    async def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait until a condition holds, which is tested whenever `_changed` is set."""
        while not done():
            self._changed.clear()
            await self._changed.wait()

    async def unload_idle_models(self) -> None:
        """Unload models that had no request for `sleep_seconds`; runs until it is cancelled."""
        limit = self.sleep_seconds
        assert limit is not None
        while True:
            await asyncio.sleep(min(limit / 4, 1))
            for model in self.all.values():
                if self._is_idle(model, limit):
                    async with self._lock:
                        if self._is_idle(model, limit):  # it may have been used in the meantime
                            await self._unload(model)

    def _is_idle(self, model: Model, limit: float) -> bool:
        """Return True if a loaded model had no request for `limit` seconds."""
        if model.is_used or (model.service is not None and model.service.open):
            model.used = time.monotonic()
        return model.is_ready and time.monotonic() - model.used >= limit

    async def _unload(self, model: Model) -> None:
        if model.service is None:
            return
        service, model.service, model.app = model.service, None, None
        model.status = "unloaded"
        log.info("model unloaded", extra={"facts": {"model": model.name}})
        await model.exit_stack.aclose()
        await asyncio.to_thread(service.engine.close)


ROUTER_ROUTES = [
    Route("/models/events", ModelRouter.events, methods=["GET"]),
    Route("/models/load", ModelRouter.load, methods=["POST"]),
    Route("/models/unload", ModelRouter.unload, methods=["POST"]),
]
"""Routes of the router itself, in addition to those of each model."""


def create_app(found: ModelRouter, **more: Any) -> Starlette:
    """Create the application of several models.

    Args:
        found: the router.
        more: arguments of `middleware.create_middleware`.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        idle = None
        if found.sleep_seconds is not None:
            idle = asyncio.ensure_future(found.unload_idle_models())
        yield
        if idle is not None:
            idle.cancel()
        found.draining = True
        await found.close()

    return Starlette(
        routes=[Mount("/", found)],
        middleware=create_middleware(**more),
        lifespan=lifespan,
        exception_handlers={500: EXCEPTION_HANDLERS[500]},
    )
