"""Serve several models on one port: load on demand, unload the least recently used.

The folder is scanned once for targets and their matching drafts. A request selects a model by
`model`, in its body or query; without it, the most recently used model answers. Each loaded model
has its own application (`app.create_app`), to which requests are forwarded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from g4spec import models, validate
from g4spec.errors import EnvironmentProblem, G4Error, InputError
from g4spec.gguf import GGUF
from g4spec.server import app as single_model
from g4spec.server import bodies, fields, page
from g4spec.server.json_response import JsonResponse
from g4spec.server.middleware import create_middleware, error_response
from g4spec.server.openapi import described, document
from g4spec.server.request_errors import RequestError
from g4spec.server.service import Service
from g4spec.server.sse import HEADERS, event

log = logging.getLogger("g4spec.server")

Progress = Callable[[int, int], None]
"""Callback with bytes loaded and bytes in all."""

Load = Callable[[list[str], Path, "Path | None", Progress], Service]
"""Loader of (names, target, draft). Raises EnvironmentProblem if memory is insufficient."""

EVENT_POLL_SECONDS = 0.2
"""Seconds between two polls of `ModelRouter.events`."""


@dataclass(slots=True)
class Model:
    """A target that can be loaded, and its state.

    Attributes:
        name: id of the model.
        target: GGUF of the target.
        drafts: candidate drafts, best first; those that fail validation are removed.
        draft: the draft it was loaded with, or None.
        status: "unloaded", "loading" or "loaded".
        read: (bytes loaded, bytes in all) while loading.
        n_requests: number of running requests.
        used: time of the last request (`time.monotonic`).
        unloading: True while it waits to be unloaded.
        problem: error of the last attempt to load it.
        exit_stack: exit stack of its application.
    """

    name: str
    target: Path
    drafts: list[Path] = field(default_factory=list)
    draft: Path | None = None
    status: str = "unloaded"
    read: tuple[int, int] | None = None
    service: Service | None = None
    app: ASGIApp | None = None
    n_requests: int = 0
    used: float = 0.0
    unloading: bool = False
    problem: str | None = None
    exit_stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def json(self) -> dict[str, Any]:
        """Return its entry of /v1/models."""
        draft = self.draft or (self.drafts[0] if self.drafts else None)
        failed = self.service.engine.failed if self.service is not None else None
        status = "failed" if failed is not None else self.status
        problem = self.problem if failed is None else str(failed)
        told: dict[str, Any] = {"error": problem} if problem else {}
        if self.status == "loading" and self.read is not None:
            told = dict(zip(("bytes_read", "bytes"), self.read, strict=True))
        out: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": int(self.target.stat().st_mtime),
            "owned_by": "g4spec",
            "draft": draft.name if draft else None,
            "status": {"value": status, **told},
        }
        if self.service is not None:
            engine = self.service.engine
            out["meta"] = {
                "n_ctx": engine.n_ctx,
                "n_ctx_train": engine.config.n_ctx,
                "n_vocab": engine.config.n_vocab,
                "n_embd": engine.config.n_embd,
            }
        return out


def find_models(folder: Path | None) -> list[Model]:
    """Return the targets in a folder and its subfolders, each with its matching drafts.

    A draft matches if the pair rules of `validate` find no error. Drafts with the fewest warnings
    come first; one converted for this very target has none.

    Raises:
        InputError: the folder does not exist or has no target.
    """
    if folder is None or not folder.is_dir():
        raise InputError(f"{folder}: not a folder", expected="a folder of GGUF files")
    targets, drafts = [], []
    for path in sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]):
        with GGUF(path) as file:
            arch = file.kv.get("general.architecture")
            if arch in models.TARGETS:
                targets.append(path)
            elif models.find_kind(arch, file.tensors) is not None:
                drafts.append(path)
    if not targets:
        raise InputError(
            f"{folder}: no target model in this folder",
            expected="at least one Gemma 4 GGUF",
            found=[path.name for path in drafts] or "none",
        )
    pairs = [name for name in validate.all_rules() if name.startswith("G4-PAIR-")]
    names: set[str] = set()
    out = []
    for path in targets:
        name = path.stem if path.stem not in names else f"{path.parent.name}/{path.stem}"
        names.add(name)
        reports = [validate.validate(draft, path, only=pairs) for draft in drafts]
        fitting = [report for report in reports if report.ok]
        fitting.sort(key=lambda report: (len(report.failures), report.path.name))
        out.append(Model(name, path, [report.path for report in fitting]))
    return out


class ModelRouter:
    """An ASGI application that forwards requests to the model that they name.

    Args:
        found: models, from `find_models`.
        load: see `Load`.
        max_loaded: maximum number of loaded models.
        max_wait: seconds that a request waits for a busy model to be unloaded.
    """

    def __init__(
        self, found: Sequence[Model], load: Load, max_loaded: int, max_wait: float = 600.0
    ) -> None:
        self.all = {model.name: model for model in found}
        self._load_service, self._max_loaded, self._max_wait = load, max_loaded, max_wait
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
        for model in self.all.values():
            await self._unload(model)

    # ---- requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        query_models = parse_qs(scope["query_string"].decode("latin-1")).get("model", [])
        name = query_models[-1] if query_models else None
        try:
            if scope["method"] == "POST":
                body, receive = await bodies.read_body(receive)
                name = bodies.model_name(body) or name
            answer = await self._answer(scope["method"], scope["path"], name)
            if answer is not None:
                await JsonResponse(answer)(scope, receive, send)
                return
            if scope["path"] == "/":
                await page.response()(scope, receive, send)
                return
            if (scope["method"], scope["path"]) == ("GET", "/models/events"):
                await StreamingResponse(
                    self.events(), media_type="text/event-stream", headers=HEADERS
                )(scope, receive, send)
                return
            model = await self._ensure_loaded(self._select(name))
            # A watcher does not keep a model loaded; its stream ends when the model is unloaded.
            watching = scope["path"] == "/v1/live"
            with nullcontext(model.app) if watching else self._using(model) as app:
                assert app is not None
                await app(scope, receive, send)
        except RequestError as refused:
            await error_response(refused, scope)(scope, receive, send)

    async def _answer(self, method: str, path: str, name: str | None) -> Any:
        """Return the response of a router endpoint, or None if a model must answer."""
        if method == "GET" and path in ("/v1/models", "/models"):
            return {"object": "list", "data": [model.json() for model in self.all.values()]}
        if method == "GET" and path.startswith("/v1/models/"):
            return self._named(path.removeprefix("/v1/models/")).json()
        if method == "GET" and path in ("/health", "/v1/health") and self._current() is None:
            return {"status": "ok"}
        if method == "GET" and path == "/openapi.json":
            return document([*single_model.routes(single_model.Endpoints), *ROUTER_ROUTES])
        route = next(
            (each for each in ROUTER_ROUTES if path == each.path and method == "POST"), None
        )
        if route is not None:
            if name is None:
                raise RequestError(400, "model: name the model to load or unload", param="model")
            await route.endpoint(self, self._named(name))
            return {"success": True, "model": self._named(name).json()}
        return None

    @described("text/event-stream")
    async def events(self) -> AsyncGenerator[str, None]:
        """Answer GET /models/events: the /v1/models entry of each model, first and on changes.

        While a model is loading, its entry includes the bytes read.
        """
        told: dict[str, Any] = {}
        while not self._draining:
            for model in self.all.values():
                now = model.json()
                if told.get(model.name) != now:
                    told[model.name] = now
                    yield event(now, "model")
            await asyncio.sleep(EVENT_POLL_SECONDS)

    @described(body=fields.ModelRequest)
    async def load(self, model: Model) -> None:
        """Answer POST /models/load: load a model now."""
        await self._ensure_loaded(model)

    @described(body=fields.ModelRequest)
    async def unload(self, model: Model) -> None:
        """Answer POST /models/unload: unload a model once its requests have ended."""
        async with self._lock:
            await self._unload_when_idle(model)

    def _named(self, name: str) -> Model:
        if name not in self.all:
            raise RequestError(
                404,
                f"the model {name!r} is not served here, only {', '.join(self.all)}",
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
            self._changed.set()

    # ---- loading

    async def _ensure_loaded(self, model: Model) -> Model:
        """Load the model if needed. There is no await between the check and the return, so that it
        is still loaded when the caller uses it."""
        while model.status != "loaded" or model.unloading:
            async with self._lock:
                if model.status != "loaded":
                    await self._load(model)
        return model

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
            while True:
                try:
                    service = await asyncio.to_thread(self._open, model)
                    break
                except EnvironmentProblem:
                    if not await self._make_room():
                        raise
            app = single_model.create_app(service, mounted=True)
            await model.exit_stack.enter_async_context(app.router.lifespan_context(app))
            model.service, model.app = service, app
        except G4Error as error:
            model.problem = str(error)
            raise RequestError(
                503, f"{model.name} cannot be loaded: {error}", code="not_loaded", retry_after=5
            ) from None
        finally:
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

    def _open(self, model: Model) -> Service:
        """Load a target with its first draft that passes all rules."""
        while model.drafts and not validate.validate(model.drafts[0], model.target).ok:
            log.warning(
                "a draft does not validate",
                extra={"facts": {"model": model.name, "draft": model.drafts.pop(0).name}},
            )
        model.draft = model.drafts[0] if model.drafts else None

        def progress(read: int, whole: int) -> None:
            model.read = read, whole

        service = self._load_service([model.name], model.target, model.draft, progress)
        service.warm_up()
        return service

    async def _make_room(self) -> bool:
        """Unload the least recently used model; return False if none is loaded."""
        loaded = [m for m in self.all.values() if m.status == "loaded"]
        if not loaded:
            return False
        await self._unload_when_idle(min(loaded, key=lambda m: (m.n_requests > 0, m.used)))
        return True

    async def _unload_when_idle(self, model: Model) -> None:
        """Unload a model once its requests have ended."""
        model.unloading = True
        end = time.monotonic() + self._max_wait
        try:
            while model.n_requests:
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), end - time.monotonic())
                except asyncio.TimeoutError:
                    raise RequestError(
                        503,
                        f"no memory for another model while {model.name} is in use; retry later",
                        retry_after=10,
                    ) from None
            await self._unload(model)
        finally:
            model.unloading = False

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
        yield
        found.draining = True
        await found.close()

    return Starlette(
        routes=[Mount("/", found)],
        middleware=create_middleware(**more),
        lifespan=lifespan,
    )
