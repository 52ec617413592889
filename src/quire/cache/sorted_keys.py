"""A sorted set of byte strings with cheap insertion and removal."""

from __future__ import annotations

from bisect import bisect_left, insort

_MOST = 1024
"""Most keys of one list."""


class SortedKeys:
    """Distinct keys, in several short lists, so that adding and removing one is cheap.

    `_lasts` has each list's last key.
    """

    __slots__ = ("_lasts", "_parts")

    def __init__(self) -> None:
        self._parts: list[list[bytes]] = []
        self._lasts: list[bytes] = []

    def keys(self) -> list[bytes]:
        """Returns all keys. For tests."""
        return [key for part in self._parts for key in part]

    def add(self, key: bytes) -> None:
        """Adds a key that is not there yet."""
        lasts = self._lasts
        place = bisect_left(lasts, key)
        if place < len(lasts):
            part = self._parts[place]
            insort(part, key)
        elif lasts:
            place -= 1
            part = self._parts[place]
            part.append(key)
            lasts[place] = key
        else:
            self._parts.append([key])
            lasts.append(key)
            return
        if len(part) > _MOST:
            self._parts[place : place + 1] = [part[: _MOST // 2], part[_MOST // 2 :]]
            lasts.insert(place, part[_MOST // 2 - 1])

    def remove(self, key: bytes) -> None:
        """Removes a key that is there."""
        place = bisect_left(self._lasts, key)
        part = self._parts[place]
        index = bisect_left(part, key)
        if part[index] != key:
            raise KeyError(key)
        del part[index]
        if not part:
            del self._parts[place], self._lasts[place]
        elif index == len(part):
            self._lasts[place] = part[-1]

    def around(self, key: bytes) -> tuple[bytes | None, bytes | None]:
        """Returns the largest key below this one, and the smallest key that is not below it."""
        lasts = self._lasts
        place = bisect_left(lasts, key)
        before = lasts[place - 1] if place else None
        if place == len(lasts):
            return before, None
        part = self._parts[place]
        index = bisect_left(part, key)
        return part[index - 1] if index else before, part[index]
