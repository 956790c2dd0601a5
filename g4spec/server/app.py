"""The application: paths, and what happens to a request on its way."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from g4spec.server import (
    chat,
    completions,
    fields,
    llamacpp,
    message_fields,
    messages,
    page,
    response_fields,
    responses,
)
from g4spec.server.access import BodyLimit, Keys, Log, Panics
from g4spec.server.handlers import HANDLERS
from g4spec.server.json_text import JSONAnswer
from g4spec.server.openapi import described, document, takes
from g4spec.server.refusals import Refused
from g4spec.server.replay import Replays
from g4spec.server.response_store import Record, ResponseStore
from g4spec.server.service import Generation, Job, Service
from g4spec.server.streams import PING, Events, EventStream, event, unless_gone

log = logging.getLogger("g4spec.server")

BODY_LIMIT = 32 << 20
"""Bytes of a body."""


def app(
    service: Service,
    *,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    body_limit: int = BODY_LIMIT,
    inner: bool = False,
) -> Starlette:
    """Make the ASGI application of a service.

    Args:
        keys: API keys, one of which a request has to carry; none: all are let in.
        origins: of web pages that may ask from a browser.
        inner: it stands inside another, which has keys, limits and the log for it.
    """

    store, replays = ResponseStore(), Replays()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        service.engine.start()
        yield
        service.draining = True
        await store.close()
        await replays.close()
        await service.close()

    middleware = [] if inner else around(keys, origins, body_limit)
    made = Starlette(
        routes=routes(Endpoints(service, store, replays)),
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers=HANDLERS,
    )
    made.state.service = service
    return made


def around(
    keys: Sequence[str] = (), origins: Sequence[str] = (), body_limit: int = BODY_LIMIT
) -> list[Middleware]:
    """List what is around the paths of an application; see `app`."""
    out = [Middleware(Log), Middleware(BodyLimit, limit=body_limit)]
    if origins:
        out.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    return [*out, Middleware(Keys, keys=keys), Middleware(Panics)]


class Endpoints:
    """The handlers of all paths."""

    def __init__(self, service: Service, store: ResponseStore, replays: Replays) -> None:
        self._service, self._store, self._replays = service, store, replays

    # ---- generation

    @takes(fields.ChatRequest)
    async def chat(self, request: Request, body: fields.ChatRequest) -> Response:
        """Answer POST /v1/chat/completions."""
        return await self._run(
            request,
            lambda: chat.job_of(self._service, body),
            bool(body.stream),
            lambda g: chat.answer(g, body),
            lambda g: chat.chunks(g, body),
        )

    @takes(fields.CompletionRequest)
    async def completions(self, request: Request, body: fields.CompletionRequest) -> Response:
        """Answer POST /v1/completions."""
        return await self._run(
            request,
            lambda: completions.job_of(self._service, body),
            bool(body.stream),
            lambda g: completions.answer(g, body),
            lambda g: completions.chunks(g, body),
        )

    @takes(llamacpp.CompletionBody, llamacpp.read)
    async def completion(self, request: Request, body: llamacpp.CompletionBody) -> Response:
        """Answer POST /completion, of llama.cpp; samplers that are not here may be off."""
        return await self._run(
            request,
            lambda: llamacpp.job_of(self._service, body),
            bool(body.stream),
            lambda g: llamacpp.answer(g, body),
            lambda g: llamacpp.chunks(g, body),
        )

    @takes(message_fields.MessagesRequest)
    async def messages(self, request: Request, body: message_fields.MessagesRequest) -> Response:
        """Answer POST /v1/messages, of Anthropic."""
        messages.check_version(request)
        return await self._run(
            request,
            lambda: messages.job_of(self._service, body),
            bool(body.stream),
            lambda g: messages.answer(g, body),
            lambda g: messages.chunks(g, body),
            lambda refused: event(refused.anthropic(), "error"),
            messages.PING,
        )

    @takes(message_fields.CountRequest)
    async def count_tokens(self, request: Request, body: message_fields.CountRequest) -> Response:
        """Answer POST /v1/messages/count_tokens, of Anthropic."""
        messages.check_version(request)
        return JSONAnswer(await messages.count(self._service, body))

    @takes(response_fields.ResponsesRequest)
    async def responses(self, request: Request, body: response_fields.ResponsesRequest) -> Response:
        """Answer POST /v1/responses."""
        writer = responses.Writer(self._service, self._store, body, _owner(request))
        if body.background:
            record = await writer.start()
            return self._follow(record, -1) if body.stream else JSONAnswer(record.response)
        return await self._run(
            request, writer.job, bool(body.stream), writer.answer, writer.chunks, writer.failed
        )

    @takes(response_fields.InputRequest)
    async def input_tokens(self, request: Request, body: response_fields.InputRequest) -> Response:
        """Answer POST /v1/responses/input_tokens."""
        return JSONAnswer(await responses.count(self._service, self._store, body, _owner(request)))

    @described(stream="true: as events", starting_after="the last event's sequence_number")
    async def response(self, request: Request) -> Response:
        """Answer GET and DELETE /v1/responses/{id}."""
        name, owner = request.path_params["id"], _owner(request)
        if request.method == "DELETE":
            return JSONAnswer(self._store.delete(name, owner))
        record = self._store.get(name, owner)
        after = response_fields.followed(request.query_params, record.events is not None)
        return JSONAnswer(record.response) if after is None else self._follow(record, after)

    def _follow(self, record: Record, after: int) -> Response:
        return EventStream(
            record,
            record.follow(after),
            lambda refused: event(refused.json()),
            self._service.settings,
        )

    async def cancel(self, request: Request) -> Response:
        """Answer POST /v1/responses/{id}/cancel."""
        found = await self._store.cancel(request.path_params["id"], _owner(request))
        return JSONAnswer(found)

    @described(limit="1 to 100; 20 without", order="asc or desc", after="the id of an item")
    async def input_items(self, request: Request) -> Response:
        """Answer GET /v1/responses/{id}/input_items."""
        record = self._store.get(request.path_params["id"], _owner(request))
        return JSONAnswer(self._store.list_items(record, request.query_params))

    async def _run(
        self,
        request: Request,
        job_of: Callable[[], Awaitable[Job]],
        stream: bool,
        answer: Callable[[Generation], Awaitable[Any]],
        chunks: Callable[[Generation], Events],
        failed: Callable[[Refused], str] = lambda refused: event(refused.json()),
        ping: str = PING,
    ) -> Response:
        """Generate what a request asks for, whole or in pieces."""
        service = self._service
        if stream:
            kept, generation = Replays.name(request), await service.submit(await job_of())
            events = self._noted(request, generation, chunks(generation))
            if kept is None:
                return EventStream(generation, events, failed, service.settings, ping=ping)
            replay = await self._replays.begin(_owner(request), kept, generation, events, failed)
            return EventStream(replay, replay.follow(0), failed, service.settings, ping=ping)

        async def whole() -> Any:
            generation = await service.submit(await job_of())
            try:
                return await answer(generation)
            finally:
                generation.close()
                _note(request, generation)

        return JSONAnswer(await unless_gone(request, whole()))

    @described(
        "text/event-stream",
        conv_id="X-Conversation-Id of the stream",
        **{"from": "id of the last event"},  # type: ignore[arg-type]
    )
    async def stream(self, request: Request) -> Response:
        """Answer GET and DELETE /v1/stream: go on with a dropped stream, or end it."""
        replay, at = self._replays.asked(request, _owner(request))
        if request.method == "DELETE":
            await self._replays.delete(_owner(request), replay.id)
            return Response(status_code=204)
        return EventStream(replay, replay.follow(at), str, self._service.settings)

    async def _noted(self, request: Request, generation: Generation, events: Events) -> Events:
        """Pass events on; in the end the log is told the figures."""
        try:
            async for each in events:
                yield each
        finally:
            await events.aclose()
            generation.close()
            _note(request, generation)

    # ---- texts and tokens

    @takes(llamacpp.TokenizeBody)
    async def tokenize(self, request: Request, body: llamacpp.TokenizeBody) -> Response:
        """Answer POST /tokenize."""
        return JSONAnswer(llamacpp.tokenize(self._service, body))

    @takes(llamacpp.DetokenizeBody)
    async def detokenize(self, request: Request, body: llamacpp.DetokenizeBody) -> Response:
        """Answer POST /detokenize."""
        return JSONAnswer(llamacpp.detokenize(self._service, body))

    @takes(fields.ChatRequest)
    async def apply_template(self, request: Request, body: fields.ChatRequest) -> Response:
        """Answer POST /apply-template."""
        return JSONAnswer(await llamacpp.apply_template(self._service, body))

    @takes(fields.ChatRequest)
    async def chat_tokens(self, request: Request, body: fields.ChatRequest) -> Response:
        """Answer POST /v1/chat/completions/input_tokens, of llama.cpp."""
        prompt = await chat.prompt_of(self._service, body)
        return JSONAnswer({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})

    # ---- the server

    @described("text/html")
    async def page(self, request: Request) -> Response:
        """Answer GET /: a page to chat, which loads nothing else."""
        return page.response()

    async def openapi(self, request: Request) -> Response:
        """Answer GET /openapi.json: this description of all paths."""
        return JSONAnswer(document(routes(Endpoints)))

    @described("text/event-stream", of="the word in `live` of the texts to be read along")
    async def live(self, request: Request) -> Response:
        """Answer GET /v1/live: what happens, as events."""
        service, word = self._service, request.query_params.get("of")
        if word is not None and not 16 <= len(word) <= 64:
            raise Refused(400, "of: a word has 16 to 64 characters", param="of")
        watcher = service.live.watch(word)
        if watcher is None:
            raise Refused(429, "too many watch already", retry_after=5)

        async def events() -> Events:
            async with aclosing(watcher.events(lambda: service.draining)) as found:
                async for name, told in found:
                    yield event(told, name)

        return EventStream(
            watcher, events(), lambda refused: event(refused.json()), service.settings
        )

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models."""
        return JSONAnswer({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Answer GET /v1/models/{id}."""
        self._service.check_model(request.path_params["id"])
        return JSONAnswer(self._model())

    def _model(self) -> dict[str, Any]:
        service = self._service
        config = service.engine.config
        return {
            "id": service.settings.model,
            "object": "model",
            "created": service.started,
            "owned_by": "g4spec",
            "tags": [],
            "aliases": [service.settings.model, *service.settings.aliases],
            "meta": {
                "n_ctx": service.engine.n_ctx,
                "n_ctx_train": config.n_ctx,
                "n_vocab": config.n_vocab,
                "n_embd": config.n_embd,
            },
        }

    async def health(self, request: Request) -> Response:
        """Answer GET /health: 200 while steps make progress."""
        if self._service.is_healthy and not self._service.draining:
            return JSONAnswer({"status": "ok"})
        why = "shutting down" if self._service.draining else "no step has ended for too long"
        return JSONAnswer({"status": "error", **Refused(503, why).json()}, 503)

    @described("text/plain")
    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics."""
        response = Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")
        # In llama.cpp's spelling, which Starlette would change.
        began = str(self._service.started).encode()
        response.raw_headers.append((b"Process-Start-Time-Unix", began))
        return response

    async def props(self, request: Request) -> Response:
        """Answer GET /props."""
        return JSONAnswer(llamacpp.props(self._service))

    @described(fail_on_no_slot="answer 503 where no slot is free")
    async def slots(self, request: Request) -> Response:
        """Answer GET /slots."""
        found = llamacpp.slots(self._service)
        if "fail_on_no_slot" in request.query_params and all(s["is_processing"] for s in found):
            raise Refused(503, "no slot is free")
        return JSONAnswer(found)


def routes(at: Endpoints | type[Endpoints]) -> list[Route]:
    """List the paths with their handlers; of the class, to describe them."""
    posts = {
        "/v1/chat/completions": at.chat,
        "/chat/completions": at.chat,
        "/v1/completions": at.completions,
        "/completion": at.completion,
        "/completions": at.completion,
        "/tokenize": at.tokenize,
        "/detokenize": at.detokenize,
        "/v1/chat/completions/input_tokens": at.chat_tokens,
        "/chat/completions/input_tokens": at.chat_tokens,
        "/apply-template": at.apply_template,
        "/v1/messages": at.messages,
        "/v1/messages/count_tokens": at.count_tokens,
        "/v1/responses": at.responses,
        "/responses": at.responses,
        "/v1/responses/input_tokens": at.input_tokens,
        "/v1/responses/{id}/cancel": at.cancel,
    }
    gets = {
        "/": at.page,
        "/openapi.json": at.openapi,
        "/v1/live": at.live,
        "/v1/models": at.models,
        "/models": at.models,
        "/v1/models/{id:path}": at.model,
        "/health": at.health,
        "/v1/health": at.health,
        "/metrics": at.metrics,
        "/props": at.props,
        "/slots": at.slots,
        "/v1/responses/{id}/input_items": at.input_items,
    }
    return [
        *(Route(path, run, methods=["POST"]) for path, run in posts.items()),
        *(Route(path, run, methods=["GET"]) for path, run in gets.items()),
        Route("/v1/stream", at.stream, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}", at.response, methods=["GET", "DELETE"]),
    ]


def _owner(request: Request) -> str | None:
    """Return what tells apart the keys of requests, None where none is asked for."""
    key: str | None = request.scope.get("state", {}).get("key")
    return key


def _note(request: Request, generation: Generation) -> None:
    """Tell the log the figures of a generation."""
    stats = [text.request.stats for text in generation.texts]
    request.scope["state"]["facts"] = {
        "prompt_tokens": sum(map(len, generation.job.prompts)),
        "completion_tokens": sum(s.tokens for s in stats),
        "draft_n": sum(s.drafted for s in stats),
        "draft_n_accepted": sum(s.accepted for s in stats),
        "finish": [text.finish for text in generation.texts],
    }
