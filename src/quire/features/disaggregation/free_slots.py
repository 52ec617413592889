"""The places where peers read blocks: slots of the memory between engines, or the cache itself."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from quire.arrays import Int32

_BATCH = 16
"""Most blocks of one message that are copied to slots."""
_LARGE_BATCH = 1024
"""Most blocks of one message that the peer reads in the cache."""


class PeerSlots(Protocol):
    """The places where the peer reads the blocks of a message."""

    def put(self, group: int, blocks: Int32) -> list[int]:
        """Returns the places where the reader finds the first blocks; empty if none is free."""
        ...

    def give(self, group: int, slots: list[int]) -> None:
        """Frees places that `put` has returned."""
        ...

    def num_free(self, group: int) -> int:
        """Counts the free places."""
        ...


class BlocksInPlace:
    """Places of a reader that reads the cache itself: a block's place is the block."""

    def put(self, group: int, blocks: Int32) -> list[int]:
        found: list[int] = blocks[:_LARGE_BATCH].tolist()
        return found

    def give(self, group: int, slots: list[int]) -> None:
        pass

    def num_free(self, group: int) -> int:
        return _LARGE_BATCH


class FreeSlots:
    """The free slots `begin` to `end` - 1 of each group. From any thread."""

    def __init__(self, groups: int, begin: int, end: int) -> None:
        self.groups = groups
        self._free = [list(range(begin, end)) for _ in range(groups)]
        self._changed = threading.Condition()
        self.total = end - begin

    def put(self, group: int, blocks: Int32) -> list[int]:
        """Returns slots for the first blocks; empty if no slot is free."""
        most = min(_BATCH, len(blocks))
        with self._changed:
            free = self._free[group]
            taken, self._free[group] = free[:most], free[most:]
            return taken

    def await_many(self, group: int, count: int, patience: float) -> list[int]:
        """Waits for `count` free slots and returns them; empty after `patience` seconds."""
        deadline = time.monotonic() + patience
        with self._changed:
            while len(self._free[group]) < count:
                left = deadline - time.monotonic()
                if left <= 0.0 or not self._changed.wait(left):
                    break
            if len(self._free[group]) < count:
                return []
            free = self._free[group]
            taken, self._free[group] = free[:count], free[count:]
            return taken

    def give(self, group: int, slots: list[int]) -> None:
        """Frees slots."""
        with self._changed:
            self._free[group] += slots
            self._changed.notify_all()

    def num_free(self, group: int) -> int:
        with self._changed:
            return len(self._free[group])

    @property
    def used(self) -> int:
        """Counts the taken slots of all groups."""
        with self._changed:
            return sum(self.total - len(free) for free in self._free)
