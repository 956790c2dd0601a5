"""The endpoints of one model: handlers of requests, and their paths."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

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
    server_info,
    tokenization,
)
from g4spec.server.json_response import JsonResponse
from g4spec.server.metrics import metrics_response
from g4spec.server.openapi import described, document, takes
from g4spec.server.replay import ReplayStore
from g4spec.server.request_errors import RequestError
from g4spec.server.response_parts import speculation_header
from g4spec.server.response_store import ResponseStore
from g4spec.server.service import Generation, Job, Service
from g4spec.server.sse import (
    PING,
    Events,
    EventStream,
    cancel_on_disconnect,
    error_event,
    event,
    ping_seconds,
)
from g4spec.server.stored_responses import MODEL, StoredResponses, owner, stored_routes


class Endpoints(StoredResponses):
    """The handlers of all routes. The first lines of their docstrings are the OpenAPI summaries."""

    def __init__(self, service: Service, store: ResponseStore, replays: ReplayStore) -> None:
        super().__init__(store, service.settings, service.check_model)
        self._service, self._replays = service, replays
        # One at a time: the longest text takes seconds and half a gigabyte.
        self._long_work = asyncio.Lock()

    # ---- generation

    @takes(fields.ChatRequest, llamacpp.read)
    async def chat(self, request: Request, body: fields.ChatRequest) -> Response:
        """Answer POST /v1/chat/completions."""
        return await self._generate(
            request,
            lambda: chat.build_job(self._service, body),
            bool(body.stream),
            lambda g: chat.full_response(g, body),
            lambda g: chat.stream_response(g, body),
            interval=body.sse_ping_interval,
        )

    @takes(completions.CompletionRequest, llamacpp.read)
    async def completions(self, request: Request, body: completions.CompletionRequest) -> Response:
        """Answer POST /v1/completions."""
        return await self._generate(
            request,
            lambda: completions.build_job(self._service, body),
            bool(body.stream),
            lambda g: completions.full_response(g, body),
            lambda g: completions.stream_response(g, body),
            interval=body.sse_ping_interval,
        )

    @takes(llamacpp.CompletionBody, llamacpp.read)
    async def completion(self, request: Request, body: llamacpp.CompletionBody) -> Response:
        """Answer POST /completion (llama.cpp's API); unsupported samplers must be off."""
        return await self._generate(
            request,
            lambda: llamacpp.build_job(self._service, body),
            bool(body.stream),
            lambda g: llamacpp.full_response(g, body),
            lambda g: llamacpp.stream_response(g, body),
            interval=body.sse_ping_interval,
        )

    @takes(message_fields.MessagesRequest)
    async def messages(self, request: Request, body: message_fields.MessagesRequest) -> Response:
        """Answer POST /v1/messages (Anthropic's API)."""
        messages.check_version(request)
        return await self._generate(
            request,
            lambda: messages.build_job(self._service, body),
            bool(body.stream),
            lambda g: messages.full_response(g, body),
            lambda g: messages.stream_response(g, body),
            lambda refused: event(refused.anthropic(), "error"),
            messages.PING,
        )

    @takes(message_fields.CountRequest)
    async def count_tokens(self, request: Request, body: message_fields.CountRequest) -> Response:
        """Answer POST /v1/messages/count_tokens (Anthropic's API)."""
        messages.check_version(request)
        return JsonResponse(await messages.count(self._service, body))

    @takes(response_fields.ResponsesRequest)
    async def responses(self, request: Request, body: response_fields.ResponsesRequest) -> Response:
        """Answer POST /v1/responses."""
        writer = responses.Writer(self._service, self._store, body, owner(request))
        if body.background:
            record = await writer.start()
            return self._follow(record, -1) if body.stream else JsonResponse(record.response)
        return await self._generate(
            request,
            writer.job,
            bool(body.stream),
            writer.full_response,
            writer.stream_response,
            writer.failed,
        )

    @takes(response_fields.InputRequest)
    async def input_tokens(self, request: Request, body: response_fields.InputRequest) -> Response:
        """Answer POST /v1/responses/input_tokens."""
        return JsonResponse(await responses.count(self._service, self._store, body, owner(request)))

    async def _generate(
        self,
        request: Request,
        build_job: Callable[[], Awaitable[Job]],
        stream: bool,
        answer: Callable[[Generation], Awaitable[Any]],
        chunks: Callable[[Generation], Events],
        failed: Callable[[RequestError], str] = error_event,
        ping: str = PING,
        interval: int | None = None,
    ) -> Response:
        """Submit a job; return one response, or an event stream if `stream`.

        Args:
            answer: builds the body of the response.
            chunks: yields the events of the stream.
            failed: builds the event that ends the stream with an error.
            ping: sent while there is no other event.
            interval: see `ping_seconds`.
        """
        service = self._service
        settings = replace(service.settings, ping=ping_seconds(interval, service.settings.ping))
        if stream:
            kept, generation = ReplayStore.name(request), await service.submit(await build_job())
            events = self._log_when_done(
                request, generation, chunks(generation), recorded=kept is not None
            )
            if kept is None:
                return EventStream(generation, events, settings, failed, ping)
            replay = await self._replays.begin(owner(request), kept, generation, events, failed)
            return EventStream(replay, replay.follow(0), settings, failed, ping)

        async def whole() -> Response:
            generation = await service.submit(await build_job())
            try:
                content = await answer(generation)
                return JsonResponse(content, headers=speculation_header(generation))
            finally:
                generation.close()
                _log_generation(request, generation)

        return await cancel_on_disconnect(request.receive, whole())

    @described(
        "text/event-stream",
        conv_id="X-Conversation-Id of the stream",
        model=MODEL,
        **{"from": "id of the last event"},  # type: ignore[arg-type]
    )
    async def stream(self, request: Request) -> Response:
        """Answer GET and DELETE /v1/stream: resume a dropped stream, or cancel it."""
        self._check_model(request)
        replay, at = self._replays.requested(request, owner(request))
        if request.method == "DELETE":
            await self._replays.delete(owner(request), replay.id)
            return Response(status_code=204)
        return EventStream(replay, replay.follow(at), self._service.settings)

    async def _log_when_done(
        self, request: Request, generation: Generation, events: Events, *, recorded: bool
    ) -> Events:
        """Yield `events`; at the end, close the generation, count its error and add its figures to
        the log.

        Args:
            recorded: an unexpected error ends no response, which would count it.
        """
        try:
            async for each in events:
                yield each
        except RequestError as refused:
            self._service.metrics.count_error(refused.status)
            raise
        except Exception:
            if recorded:
                self._service.metrics.count_error(500)
            raise
        finally:
            await events.aclose()
            generation.close()
            _log_generation(request, generation)

    # ---- tokens and templates

    @takes(tokenization.TokenizeBody)
    async def tokenize(self, request: Request, body: tokenization.TokenizeBody) -> Response:
        """Answer POST /tokenize."""
        async with self._long_work:
            return JsonResponse(await asyncio.to_thread(tokenization.tokenize, self._service, body))

    @takes(tokenization.DetokenizeBody)
    async def detokenize(self, request: Request, body: tokenization.DetokenizeBody) -> Response:
        """Answer POST /detokenize."""
        async with self._long_work:
            return JsonResponse(
                await asyncio.to_thread(tokenization.detokenize, self._service, body)
            )

    @takes(fields.ChatRequest, llamacpp.read)
    async def apply_template(self, request: Request, body: fields.ChatRequest) -> Response:
        """Answer POST /apply-template."""
        return JsonResponse(await tokenization.apply_template(self._service, body))

    @takes(fields.ChatRequest, llamacpp.read)
    async def chat_tokens(self, request: Request, body: fields.ChatRequest) -> Response:
        """Answer POST /v1/chat/completions/input_tokens (llama.cpp's API)."""
        return JsonResponse(await tokenization.chat_tokens(self._service, body))

    # ---- the server

    @described("text/html")
    async def page(self, request: Request) -> Response:
        """Answer GET /: a self-contained chat page."""
        return page.response()

    async def openapi(self, request: Request) -> Response:
        """Answer GET /openapi.json: this description of all paths."""
        return JsonResponse(document(routes(Endpoints)))

    @described(
        "text/event-stream", of="`live` field of the requests whose text is shown", model=MODEL
    )
    async def live(self, request: Request) -> Response:
        """Answer GET /v1/live: texts as events while they are generated."""
        self._check_model(request)
        service, word = self._service, request.query_params.get("of")
        if word is not None and not 16 <= len(word) <= 64:
            raise RequestError(
                400, "of: expected 16 to 64 characters, the `live` field of a request", param="of"
            )
        watcher = service.live.watch(word)
        if watcher is None:
            raise RequestError(429, "too many clients read /v1/live; retry later", retry_after=5)

        async def events() -> Events:
            async with aclosing(watcher.events(lambda: service.draining)) as found:
                async for name, data in found:
                    yield event(data, name)

        return EventStream(watcher, events(), service.settings)

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models."""
        return JsonResponse(server_info.models(self._service))

    async def model(self, request: Request) -> Response:
        """Answer GET /v1/models/{id}."""
        self._service.check_model(request.path_params["id"])
        return JsonResponse(server_info.model(self._service))

    async def health(self, request: Request) -> Response:
        """Answer GET /health: 200 if the engine is idle or steps make progress, else 503."""
        if self._service.is_healthy and not self._service.draining:
            return JsonResponse({"status": "ok"})
        limit = self._service.settings.stall_limit
        why = (
            "the server is shutting down"
            if self._service.draining
            else f"no step has ended for {limit:g} seconds, or the engine is down"
        )
        return JsonResponse({"status": "error", **RequestError(503, why).json()}, 503)

    @described("text/plain", model=MODEL)
    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics."""
        self._check_model(request)
        return metrics_response(self._service.metrics.text(), self._service.started)

    @described(model=MODEL)
    async def props(self, request: Request) -> Response:
        """Answer GET /props."""
        self._check_model(request)
        disabled = request.scope["state"].get("disabled", ())
        caps = await self._service.prompter.capabilities()
        found = server_info.props(self._service, disabled)
        return JsonResponse({**found, "chat_template_caps": caps})

    @described(fail_on_no_slot="answer 503 if no slot is free", model=MODEL)
    async def slots(self, request: Request) -> Response:
        """Answer GET /slots."""
        self._check_model(request)
        found = server_info.slots(self._service)
        if "fail_on_no_slot" in request.query_params and all(s["is_processing"] for s in found):
            raise RequestError(503, "no slot is free; retry later")
        return JsonResponse(found)


def routes(handlers: Endpoints | type[Endpoints]) -> list[Route]:
    """Return the routes. Given the class instead of an instance, they only describe the paths for
    the OpenAPI document."""
    posts = {
        "/v1/chat/completions": handlers.chat,
        "/chat/completions": handlers.chat,
        "/v1/completions": handlers.completions,
        "/completion": handlers.completion,
        "/completions": handlers.completion,
        "/tokenize": handlers.tokenize,
        "/detokenize": handlers.detokenize,
        "/v1/chat/completions/input_tokens": handlers.chat_tokens,
        "/chat/completions/input_tokens": handlers.chat_tokens,
        "/apply-template": handlers.apply_template,
        "/v1/messages": handlers.messages,
        "/v1/messages/count_tokens": handlers.count_tokens,
        "/v1/responses": handlers.responses,
        "/responses": handlers.responses,
        "/v1/responses/input_tokens": handlers.input_tokens,
    }
    gets = {
        "/": handlers.page,
        "/openapi.json": handlers.openapi,
        "/v1/live": handlers.live,
        "/v1/models": handlers.models,
        "/models": handlers.models,
        "/v1/models/{id:path}": handlers.model,
        "/health": handlers.health,
        "/v1/health": handlers.health,
        "/metrics": handlers.metrics,
        "/props": handlers.props,
        "/slots": handlers.slots,
    }
    return [
        *(Route(path, run, methods=["POST"]) for path, run in posts.items()),
        *(Route(path, run, methods=["GET"]) for path, run in gets.items()),
        Route("/v1/stream", handlers.stream, methods=["GET", "DELETE"]),
        *stored_routes(handlers),
    ]


def _log_generation(request: Request, generation: Generation) -> None:
    """Add the figures of a generation to the request log."""
    stats = [text.request.stats for text in generation.texts]
    request.scope["state"]["facts"] = {
        "prompt_tokens": sum(map(len, generation.job.prompts)),
        "completion_tokens": sum(s.tokens for s in stats),
        "draft_n": sum(s.drafted for s in stats),
        "draft_n_accepted": sum(s.accepted for s in stats),
        "finish": [text.finish for text in generation.texts],
    }
