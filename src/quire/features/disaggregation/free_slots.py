"""Places of blocks for a peer: free slots of the memory between engines, or where they are."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from quire.arrays import Int32

_BATCH = 16
"""Most blocks that are put into slots for one message."""
_LARGE_BATCH = 1024
"""Most blocks of one message that stay where they are."""


class PeerSlots(Protocol):
    """Places of the blocks of messages."""

    def put(self, group: int, blocks: Int32) -> list[int]:
        """Returns where the first of some blocks are for the reader, perhaps none."""
        ...

    def give(self, group: int, slots: list[int]) -> None:
        """Takes back what `put` has given."""
        ...

    def num_free(self, group: int) -> int:
        """Counts the blocks that could be put now."""
        ...


class BlocksInPlace:
    """The blocks of the cache themselves, which are read there."""

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
        """Returns slots for the first of some blocks, perhaps none."""
        most = min(_BATCH, len(blocks))
        with self._changed:
            free = self._free[group]
            taken, self._free[group] = free[:most], free[most:]
            return taken

    def await_many(self, group: int, count: int, patience: float) -> list[int]:
        """Returns `count` slots, once there are as many; none after `patience` seconds."""
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
        """Takes slots back."""
        with self._changed:
            self._free[group] += slots
            self._changed.notify_all()

    def num_free(self, group: int) -> int:
        with self._changed:
            return len(self._free[group])

    @property
    def used(self) -> int:
        """Counts the slots of all groups that are taken."""
        with self._changed:
            return sum(self.total - len(free) for free in self._free)
