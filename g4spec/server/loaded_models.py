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

    def current(self) -> Model | None:
        """Return the most recently used loaded model, or None."""
        loaded = [m for m in self.all.values() if m.status == "loaded"]
        return max(loaded, key=lambda m: m.used, default=None)

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
            elif not model.n_waiting and model.loading is not None and not model.opening:
                model.loading.cancel()  # nobody waits any more
                model.loading = None

    async def unload(self, model: Model) -> None:
        """Unload a model once its requests and texts without a client have ended.

        Raises:
            RequestError: they have not ended after `max_wait` seconds.
        """
        end = time.monotonic() + self._max_wait
        with self._no_new_requests(model):
            while True:
                await self._wait_until_idle(model, end, f"{model.name} is in use; retry later")
                async with self._lock:
                    if not model.is_used:  # else it was loaded for requests that begin now
                        await self._unload(model)
                        return

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
            while sum(m.status == "loaded" for m in self.all.values()) >= self.max_loaded:
                await self._make_room()
            model.opening = True
            while True:
                try:
                    service = await asyncio.to_thread(open_model, model, self._load_service)
                    break
                except EnvironmentProblem:
                    if not await self._make_room():
                        raise
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
        """Wait until a model is no longer used; raise RequestError (503) at the time `end`."""
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
        if model.service is not None and model.service.open:
            model.used = time.monotonic()
        idle = time.monotonic() - model.used >= limit
        return idle and model.is_ready and not model.is_used

    async def _unload(self, model: Model) -> None:
        if model.service is None:
            return
        service, model.service, model.app = model.service, None, None
        model.status = "unloaded"
        log.info("model unloaded", extra={"facts": {"model": model.name}})
        await model.exit_stack.aclose()
        await asyncio.to_thread(service.engine.close)
