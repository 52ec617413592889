"""Which block contents lie in the host's pool, and in which slot. An index: it touches no bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class HostTier:
    """`slots` places for blocks, each known by the key of its contents.

    An entry is *arriving* while its bytes are on their way into the slot, *pinned* while something
    reads the slot, else *settled*. Settled entries stand in the order of their last use, and the
    oldest gives up its slot when a new one needs it. So no slot changes its contents while a copy
    touches it. Every operation is O(1) per key.
    """

    def __init__(self, slots: int) -> None:
        self.num_slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._settled: OrderedDict[bytes, int] = OrderedDict()
        self._pinned: dict[bytes, tuple[int, int]] = {}
        self._arriving: dict[bytes, int] = {}
        self.evictions = 0
        """Entries that gave up their slot for others."""

    def __len__(self) -> int:
        return len(self._settled) + len(self._pinned) + len(self._arriving)

    def __contains__(self, key: bytes) -> bool:
        return key in self._settled or key in self._pinned or key in self._arriving

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holds(self, key: bytes) -> bool:
        """Whether the contents are there to be read."""
        return key in self._settled or key in self._pinned

    def touch(self, key: bytes) -> None:
        """It was used just now."""
        if key in self._settled:
            self._settled.move_to_end(key)

    def expect(self, key: bytes) -> int | None:
        """A slot for contents that are about to arrive, the oldest entry's if none is free. None:
        every slot is being copied to or from. The key must not be there."""
        if self._free:
            slot = self._free.pop()
        elif self._settled:
            _, slot = self._settled.popitem(last=False)
            self.evictions += 1
        else:
            return None
        self._arriving[key] = slot
        return slot

    def arrived(self, key: bytes, good: bool) -> None:
        """What was expected is there, or has failed to come."""
        slot = self._arriving.pop(key)
        if good:
            self._settled[key] = slot
        else:
            self._free.append(slot)

    def pin(self, key: bytes) -> int:
        """The slot of contents that are there; they stay until `unpin`."""
        slot, count = self._pinned.get(key) or (self._settled.pop(key), 0)
        self._pinned[key] = slot, count + 1
        return slot

    def unpin(self, key: bytes, good: bool = True) -> None:
        """One reader less; the last one says whether the contents are worth keeping."""
        slot, count = self._pinned.pop(key)
        if count > 1:
            self._pinned[key] = slot, count - 1
        elif good:
            self._settled[key] = slot
        else:
            self._free.append(slot)

    def oldest(self, most: int) -> list[bytes]:
        """Up to `most` settled keys, those that would go first."""
        return [key for key, _ in zip(self._settled, range(most), strict=False)]

    def drop(self, key: bytes) -> None:
        """Give up a settled entry."""
        self._free.append(self._settled.pop(key))

    def clear(self) -> None:
        """Give up every settled entry; those being copied stay until they settle."""
        self._free.extend(self._settled.values())
        self._settled.clear()

    def keys(self) -> Iterator[bytes]:
        """All of them. For tests."""
        yield from self._settled
        yield from self._pinned
        yield from self._arriving


class KeyList:
    """What is believed to lie in files: at most `limit` keys, in the order of their last use."""

    def __init__(self, limit: int, keys: Sequence[bytes] = ()) -> None:
        self._limit = limit
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        for key in keys:
            self.add(key)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def discard(self, key: bytes) -> None:
        self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()
