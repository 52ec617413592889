"""Responses that can be fetched, continued, watched and cancelled later: bounded in number, bytes
and age. They live in this process's memory and end with it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from quire.server.errors import ApiError
from quire.server.openai_responses.events import ResponseWriter, Sent
from quire.server.openai_responses.items import Item, parse_item
from quire.server.openai_responses.objects import Response

_ITEM_BYTES = 512
"""What an item takes besides its text, about."""


@dataclass(eq=False)
class Record:
    """A response with the items it answers: those of earlier turns, then its own input. `task` is
    set while it runs in the background, whose events are kept for those who watch it."""

    writer: ResponseWriter
    input: tuple[Item, ...]
    events: list[Sent] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    size: int = 0
    created: float = 0.0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def response(self) -> Response:
        return self.writer.response

    @property
    def running(self) -> bool:
        return self.response.status in ("queued", "in_progress")

    @property
    def output(self) -> tuple[Item, ...]:
        """What the model said, as input of a later turn."""
        return tuple(parse_item(msgspec.to_builtins(item)) for item in self.response.output)

    @property
    def history(self) -> tuple[Item, ...]:
        """What the next turn begins with."""
        return (*self.input, *self.output)

    def tell(self, events: Iterable[Sent] = ()) -> None:
        """More events, or the end, for those who watch."""
        self.events += events
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def watch(self, after: int) -> AsyncIterator[list[Sent]]:
        """The events whose sequence number is greater than `after`, until the last."""
        place = after + 1
        while True:
            news = self._news
            if place < len(self.events):
                events, place = self.events[place:], len(self.events)
                yield events
            elif not self.running:
                return
            else:
                await news.wait()


class ResponseStore:
    """The oldest go first, whenever one comes in or is looked for; those that still run stay."""

    def __init__(
        self,
        max_items: int,
        max_bytes: int,
        max_age: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.max_age = max_age
        self.size = 0
        self._clock = clock
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._items: dict[str, Item] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Raises ApiError, 429, where running responses leave no room for another."""
        self._expire()
        running = [other for other in self._records.values() if other.running]
        full = len(running) >= self.max_items or sum(o.size for o in running) >= self.max_bytes
        if record.running and full:
            raise ApiError(
                429,
                f"{len(running)} responses run in the background, which is all that fit.",
                code="rate_limit_exceeded",
            )
        record.created = self._clock()
        self._records[record.response.id] = record
        self._resize(record, _size_of(record))

    def grow(self, record: Record, events: list[Sent]) -> None:
        """A running response has more events, or has ended."""
        record.tell(events)
        if self._records.get(record.response.id) is record:
            self._resize(record, record.size + sum(len(event.data) for event in events))

    def _resize(self, record: Record, size: int) -> None:
        self.size += size - record.size
        record.size = size
        if not record.running:
            self._items |= {item.id: item for item in record.output if item.id is not None}
        self._shrink()

    def get(self, id: str, param: str) -> Record:
        """Raises ApiError, 404, naming the id."""
        self._expire()
        record = self._records.get(id)
        if record is None:
            raise ApiError(
                404,
                f"Response with id '{id[:200]}' not found: it was never stored, or is no longer "
                f"(see '{param}').",
                param=param,
                code="response_not_found",
            )
        return record

    def item(self, id: str) -> Item | None:
        """An item that a stored response has put out, which an `item_reference` may name. Items of
        the input are not to be had by their ids, which clients choose, and so could guess."""
        self._expire()
        return self._items.get(id)

    def remove(self, record: Record) -> None:
        """Takes it out, and ends it where it runs."""
        if record.task is not None:
            record.task.cancel()
        if self._records.pop(record.response.id, None) is not None:
            self.size -= record.size
            for item in record.response.output:
                self._items.pop(item.id, None)

    def _expire(self) -> None:
        oldest = self._clock() - self.max_age
        for record in list(self._records.values()):
            if record.created > oldest:
                break
            if not record.running:
                self.remove(record)

    def _shrink(self) -> None:
        for record in list(self._records.values()):
            if len(self._records) <= self.max_items and self.size <= self.max_bytes:
                break
            if not record.running:
                self.remove(record)


def _size_of(record: Record) -> int:
    """About how many bytes the record holds. Items that turns share are counted with each of them:
    too much, so that the bound holds."""
    texts = sum(_ITEM_BYTES + len(item.text) for item in record.input)
    return texts + len(msgspec.json.encode(record.response))
