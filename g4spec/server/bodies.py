"""Request bodies that are read before a handler is selected."""

from __future__ import annotations

from codecs import BOM_UTF8
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class RoutingFields:
    """The fields of a body that select its model.

    Attributes:
        model, previous: `model` and `previous_response_id`, or None.
        references: ids of the item references in `input`.
        streams: `stream` is true.
    """

    model: str | None = None
    previous: str | None = None
    references: tuple[str, ...] = ()
    streams: bool = False


def routing_fields(body: bytes) -> RoutingFields:
    """Return the fields of a body that select its model; its handler reports an invalid body."""
    try:
        value = from_json(body.removeprefix(BOM_UTF8))
    except ValueError:
        return RoutingFields()
    if not isinstance(value, dict):
        return RoutingFields()
    name, previous = (
        found if isinstance(found := value.get(key), str) else None
        for key in ("model", "previous_response_id")
    )
    items = found if isinstance(found := value.get("input"), list) else []
    references = (
        item.get("id")
        for item in items
        if isinstance(item, dict) and item.get("type") == "item_reference"
    )
    named = tuple(each for each in references if isinstance(each, str))
    return RoutingFields(name, previous, named, value.get("stream") is True)
