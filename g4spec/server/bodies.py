"""Bodies of requests that are read before it is known who answers them."""

from __future__ import annotations

from pydantic_core import from_json
from starlette.types import Message, Receive


async def read_body(receive: Receive) -> tuple[bytes, Receive]:
    """Read a body; returns it, and what gives it to whoever reads it next (`replay_body`)."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"".join(parts)
    return body, replay_body(body, receive)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return what gives this body to whoever reads it next, and then what `receive` does."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def model_name(body: bytes) -> str | None:
    """Return the model that a body names; whoever handles it says what is wrong with it."""
    try:
        value = from_json(body)
    except ValueError:
        return None
    name = value.get("model") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None
