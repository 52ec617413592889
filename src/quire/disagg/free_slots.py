"""The free slots of the memory between engines."""

from __future__ import annotations

import threading
import time


class FreeSlots:
    """The free slots `begin` to `end` - 1 of each group. From any thread."""

    def __init__(self, groups: int, begin: int, end: int) -> None:
        self._free = [list(range(begin, end)) for _ in range(groups)]
        self._changed = threading.Condition()
        self.total = end - begin

    def take(self, group: int, most: int) -> list[int]:
        """Returns up to `most` slots, perhaps none."""
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
