"""Load models on demand; unload the least recently used.

A model that requests use is not unloaded. One that waits to be unloaded takes no new requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from starlette.types import ASGIApp

from g4spec.errors import EnvironmentProblem, G4Error
from g4spec.server import app as single_model
from g4spec.server.model_folder import Load, Model, open_model
from g4spec.server.request_errors import RequestError
from g4spec.server.response_store import ResponseStore
from g4spec.server.service import Service

log = logging.getLogger("g4spec.server")

Wait = Callable[[Awaitable[None]], Awaitable[None]]
"""Waits for the load of a model; raises if the request ends before."""


class LoadedModels:
    """The models of a server, some of them loaded. Used from one event loop only.

    Args:
        found: models, from `model_folder.find_models`.
        load: see `model_folder.Load`.
        max_loaded: maximum number of loaded models.
        max_wait: seconds that a request waits for a busy model to be unloaded.
        sleep_seconds: seconds without requests after which a model is unloaded; None: never.

    Attributes:
        responses: stored responses of all models; they outlive the model that wrote them.
    """

    def __init__(
        self,
        found: Sequence[Model],
        load: Load,
        max_loaded: int,
        max_wait: float = 600.0,
        sleep_seconds: float | None = None,
    ) -> None:
        self.all = {model.name: model for model in found}
        self.max_loaded, self.sleep_seconds = max_loaded, sleep_seconds
        self._load_service, self._max_wait = load, max_wait
        self.responses = ResponseStore()
        self._draining = False
        self._turn = asyncio.Lock()  # of the model that loads, also while it waits for room
        self._lock = asyncio.Lock()  # held while memory is taken or freed
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
        loading = [model for model in self.all.values() if model.loading is not None]
        loads = [model.loading for model in loading if model.loading is not None]
        for model in loading:
            self._stop_waiting(model)
        await asyncio.gather(*loads, return_exceptions=True)
        for model in self.all.values():
            await self._unload(model)

    def current(self) -> Model | None:
        """Return the most recently used loaded model, or None."""
        return max(self._loaded, key=lambda m: m.used, default=None)

    @property
    def _loaded(self) -> list[Model]:
        return [m for m in self.all.values() if m.status == "loaded"]

    @contextmanager
    def use(self, model: Model, *, keeps_loaded: bool = True) -> Iterator[ASGIApp]:
        """Return the application of a loaded model, which is not unloaded until the block ends.

        Args:
            keeps_loaded: the request counts as use of the model after the block, too.
        """
        assert model.app is not None
        model.n_requests += 1
        if keeps_loaded:
            model.used = time.monotonic()
        try:
            yield model.app
        finally:
            model.n_requests -= 1
            if keeps_loaded:
                model.used = time.monotonic()
            self._changed.set()

    async def load(self, model: Model, wait: Wait | None = None) -> None:
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
            elif not model.n_waiting:
                self._stop_waiting(model)

    def _stop_waiting(self, model: Model) -> None:
        """Cancel a load that waits for its turn or for room: nobody waits for it any more."""
        if model.loading is not None and not model.opening:
            model.loading.cancel()
            model.loading = None

    async def unload(self, model: Model) -> None:
        """Unload a model once it is loaded, if it loads, and its requests and texts without a
        client have ended.

        Raises:
            RequestError: they have not ended after `max_wait` seconds.
        """

        def unused() -> list[Model]:
            return [] if model.is_used or model.status == "loading" else [model]

        with self._no_new_requests(model):
            await self._unload_one(unused, f"{model.name} is in use; retry later")

    async def _loading(self, model: Model) -> None:
        """Wait for the load of a model; begin it if it has not begun."""
        if model.loading is None:
            model.loading = asyncio.ensure_future(self._load_in_turn(model))
        await asyncio.shield(model.loading)

    async def _load_in_turn(self, model: Model) -> None:
        """Load a model when the loads before it have ended."""
        try:
            await self._wait_until(lambda: not model.unloading)
            if model.is_ready:  # another one was unloaded
                return
            async with self._turn:
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
            while len(self._loaded) >= self.max_loaded:
                await self._make_room()
            service = await self._open(model)
            app = single_model.create_app(service, mounted=True, store=self.responses)
            await model.exit_stack.enter_async_context(app.router.lifespan_context(app))
            model.service, model.app = service, app
            service.on_idle = self._changed.set
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
            self._changed.set()
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

    async def _open(self, model: Model) -> Service:
        """Open the files of a model; unload others while there is not enough memory."""
        while True:
            try:
                async with self._lock:
                    model.opening = True
                    return await asyncio.to_thread(open_model, model, self._load_service)
            except EnvironmentProblem:
                model.opening = False
                if not model.n_waiting or not await self._make_room():
                    raise

    async def _make_room(self) -> bool:
        """Unload a model, the least recently used of those that are not used; return False if none
        is loaded.

        If all are used, this waits for the first that is not any more. New requests of the least
        recently used one wait meanwhile, so that there is such a model in the end.
        """
        n = len(self._loaded)
        if not n:
            return False
        model = min(self._loaded, key=_unload_order)
        message = f"no memory for another model while {model.name} is in use; retry later"
        with self._no_new_requests(model):
            await self._unload_one(lambda: [m for m in self._loaded if not m.is_used], message, n)
        return True

    async def _unload_one(
        self, unused: Callable[[], list[Model]], message: str, most: int = 0
    ) -> None:
        """Wait for models that are not used, and unload the least recently used of them, unless
        fewer than `most` models are loaded then: another has been unloaded.

        Raises:
            RequestError: there are none after `max_wait` seconds (503).
        """
        end = time.monotonic() + self._max_wait
        while True:
            await self._wait_until_ends(
                lambda: len(self._loaded) < most or bool(unused()), end, message
            )
            async with self._lock:
                if len(self._loaded) < most:
                    return
                if found := unused():  # else requests have begun
                    await self._unload(min(found, key=_unload_order))
                    return

    @contextmanager
    def _no_new_requests(self, model: Model) -> Iterator[None]:
        """Let requests of a model wait until it is unloaded."""
        model.n_unloads += 1
        try:
            yield
        finally:
            model.n_unloads -= 1
            self._changed.set()

    async def _wait_until_ends(self, done: Callable[[], bool], end: float, message: str) -> None:
        """Wait until a condition holds; raise RequestError (503) at the time `end`."""
        if not done():
            try:
                await asyncio.wait_for(self._wait_until(done), end - time.monotonic())
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
        if model.service is not None and model.service.open:
            model.used = time.monotonic()
        idle = time.monotonic() - model.used >= limit
        return idle and model.is_ready and not model.is_used

    async def _unload(self, model: Model) -> None:
        if model.service is None:
            return
        service, model.service, model.app = model.service, None, None
        model.status = "unloaded"
        self._changed.set()
        log.info("model unloaded", extra={"facts": {"model": model.name}})
        await model.exit_stack.aclose()
        await asyncio.to_thread(service.engine.close)


def _unload_order(model: Model) -> tuple[bool, bool, float]:
    """Return the key by which models are unloaded: least recently used first, after those that a
    caller waits to unload, and before those in use."""
    return model.is_used, not model.unloading, model.used
