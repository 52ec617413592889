"""An index of the blocks in the host's pool, by block hash. Touches no bytes."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class HostTier:
    """Slots of the host's pool, found by block hash.

    An entry is *arriving* while its bytes are copied into the slot, *pinned* while somebody reads
    the slot, and otherwise *resident*. Resident entries are in the order of their last use. If no
    slot is free for a new entry, the oldest resident entry is evicted. So no slot changes while a
    copy uses it. Every operation is O(1) per block.

    Attributes:
        num_slots: number of slots.
        evictions: number of entries evicted to make room.
    """

    def __init__(self, slots: int) -> None:
        self.num_slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._resident: OrderedDict[bytes, int] = OrderedDict()
        self._pinned: dict[bytes, tuple[int, int]] = {}
        self._arriving: dict[bytes, int] = {}
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._resident) + len(self._pinned) + len(self._arriving)

    def __contains__(self, block_hash: bytes) -> bool:
        return (
            block_hash in self._resident
            or block_hash in self._pinned
            or block_hash in self._arriving
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holds(self, block_hash: bytes) -> bool:
        """Whether the block can be read."""
        return block_hash in self._resident or block_hash in self._pinned

    def note(self, block_hash: bytes, saves: int) -> None:
        """Records a use of a block, or its arrival.

        Args:
            saves: number of tokens that it saves a request.
        """
        self.touch(block_hash)

    def touch(self, block_hash: bytes) -> None:
        """Records a use of the block."""
        if block_hash in self._resident:
            self._resident.move_to_end(block_hash)

    def expect(self, block_hash: bytes) -> int | None:
        """Reserves a slot for a block that is about to arrive and has no entry yet.

        Evicts an entry if no slot is free. Returns None if copies use all slots.
        """
        if self._free:
            slot = self._free.pop()
        elif self._resident:
            slot = self._evict()
            self.evictions += 1
        else:
            return None
        self._arriving[block_hash] = slot
        return slot

    def _evict(self) -> int:
        """Evicts the first resident entry in eviction order. Returns its slot."""
        return self._resident.popitem(last=False)[1]

    def arrived(self, block_hash: bytes, good: bool) -> None:
        """Records that an expected block has arrived (`good`), or that its copy has failed."""
        slot = self._arriving.pop(block_hash)
        if good:
            self._resident[block_hash] = slot
        else:
            self._free.append(slot)

    def pin(self, block_hash: bytes) -> int:
        """Returns the slot of a block that can be read, and protects it until `unpin`."""
        slot, count = self._pinned.get(block_hash) or (self._resident.pop(block_hash), 0)
        self._pinned[block_hash] = slot, count + 1
        return slot

    def unpin(self, block_hash: bytes, good: bool = True) -> None:
        """Removes a reader. When the last one leaves, the block stays only if it is `good`."""
        slot, count = self._pinned.pop(block_hash)
        if count > 1:
            self._pinned[block_hash] = slot, count - 1
        elif good:
            self._resident[block_hash] = slot
        else:
            self._free.append(slot)

    def oldest(self, most: int) -> list[bytes]:
        """Returns up to `most` resident blocks, in the order of eviction."""
        return [block_hash for block_hash, _ in zip(self._resident, range(most), strict=False)]

    def drop(self, block_hash: bytes) -> None:
        """Evicts a resident entry."""
        self._free.append(self._resident.pop(block_hash))

    def clear(self) -> None:
        """Evicts every resident entry. Other entries stay until their copies end."""
        self._free.extend(self._resident.values())
        self._resident.clear()

    def hashes(self) -> Iterator[bytes]:
        """Yields all blocks. For tests."""
        yield from self._resident
        yield from self._pinned
        yield from self._arriving


class StateTier(HostTier):
    """Slots for recurrent states.

    States that save few tokens and were not used for a long time are evicted first (GreedyDual, as
    in `Checkpoints`). An eviction is O(slots), which is cheap because there are few slots.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._credits: dict[bytes, tuple[int, int]] = {}
        """By hash, the number of tokens that a state saves, and its credit. At most two entries per
        slot."""
        self._spent = 0

    def note(self, block_hash: bytes, saves: int) -> None:
        self._credits[block_hash] = saves, self._spent + saves
        if len(self._credits) > 2 * self.num_slots:
            held = (name for name in self.hashes() if name in self._credits)
            self._credits = {name: self._credits[name] for name in held}

    def touch(self, block_hash: bytes) -> None:
        self.note(block_hash, self._credits.get(block_hash, (0, 0))[0])

    def _credit(self, block_hash: bytes) -> int:
        return self._credits.get(block_hash, (0, 0))[1]

    def _evict(self) -> int:
        block_hash = min(self._resident, key=self._credit)
        self._spent = max(self._spent, self._credit(block_hash))
        return self._resident.pop(block_hash)

    def oldest(self, most: int) -> list[bytes]:
        return heapq.nsmallest(most, self._resident, key=self._credit)


class HashList:
    """Hashes of the blocks that files should hold, at most `limit`, in the order of last use."""

    def __init__(self, limit: int, hashes: Sequence[bytes] = ()) -> None:
        self._limit = limit
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        for block_hash in hashes:
            self.add(block_hash)

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._hashes

    def add(self, block_hash: bytes) -> None:
        self._hashes[block_hash] = None
        self._hashes.move_to_end(block_hash)
        if len(self._hashes) > self._limit:
            self._hashes.popitem(last=False)

    def discard(self, block_hash: bytes) -> None:
        self._hashes.pop(block_hash, None)

    def clear(self) -> None:
        self._hashes.clear()
