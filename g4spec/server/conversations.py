"""Resumable streams behind several models: the model of each, and those that wait for a model."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Mapping

from starlette.types import Scope

from g4spec.server.model_folder import Model
from g4spec.server.replay import check_named, not_found
from g4spec.server.request_errors import RequestError

MAX_CONVERSATIONS = 10_000
"""Maximum number of streams whose model is known; the oldest are forgotten."""

Key = tuple[str | None, str]
"""API key (a hash prefix) and X-Conversation-Id of a request."""


class Conversations:
    """The resumable streams of a router. Used from one event loop only."""

    def __init__(self) -> None:
        self._models: OrderedDict[Key, str] = OrderedDict()
        self._waiting: dict[Key, asyncio.Future[None]] = {}

    def begin(
        self, scope: Scope, conversation: str, model: str, models: Mapping[str, Model]
    ) -> None:
        """Note the model of a stream; cancel an earlier one with the same id.

        One that the same model is writing is cancelled by that model (`replay.ReplayStore.begin`).
        """
        key = _key(scope, conversation)
        self.cancel(scope, conversation)
        before = self._models.pop(key, model)
        if before != model and (app := models[before].app) is not None:
            app.state.replays.discard(*key)
        self._models[key] = model
        while len(self._models) > MAX_CONVERSATIONS:
            self._models.popitem(last=False)

    async def wait(self, scope: Scope, conversation: str, load: Awaitable[None]) -> None:
        """Wait for the load of the stream's model, even if the client disconnects.

        Raises:
            RequestError: the stream was cancelled; or the load failed.
        """
        key = _key(scope, conversation)
        stop = self._waiting[key] = asyncio.get_running_loop().create_future()
        loading = asyncio.ensure_future(load)
        try:
            await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                raise RequestError(
                    400,
                    "the stream was cancelled while its model was loading, by DELETE /v1/stream or "
                    "a new stream with its id",
                    code="cancelled",
                )
            loading.result()
        finally:
            if self._waiting.get(key) is stop:
                del self._waiting[key]
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    def cancel(self, scope: Scope, conversation: str) -> bool:
        """Cancel a stream that waits for its model; return False if there is none."""
        key = _key(scope, conversation)
        if (stop := self._waiting.pop(key, None)) is None:
            return False
        self._models.pop(key, None)
        if not stop.done():
            stop.set_result(None)
        return True

    def model_name(self, scope: Scope, conversation: str, models: Mapping[str, Model]) -> str:
        """Return the model of a stream.

        Raises:
            RequestError: its model is loading (503), there is no such stream (404), or the request
                names none (400).
        """
        check_named(conversation)
        key = _key(scope, conversation)
        if key in self._waiting:
            raise RequestError(
                503, "the model of the stream is loading; retry later", retry_after=1
            )
        name = self._models.get(key)
        if name is None or models[name].service is None:
            raise not_found(conversation)
        return name


def _key(scope: Scope, conversation: str) -> Key:
    return scope.get("state", {}).get("key"), conversation
