"""Objects kept in this process's memory for later requests, bounded in number, bytes and age."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _StoredValue(Generic[T]):
    """A kept value. size: bytes. created: on the store's clock."""

    value: T
    size: int
    created: float


class BoundedStore(Generic[T]):
    """Keeps values by id; removes the oldest first when a bound is passed.

    Bounds are checked when a value comes in, grows or is looked up. Subclasses say which values
    must stay (`is_pinned`) and clean up after those that leave (`on_remove`).

    Attributes:
        max_items: most values.
        max_bytes: most bytes of all values together.
        max_age: seconds after which a value is removed.
        size: bytes of all values.
    """

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
        self._entries: OrderedDict[str, _StoredValue[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def is_pinned(self, value: T) -> bool:
        """Tells whether the value must stay whatever the bounds say."""
        return False

    def on_remove(self, value: T) -> None:
        """Called with each value that leaves the store."""

    def put(self, id: str, value: T, size: int) -> None:
        """Adds a value of `size` bytes as the newest."""
        self.discard(id)
        self._entries[id] = _StoredValue(value, size, self._clock())
        self.size += size
        self.expire()
        self._shrink()

    def resize(self, id: str, size: int) -> None:
        """Notes that a kept value takes `size` bytes now."""
        entry = self._entries[id]
        self.size += size - entry.size
        entry.size = size
        self._shrink()

    def find(self, id: str) -> T | None:
        self.expire()
        entry = self._entries.get(id)
        return None if entry is None else entry.value

    def values(self) -> list[T]:
        """Returns all values, oldest first."""
        self.expire()
        return [entry.value for entry in self._entries.values()]

    def size_of(self, id: str) -> int:
        """Returns the bytes of a kept value."""
        return self._entries[id].size

    def discard(self, id: str) -> None:
        """Removes the value of this id, if there is one."""
        entry = self._entries.pop(id, None)
        if entry is not None:
            self.size -= entry.size
            self.on_remove(entry.value)

    def expire(self) -> None:
        """Removes the values that are older than `max_age`."""
        oldest = self._clock() - self.max_age
        for id, entry in self._unpinned():
            if entry.created > oldest:
                break
            self.discard(id)

    def _shrink(self) -> None:
        for id, _ in self._unpinned():
            if len(self._entries) <= self.max_items and self.size <= self.max_bytes:
                break
            self.discard(id)

    def _unpinned(self) -> Iterator[tuple[str, _StoredValue[T]]]:
        """Yields the entries that may be removed, oldest first."""
        for id, entry in list(self._entries.items()):
            if not self.is_pinned(entry.value):
                yield id, entry
