"""Responses that can be fetched, continued, watched and cancelled later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from quire.server.apis.responses.events import ResponseEvent, ResponseWriter
from quire.server.apis.responses.items import Item, OutputItem, OutputMessage, Response, parse_item
from quire.server.errors import ApiError
from quire.server.store import BoundedStore

_ITEM_BYTES = 512
"""Estimate of an item's bytes besides its text."""


@dataclass(eq=False)
class StoredResponse:
    """A response with the items it answers.

    Attributes:
        input: items of earlier turns, then the request's own.
        owner: digest of the API key whose requests may see it.
        events: kept where the response runs in the background, for those who watch it.
        task: set while the response runs in the background.
    """

    writer: ResponseWriter
    input: tuple[Item, ...]
    owner: bytes
    events: list[ResponseEvent] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def response(self) -> Response:
        return self.writer.response

    @property
    def running(self) -> bool:
        return self.response.status in ("queued", "in_progress")

    @property
    def output(self) -> tuple[Item, ...]:
        """The model's items, as input of a later turn."""
        return tuple(parse_item(_as_input(item)) for item in self.response.output)

    @property
    def history(self) -> tuple[Item, ...]:
        """The items that the next turn begins with."""
        return (*self.input, *self.output)

    def append(self, events: Iterable[ResponseEvent]) -> None:
        """Adds events and wakes those who watch. No events: the response has ended."""
        self.events += events
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self, after: int) -> AsyncIterator[list[ResponseEvent]]:
        """Yields the events whose sequence number is greater than `after`, until the last."""
        place = after + 1
        while True:
            changed = self._changed
            if place < len(self.events):
                events, place = self.events[place:], len(self.events)
                yield events
            elif not self.running:
                return
            else:
                await changed.wait()


class ResponseSource(Protocol):
    """Finds responses that a request continues, and items that it names."""

    def get(self, id: str, param: str, owner: bytes) -> StoredResponse: ...

    def item(self, id: str, owner: bytes) -> Item | None: ...


class ResponseStore(BoundedStore[StoredResponse]):
    """Keeps responses and the items that they put out, each for its owner.

    Responses that still run stay.
    """

    def __init__(
        self,
        max_items: int,
        max_bytes: int,
        max_age: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_items, max_bytes, max_age, clock)
        self._items: dict[str, tuple[Item, bytes]] = {}

    def is_pinned(self, value: StoredResponse) -> bool:
        return value.running

    def on_remove(self, value: StoredResponse) -> None:
        for item in value.response.output:
            self._items.pop(item.id, None)

    def add(self, stored: StoredResponse) -> None:
        """Keeps a response. Raises ApiError, 429, where running responses leave no room for
        another."""
        running = [other for other in self.values() if other.running]
        size = sum(self.size_of(other.response.id) for other in running)
        full = len(running) >= self.max_items or size >= self.max_bytes
        if stored.running and full:
            raise ApiError(
                429,
                f"{len(running)} responses run in the background, which is all that fit.",
                code="rate_limit_exceeded",
            )
        self._index(stored)
        self.put(stored.response.id, stored, _size_of(stored))

    def grow(self, stored: StoredResponse, events: list[ResponseEvent]) -> None:
        """Takes in a running response's new events, or its end."""
        stored.append(events)
        id = stored.response.id
        if self.find(id) is stored:
            self._index(stored)
            self.resize(id, self.size_of(id) + sum(len(event.data) for event in events))

    def _index(self, stored: StoredResponse) -> None:
        """Makes the items of a response that has ended known by their ids."""
        if not stored.running:
            self._items |= {
                item.id: (item, stored.owner) for item in stored.output if item.id is not None
            }

    def get(self, id: str, param: str, owner: bytes) -> StoredResponse:
        """Returns a stored response. Raises ApiError, 404, naming the id."""
        stored = self.find(id)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"Response with id '{id[:200]}' not found: it was never stored, or is no longer "
                f"(see '{param}').",
                param=param,
                code="response_not_found",
            )
        return stored

    def item(self, id: str, owner: bytes) -> Item | None:
        """Returns an item that a stored response of `owner` put out.

        An `item_reference` may name it.

        Items of the input are not found: clients choose their ids, and so could guess them.
        """
        self.expire()
        item, its_owner = self._items.get(id, (None, b""))
        return item if its_owner == owner else None

    def remove(self, stored: StoredResponse) -> None:
        """Removes a response, and ends it where it runs."""
        if stored.task is not None:
            stored.task.cancel()
        self.discard(stored.response.id)


def _as_input(item: OutputItem) -> Any:
    """Returns an item as requests have it, without log-probabilities, which are not used."""
    if isinstance(item, OutputMessage):
        item = replace(item, content=[replace(part, logprobs=[]) for part in item.content])
    return msgspec.to_builtins(item)


def _size_of(stored: StoredResponse) -> int:
    """Estimates the bytes that a response holds.

    Items that turns share are counted with each of them: too much, so that the bound holds.
    """
    texts = sum(_ITEM_BYTES + len(item.text) for item in stored.input)
    return texts + len(msgspec.json.encode(stored.response))
