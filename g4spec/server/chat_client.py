"""Backends of `g4spec chat`: here over HTTP; `local_chat.py` runs an engine in this process.

This module does not import torch: a client of a remote server does not need it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from g4spec.errors import EnvironmentProblem, G4Error, InputError, UsageError
from g4spec.ranges import check_key
from g4spec.server.addresses import is_loopback

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of the text of an answer.

    Attributes:
        part: "text", "thought", "call" or "mark".
        kind: origin of the tokens (`g4spec.server.live.TokenOrigins`); "rejected" for a drafted
            token that is not part of the text; "" where origins were not requested.
    """

    text: str
    part: str = "text"
    kind: str = ""


@dataclass(slots=True)
class Reply:
    """The answer received so far.

    Attributes:
        content: text without reasoning.
        finish: finish reason of OpenAI's API; "" while the answer is incomplete.
        timings: llama.cpp's `timings` fields, as far as they are known.
        notes: remarks of the engine, such as a reduced draft length.
    """

    content: str = ""
    finish: str = ""
    timings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class ChatBackend(Protocol):
    """An interface that generates chat answers."""

    def answer(
        self, messages: Sequence[Message], seed: int, reply: Reply
    ) -> AsyncGenerator[TextPiece, None]:
        """Yield the next answer of a conversation in pieces, and update `reply`.

        Closing the generator early cancels the generation. Raise G4Error if it fails.
        """

    async def close(self) -> None:
        """Release all resources."""


def with_rejected(pieces: Sequence[Mapping[str, Any]], rejected: Sequence[str]) -> list[TextPiece]:
    """Convert pieces of the live view; insert the first rejected token before its correction."""
    out = []
    for piece in pieces:
        if piece["kind"] == "corrected" and rejected:
            out.append(TextPiece(str(rejected[0]), str(piece["part"]), "rejected"))
        out.append(TextPiece(str(piece["text"]), str(piece["part"]), str(piece["kind"])))
    return out


class RemoteChat:
    """Chat with a server over OpenAI's chat completions API.

    Args:
        url: base URL, with or without /v1.
        key: API key, or None.
        fields: additional fields of each request.
        show_origins: label each token as accepted, corrected or the target's own. Requires a
            g4spec server, since it reads /v1/live.
    """

    def __init__(
        self, url: str, key: str | None, fields: Mapping[str, Any], *, show_origins: bool = False
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._fields, self._show_origins = dict(fields), show_origins
        if key:
            check_key(key)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            host = httpx.URL(self.url).host
        except httpx.InvalidURL as error:
            raise self._no_answer(error) from None
        # A proxy set in the environment cannot reach this machine's own addresses.
        proxies, timeout = not is_loopback(host), httpx.Timeout(None, connect=10)
        try:
            self._http = httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=proxies)
        except (httpx.InvalidURL, ValueError) as error:
            raise UsageError(
                "the environment sets a proxy with a malformed address",
                found=str(error),
                fix="correct or unset HTTP_PROXY, HTTPS_PROXY and ALL_PROXY",
            ) from None
        except OSError as error:
            raise UsageError(
                "cannot read the certificates that SSL_CERT_FILE or SSL_CERT_DIR names",
                found=error.strerror,
                fix="correct or unset the variable",
            ) from None

    async def model(self) -> str:
        """Return the id of the first model that the server lists."""
        try:
            response = await self._http.get(f"{self.url}/v1/models")
            await _raise_for_status(response)
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._no_answer(error) from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise InputError(
                f"{self.url}/v1/models: the response is not a list of models"
            ) from None

    def _no_answer(self, error: Exception) -> G4Error:
        return EnvironmentProblem(
            f"no answer from {self.url}",
            found=str(error) or repr(error),
            fix="check the address, and that the server is running",
        )

    async def answer(
        self, messages: Sequence[Message], seed: int, reply: Reply
    ) -> AsyncGenerator[TextPiece, None]:
        """See `ChatBackend`."""
        body = {"messages": list(messages), "stream": True, "seed": seed, **self._fields}
        run = (
            self._stream_with_origins(body, reply)
            if self._show_origins
            else self._stream(body, reply)
        )
        try:
            async with aclosing(run) as pieces:
                async for piece in pieces:
                    yield piece
        except httpx.HTTPError as error:
            raise self._no_answer(error) from None

    async def _stream(
        self, body: Mapping[str, Any], reply: Reply
    ) -> AsyncGenerator[TextPiece, None]:
        url = f"{self.url}/v1/chat/completions"
        async with self._http.stream("POST", url, json=body) as response:
            await _raise_for_status(response)
            async with aclosing(_events(response)) as events:
                async for _, data in events:
                    for piece in _parse_event(_delta_pieces, data, reply):
                        yield piece

    async def _stream_with_origins(
        self, body: dict[str, Any], reply: Reply
    ) -> AsyncGenerator[TextPiece, None]:
        """Stream the answer, but yield the pieces that /v1/live reports, with their origins."""
        word = secrets.token_hex(16)
        url = f"{self.url}/v1/live?of={word}"

        async def ask() -> None:
            async with aclosing(self._stream({**body, "live": word}, reply)) as pieces:
                async for _ in pieces:
                    pass

        async with (
            self._http.stream("GET", url) as response,
            aclosing(_events(response)) as events,
        ):
            await _raise_for_status(response)
            await anext(events, None)  # the first event: the subscription is active
            answer = asyncio.ensure_future(ask())
            try:
                async for name, data in events:
                    if answer.done() and answer.exception() is not None:
                        break
                    if data.get("yours"):
                        for piece in _parse_event(_origin_pieces, data):
                            yield piece
                    if data.get("yours") and name == "end":
                        break
                await answer
            finally:
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)

    async def close(self) -> None:
        """See `ChatBackend`."""
        await self._http.aclose()


def _parse_event(
    read: Callable[..., list[TextPiece]], data: dict[str, Any], *more: Any
) -> list[TextPiece]:
    """Return `read(data, *more)`; raise InputError if the event has an unexpected format."""
    try:
        return read(data, *more)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise InputError(
            "the server sent an unexpected event", found=f"{json.dumps(data):.80}"
        ) from None


def _delta_pieces(data: dict[str, Any], reply: Reply) -> list[TextPiece]:
    """Return the pieces of a chat completion chunk, and update `reply`."""
    if "error" in data:
        error = data["error"]
        raise InputError(str(error["message"] if isinstance(error, dict) else error))
    timings = data.get("timings") or {}
    if timings:
        reply.timings = {k: v for k, v in timings.items() if isinstance(v, int | float)}
        reply.notes = list(map(str, timings.get("notes", [])))
    out = []
    for choice in data.get("choices", [])[:1]:
        delta = choice.get("delta", {})
        reply.finish = str(choice.get("finish_reason") or reply.finish)
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        text = delta.get("content")
        reply.content += text or ""
        out = [
            TextPiece("" + some, part)
            for part, some in (("thought", thought), ("text", text))
            if some
        ]
    return out


def _origin_pieces(data: dict[str, Any]) -> list[TextPiece]:
    """Return the pieces of an event of /v1/live."""
    return with_rejected(data.get("pieces", []), data.get("rejected", []))


async def _events(response: httpx.Response) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    """Yield (name, data) of each server-sent event."""
    name, lines = "message", response.aiter_lines()
    try:
        async for line in lines:
            if line.startswith("event:"):
                name = line[6:].strip()
            elif line.startswith("data:") and line[5:].strip() != "[DONE]":
                yield name, _event_data(line[5:])
            elif not line:
                name = "message"
    finally:
        if isinstance(lines, AsyncGenerator):
            await lines.aclose()
        await asyncio.sleep(0)  # httpx's inner generators are closed by tasks of their own


def _event_data(text: str) -> dict[str, Any]:
    """Parse the data of an event; raise InputError if it is not a JSON object."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise InputError(
            "the server sent an event that is not a JSON object", found=f"data:{text:.75}"
        ) from None


async def _raise_for_status(response: httpx.Response) -> None:
    """Raise InputError with the server's message if the status is 400 or above."""
    if response.status_code < 400:
        return
    try:
        error = json.loads(await response.aread())["error"]
        message = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, RecursionError):
        message = ""
    fix = None
    if response.status_code == 401:
        fix = "pass the server's key with `api_key`"
    elif not message:
        fix = "check the address, and that a server with OpenAI's API runs there"
    message = message or f"{response.status_code} from {response.url}"
    raise InputError(f"{response.url.path}: {message}", fix=fix)
