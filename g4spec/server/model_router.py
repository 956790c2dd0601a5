"""Serve several models on one port.

A request selects a model by `model`, in its body or query. Without it, the model that wrote the
response of `previous_response_id` or the last item of `item_reference` answers, else the most
recently used one, and only POST loads one. Each loaded model has its own application
(`app.create_app`), to which requests are forwarded. Stored responses belong to no model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Container
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Match, Mount, Route
from starlette.types import Receive, Scope, Send

from g4spec.server import bodies, fields, page, server_info
from g4spec.server.conversations import Conversations
from g4spec.server.endpoints import Endpoints, routes
from g4spec.server.exception_handlers import EXCEPTION_HANDLERS
from g4spec.server.json_response import JsonResponse
from g4spec.server.loaded_models import LoadedModels, Wait
from g4spec.server.metrics import RouterMetrics, metrics_response
from g4spec.server.middleware import create_middleware, error_response
from g4spec.server.model_folder import Model
from g4spec.server.openapi import described, document
from g4spec.server.replay import is_valid_name
from g4spec.server.request_errors import RequestError, unknown_model
from g4spec.server.response_parts import SYSTEM_FINGERPRINT
from g4spec.server.settings import Settings
from g4spec.server.sse import ClientDisconnected, cancel_on_disconnect, event, unowned_stream
from g4spec.server.stored_responses import StoredResponses, stored_routes

EVENT_POLL_SECONDS = 0.2
"""Seconds between two polls of `ModelRouter.events`."""


class ModelRouter:
    """An ASGI application that forwards requests to the model that they name.

    Args:
        models: the models.
        autoload: load a model when a request names it, not only with /models/load.
    """

    def __init__(self, models: LoadedModels, *, autoload: bool) -> None:
        self.models, self._autoload = models, autoload
        self._conversations = Conversations()
        self.metrics, self._started = RouterMetrics(), int(time.time())
        self._routes = [*ROUTER_ROUTES, *routes(Endpoints)]
        # Answers requests that match no route, as the application of a model would.
        self._wrong_paths = Starlette(routes=self._routes, exception_handlers=EXCEPTION_HANDLERS)
        self._wrong_paths.router.redirect_slashes = False
        self._wrong_paths.state.count_error = self.metrics.count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if not any(route.matches(scope)[0] is Match.FULL for route in self._routes):
            await self._wrong_paths(scope, receive, send)
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        name = query["model"][-1] if query.get("model") else None
        conversation = query["conv_id"][-1] if query.get("conv_id") else ""
        client, streams, body = receive, False, b""
        try:
            if scope["method"] == "POST":
                body, receive = await bodies.read_body(receive)
                asked = bodies.routing_fields(body)
                name, streams = asked.model or name, asked.streams
                if name is None and "/responses" in scope["path"]:
                    name = self._writer(scope, asked)
            answer = await self._answer(scope, name, body)
            if answer is not None:
                await JsonResponse(answer)(scope, receive, send)
                return
            if scope["path"] == "/":
                await page.response()(scope, receive, send)
                return
            if scope["path"] == "/metrics" and name is None:
                await self._all_metrics()(scope, receive, send)
                return
            if scope["path"] == "/models/events":
                await unowned_stream(self.events())(scope, receive, send)
                return
            resumes = scope["path"] == "/v1/stream" and scope["method"] != "POST"
            if resumes and name is None:
                if scope["method"] == "DELETE" and self._conversations.cancel(scope, conversation):
                    await Response(status_code=204)(scope, receive, send)
                    return
                name = self._conversations.model_name(scope, conversation, self.models.all)
            posts = scope["method"] == "POST"
            model = self._select(name, loads=posts)
            # A model that waits to be unloaded may be waiting for the very stream.
            if not resumes or model.app is None:
                await self.models.load(model, self._way_to_wait(model, scope, client, streams))
            # A watcher does not keep a model loaded; its stream ends when the model is unloaded.
            watching = scope["path"] == "/v1/live"
            uses = self.models.use(model, keeps_loaded=posts)
            with nullcontext(model.app) if watching else uses as app:
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
            self._conversations.begin(scope, conversation, model.name, self.models.all)
            return partial(self._conversations.wait, scope, conversation)
        return partial(cancel_on_disconnect, client)

    def _writer(self, scope: Scope, asked: bodies.RoutingFields) -> str | None:
        """Return the model that wrote the previous response, else the last of the items that a
        request refers to, or None; raise RequestError (404) for no such response."""
        owner = scope.get("state", {}).get("key")
        if asked.previous is not None:
            return str(self.models.responses.get(asked.previous, owner).response["model"])
        return self.models.responses.writer(asked.references, owner)

    async def _answer(self, scope: Scope, name: str | None, body: bytes) -> Any:
        """Return the response of a router endpoint, or None if a model must answer.

        Raises RequestError for no name and a `body` without it, or that is not valid.
        """
        method, path = scope["method"], scope["path"]
        if path == "/props" and name is None and method in ("GET", "HEAD"):
            return self._props(scope["state"].get("disabled", ()))
        route = next((each for each in ROUTER_ROUTES if path == each.path), None)
        if method in ("GET", "HEAD"):
            return self._answer_get(path, name)
        if route is None or method != "POST":
            return None
        if name is None:
            name = fields.read(fields.ModelRequest, body).model
        await route.endpoint(self, self._named(name))
        return {"success": True, "model": self._named(name).json()}

    def _answer_get(self, path: str, name: str | None) -> Any:
        """Return the response of a GET endpoint of the router, or None."""
        if path in ("/v1/models", "/models"):
            return {"object": "list", "data": [model.json() for model in self.models.all.values()]}
        if path.startswith("/v1/models/"):
            return self._named(path.removeprefix("/v1/models/")).json()
        if path in ("/health", "/v1/health"):
            model = self._named(name) if name is not None else self.models.current()
            if model is None or not model.is_ready:
                return {"status": "ok"}
        if path == "/openapi.json":
            return document([*routes(Endpoints), *ROUTER_ROUTES])
        return None

    def _props(self, disabled: Container[str]) -> dict[str, Any]:
        """Return the response of /props: of the router, and of the most recently used model."""
        current = self.models.current()
        service = current.service if current is not None else None
        return {
            "build_info": SYSTEM_FINGERPRINT,
            **(server_info.props(service, disabled) if service is not None else {}),
            "role": "router",
            "max_instances": self.models.max_loaded,
            "models_autoload": self._autoload,
        }

    def _all_metrics(self) -> Response:
        """Return the response of /metrics: of the router, and of the most recently used model."""
        current = self.models.current()
        service = current.service if current is not None else None
        text = service.metrics.text() if service is not None else b""
        return metrics_response(self.metrics.text() + text, self._started)

    @described("text/event-stream")
    async def events(self) -> AsyncGenerator[str, None]:
        """Answer GET /models/events: the /v1/models entry of each model, first and on changes.

        While a model is loading, its entry includes the bytes read.
        """
        sent: dict[str, Any] = {}
        while not self.models.draining:
            for model in self.models.all.values():
                now = model.json()
                if sent.get(model.name) != now:
                    sent[model.name] = now
                    yield event(now, "model")
            await asyncio.sleep(EVENT_POLL_SECONDS)

    @described(body=fields.ModelRequest)
    async def load(self, model: Model) -> None:
        """Answer POST /models/load: load a model now."""
        await self.models.load(model)

    @described(body=fields.ModelRequest)
    async def unload(self, model: Model) -> None:
        """Answer POST /models/unload: unload a model once its requests have ended."""
        await self.models.unload(model)

    def check_model(self, name: str | None) -> None:
        """Raise RequestError (404) for the name of a model that is not served."""
        if name is not None:
            self._named(name)

    def _named(self, name: str) -> Model:
        if name not in self.models.all:
            raise unknown_model(name, self.models.all)
        return self.models.all[name]

    def _select(self, name: str | None, *, loads: bool) -> Model:
        """Return the model of a request.

        Args:
            loads: the request may load a model that it does not name.
        """
        if name is not None:
            return self._named(name)
        current = self.models.current()
        if not loads and (current is None or not current.is_ready):
            raise RequestError(
                503,
                "no model is loaded; name one with ?model=NAME, or load one with POST /models/load",
                code="not_loaded",
            )
        return current or next(iter(self.models.all.values()))


ROUTER_ROUTES = [
    Route("/models/events", ModelRouter.events, methods=["GET"]),
    Route("/models/load", ModelRouter.load, methods=["POST"]),
    Route("/models/unload", ModelRouter.unload, methods=["POST"]),
]
"""Routes of the router itself, in addition to those of each model."""


def create_app(router: ModelRouter, **more: Any) -> Starlette:
    """Create the application of several models.

    Args:
        router: forwards the requests.
        more: arguments of `middleware.create_middleware`.
    """
    models = router.models

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        idle = None
        if models.sleep_seconds is not None:
            idle = asyncio.ensure_future(models.unload_idle_models())
        yield
        if idle is not None:
            idle.cancel()
        models.draining = True
        await models.close()

    stored = StoredResponses(models.responses, Settings(""), router.check_model)
    app = Starlette(
        routes=[*stored_routes(stored), Mount("/", router)],
        middleware=create_middleware(**more),
        lifespan=lifespan,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.count_error = router.metrics.count_error
    return app
