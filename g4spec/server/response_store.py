"""Storage of responses for `previous_response_id` and GET, and background responses."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from g4spec.server.fields import Json
from g4spec.server.json_response import dumps
from g4spec.server.request_errors import RequestError, check_query, internal
from g4spec.server.service import Generation, Service

MAX_RESPONSES = 1000
"""Maximum number of stored responses."""

MAX_BYTES = 64 << 20
"""Maximum total size of stored responses as JSON, in bytes; least recently used go first."""


@dataclass(slots=True)
class Record:
    """A stored response.

    Attributes:
        owner: hash of the API key; only requests with the same key can access it.
        response: the response object, updated during generation.
        items: input items: those of previous responses and of the request.
        generation, work: of a running background response; None otherwise.
        events: formatted events of a streamed background response; None otherwise.
    """

    owner: str | None
    response: Json
    items: list[Json]
    generation: Generation | None = None
    work: asyncio.Task[None] | None = None
    cancelled: bool = False
    events: list[str] | None = None
    size: int = field(default=0, init=False)
    _ended: bool = field(default=False, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def close(self) -> None:
        """Do nothing: the client may reconnect. See `sse.StreamSource`."""

    def add_event(self, event: str = "", *, ended: bool = False) -> None:
        """Record an event and wake all readers; `ended`: it was the last one."""
        if event and self.events is not None:
            self.events.append(event)
        self._ended |= ended
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[str, None]:
        """Yield the events after number `after`, until the response ends."""
        assert self.events is not None
        at = max(after + 1, 0)
        while at < len(self.events) or not self._ended:
            if at < len(self.events):
                yield self.events[at]
                at += 1
            else:
                await self._news.wait()

    @property
    def context(self) -> list[Json]:
        """Return all items of the conversation, including the response."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """Responses by id, in memory. Used from one event loop only."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._size = 0
        self._tasks: dict[asyncio.Task[None], Service] = {}

    def run(self, record: Record, service: Service, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which generates a response with `service`, in the background."""
        record.work = asyncio.create_task(work)
        self._tasks[record.work] = service
        record.work.add_done_callback(self._end_work)

    def _end_work(self, work: asyncio.Task[None]) -> None:
        service = self._tasks.pop(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            service.metrics.count_error(internal(error).status)

    def put(self, record: Record) -> None:
        """Store a response, or replace it by its new state."""
        name = record.response["id"]
        if name in self._records:
            self._drop(name)
        record.size = len(dumps([record.response, record.items]).encode())
        record.size += sum(map(len, record.events or ()))
        self._records[name] = record
        self._size += record.size
        while len(self._records) > self._most or self._size > self._most_bytes:
            self._drop(next(iter(self._records)))

    def get(self, name: str, owner: str | None) -> Record:
        """Return a response; raise RequestError (404) if it is unknown or has another owner."""
        record = self._records.get(name)
        if record is None or record.owner != owner:
            raise RequestError(
                404,
                f"there is no response {name!r:.80}: it was not stored, was deleted, or was "
                "evicted for newer ones",
                code="response_not_found",
            )
        self._records.move_to_end(name)
        return record

    def delete(self, name: str, owner: str | None) -> Json:
        """Delete a response; cancel it if it is running."""
        record = self.get(name, owner)
        if record.generation is not None:
            record.cancelled = True
            record.generation.close()
        self._drop(name)
        return {"id": name, "object": "response", "deleted": True}

    def _drop(self, name: str) -> None:
        self._size -= self._records.pop(name).size

    def keeps(self, record: Record) -> bool:
        """Return True if a response is still stored."""
        return self._records.get(record.response["id"]) is record

    async def cancel(self, name: str, owner: str | None) -> Json:
        """Cancel a background response; a finished one is returned unchanged."""
        record = self.get(name, owner)
        if not record.response["background"]:
            raise RequestError(
                400,
                "only a response with background: true can be cancelled; close the connection "
                "to cancel any other",
            )
        if record.generation is not None and record.work is not None:
            record.cancelled = True
            record.generation.close()
            await asyncio.wait({record.work})
        return record.response

    def find(self, items: Sequence[Json], owner: str | None) -> list[Json]:
        """Replace item references by the items of stored responses."""
        names = [item["id"] for item in items if item["type"] == "item_reference"]
        if len(distinct := set(names)) < len(names):
            raise RequestError(
                400,
                "item_reference: two have the same id; refer to each item once",
                param="input",
            )
        found = self._named(distinct, owner) if names else {}
        if missing := [name for name in names if name not in found]:
            raise RequestError(
                400,
                f"item_reference: there is no item {missing[0]!r:.80} in the stored responses",
                param="input",
            )
        return [found[i["id"]] if i["type"] == "item_reference" else i for i in items]

    def writer(self, names: Sequence[str], owner: str | None) -> str | None:
        """Return the model that wrote the last of the items with these ids that a model wrote, or
        None."""
        wrote = {
            item["id"]: str(record.response["model"])
            for record in (self._records.values() if names else ())
            if record.owner == owner
            for item in record.response["output"]
        }
        return next((wrote[name] for name in reversed(names) if name in wrote), None)

    def _named(self, names: set[str], owner: str | None) -> dict[str, Json]:
        """Return the stored items with these ids, of the most recently used response each.

        All responses are read once, whatever the number of ids: the server waits for it.
        """
        found: dict[str, Json] = {}
        for record in reversed(self._records.values()):
            for item in record.context if record.owner == owner else ():
                if item["id"] in names:
                    found.setdefault(item["id"], item)
            if len(found) == len(names):
                break
        return found

    def list_items(self, record: Record, query: Any) -> Json:
        """Return a page of the input items of a response.

        Args:
            query: parameters `limit` (1 to 100), `order` ("asc" or "desc"), `after` (an id).
        """
        check_query(query, {"limit", "order", "after", "model"})
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if not re.fullmatch("[0-9]{1,4}", limit) or not 1 <= int(limit) <= 100:
            raise RequestError(400, "limit: expected 1 to 100", param="limit")
        if order not in ("asc", "desc"):
            raise RequestError(400, "order: expected asc or desc", param="order")
        found = record.items if order == "asc" else record.items[::-1]
        if (after := query.get("after")) is not None:
            at = next((i for i, item in enumerate(found) if item["id"] == after), None)
            if at is None:
                raise RequestError(400, f"after: there is no item {after!r:.80}", param="after")
            found = found[at + 1 :]
        page = found[: int(limit)]
        return {
            "object": "list",
            "data": page,
            "has_more": len(found) > len(page),
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
        }

    async def close(self, service: Service) -> None:
        """Cancel the background responses that a service generates."""
        tasks = [task for task, user in self._tasks.items() if user is service]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
