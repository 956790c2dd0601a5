"""Request bodies that are read before a handler is selected."""

from __future__ import annotations

from pydantic_core import from_json
from starlette.types import Message, Receive

from g4spec.server.sse import ClientDisconnected


async def read_body(receive: Receive) -> tuple[bytes, Receive]:
    """Read a request body; return it and a `receive` that delivers it again. Raise
    ClientDisconnected if the client leaves before its end."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"".join(parts)
    return body, replay_body(body, receive)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that first delivers `body`, then what `receive` delivers."""
    delivered = False

    async def replay() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def routing_fields(body: bytes) -> tuple[str | None, str | None, bool]:
    """Return the fields `model` and `previous_response_id` (or None) and `stream` of a body; its
    handler reports an invalid body."""
    try:
        value = from_json(body)
    except ValueError:
        return None, None, False
    if not isinstance(value, dict):
        return None, None, False
    name, previous = (
        found if isinstance(found := value.get(key), str) else None
        for key in ("model", "previous_response_id")
    )
    return name, previous, value.get("stream") is True
