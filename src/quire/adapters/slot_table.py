"""The device's slots: which adapter each holds, and which requests use it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Slot:
    """A slot. digest: of the adapter in it, "" for none. users: ids of requests that run with it.
    used: when a request last began or ended with it, counted in such events."""

    digest: str = ""
    users: set[str] = field(default_factory=set)
    used: int = 0


class SlotTable:
    """The slots of a device. An adapter is found by its digest, so that adapters of the same
    contents share one.

    A slot that requests use is never given away. Where an adapter waits and all slots are used, the
    slot that was used least recently is closed: it takes no new requests, so that it will be free
    however many come.
    """

    def __init__(self, count: int) -> None:
        self._slots = [Slot() for _ in range(count)]
        self._places: dict[str, int] = {}
        self._closed: set[int] = set()
        self._events = 0

    @property
    def resident(self) -> int:
        """Slots that hold an adapter."""
        return len(self._places)

    def place(self, digest: str) -> int:
        """Returns the slot of an adapter, -1 if it has none."""
        return self._places.get(digest, -1)

    def enter(self, digest: str, request_id: str) -> bool:
        """Adds a request to an adapter's slot. Returns False if it has none, or its slot is
        closed."""
        place = self.place(digest)
        if place < 0:
            return False
        slot = self._slots[place]
        if request_id in slot.users:
            return True
        if place in self._closed:
            return False
        slot.users.add(request_id)
        self._touch(slot)
        return True

    def leave(self, digest: str, request_id: str) -> None:
        """Takes a request off its adapter's slot. Idempotent."""
        place = self.place(digest)
        if place >= 0 and request_id in self._slots[place].users:
            self._slots[place].users.discard(request_id)
            self._touch(self._slots[place])

    def take(self) -> int:
        """Empties the slot that was used least recently and that no request uses. Returns its
        place, or -1: there is none yet."""
        free = [place for place, slot in enumerate(self._slots) if not slot.users]
        if not free:
            open_ones = [p for p in range(len(self._slots)) if p not in self._closed]
            if not self._closed and open_ones:
                self._closed.add(min(open_ones, key=lambda place: self._slots[place].used))
            return -1
        place = min(free, key=lambda p: (p not in self._closed, self._slots[p].used))
        self._closed.discard(place)
        slot = self._slots[place]
        self._places.pop(slot.digest, None)
        slot.digest = ""
        return place

    def fill(self, place: int, digest: str) -> None:
        """Notes that an empty slot now holds an adapter."""
        slot = self._slots[place]
        slot.digest = digest
        self._places[digest] = place
        self._touch(slot)

    def reopen(self) -> None:
        """Opens closed slots: nobody waits."""
        self._closed.clear()

    def _touch(self, slot: Slot) -> None:
        self._events += 1
        slot.used = self._events
