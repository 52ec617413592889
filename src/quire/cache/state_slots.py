"""The KV kind `state`: a recurrent state of fixed size, which every step overwrites.

A lane has one slot. Other lanes can resume from *checkpoints*: slots that hold the state after a
prefix and are never written again. The prefix tree has checkpoints in place of blocks. Entry i of a
path is the state after block i, or `NO_BLOCK`. The entry of a tail is the state after its tokens.

Checkpoints come from two sources:

- A request that ends or is preempted leaves its slot, if no step in flight changes the state.

- The body of a step copies the state at some positions of a prompt: near its end, at forks to other
  prompts, and at growing distances from the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.arrays import Int32, int32
from quire.cache.block_tables import BlockTables
from quire.cache.node import NO_BLOCK, Node
from quire.cache.prefix_tree import Match, pack
from quire.plan import STATE_SAVES, KVGroup

_FIRST_ANCHOR, _FACTOR = 64, 4
"""Distance of a prompt's last checkpoint from its end, in tokens, and the factor between the
distances of neighbouring checkpoints."""
_NONE = int32([])


@dataclass(slots=True)
class _Checkpoint:
    """A checkpoint of the tree.

    Attributes:
        credit: see `Checkpoints`.
        serial: serial number of the checkpoint's newest entry in the heap.
        node: the node that owned it when it was added.
        place: its place, in blocks from the root.
    """

    credit: int
    serial: int
    node: Node
    place: int


class Checkpoints:
    """One group's states that only the prefix tree holds, by slot.

    A checkpoint saves the tokens since the previous checkpoint on its path. The checkpoint with the
    least credit is evicted first (GreedyDual, Cao and Irani 1997). When a checkpoint is used, its
    credit becomes the number of tokens that it saves, plus the credit of the last evicted
    checkpoint. So checkpoints that save few tokens are evicted soon, and unused ones later.

    Attributes:
        saves: int32 [slots], number of tokens that each slot's checkpoint saved at its last use.
            An eviction does not reset it.
        on_take: called with the block hash and the slot of each checkpoint that is evicted while
            its node stays. The next step may overwrite the slot.
    """

    exact = True

    def __init__(self, group: int, block_size: int, slots: int) -> None:
        self._group = group
        self._size = block_size
        self._entries: dict[int, _Checkpoint] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._spent = 0
        self._serial = 0
        self.saves: Int32 = np.zeros(slots, dtype=np.int32)
        self.on_take: Callable[[bytes, int], None] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def places(self) -> dict[int, tuple[Node, int]]:
        """Returns the node and the place of each slot."""
        return {slot: (entry.node, entry.place) for slot, entry in self._entries.items()}

    def add(self, last: Node, place: int, block: int) -> None:
        owner = last.upto(place + 1)
        self._entries[block] = _Checkpoint(0, 0, owner, place)
        self.touch(block)

    def touch(self, slot: int) -> None:
        """Records the use of a checkpoint."""
        entry = self._entries[slot]
        self.saves[slot] = self._saves(entry)
        entry.credit = self._spent + int(self.saves[slot])
        self._serial += 1
        entry.serial = self._serial
        if len(self._heap) > 4 * len(self._entries) + 64:
            self._heap = [
                (each.credit, each.serial, slot)
                for slot, each in self._entries.items()
                if each is not entry
            ]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (entry.credit, entry.serial, slot))

    def _saves(self, entry: _Checkpoint) -> int:
        """Returns the number of tokens that a checkpoint saves a request."""
        node = entry.node.upto(entry.place + 1)
        before = np.flatnonzero(node.path(self._group, 0, entry.place) != NO_BLOCK)
        return self._size * (entry.place - (int(before[-1]) if len(before) else -1))

    def discard(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._entries.pop(block, None)

    @property
    def least(self) -> int:
        """The credit of the checkpoint that would be evicted next."""
        while self._heap[0][2] not in self._entries or (
            self._entries[self._heap[0][2]].serial != self._heap[0][1]
        ):
            heapq.heappop(self._heap)
        return self._heap[0][0]

    def would_stay(self, tokens: int) -> bool:
        """Whether a new checkpoint that saves `tokens` tokens would outlast another checkpoint."""
        return self._spent + tokens > self.least

    def take(self) -> int:
        self._spent = max(self._spent, self.least)
        slot = heapq.heappop(self._heap)[2]
        entry = self._entries.pop(slot)
        owner = entry.node.upto(entry.place + 1)
        owner.blocks[self._group][entry.place - owner.start] = NO_BLOCK
        if self.on_take is not None:
            block_hash = owner.block_hash(entry.place - owner.start, 4 * self._size)
            self.on_take(block_hash, slot)
        return slot

    def resumable(self, blocks: Int32, held: Int32) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """See `SparseBlocks`: a request can resume only at a checkpoint."""
        good = np.concatenate([[True], blocks != NO_BLOCK])
        # A match that ends within a block ends with a tail, which has its own checkpoint.
        good[-1] |= int(held[-1]) > len(blocks) * self._size
        return good


@dataclass(slots=True)
class _NewCheckpoint:
    """A checkpoint that the tree does not have yet.

    Attributes:
        place: its place, in blocks from the root.
        slot: the slot that holds it.
        tokens: int32, the lane's tokens.
    """

    place: int
    slot: int
    tokens: Int32


class StateSlots(BlockTables):
    """The slot of each lane, and the checkpoints of its prompt.

    A lane's table has the lane's slot, then pairs of a position and a slot. The body copies the
    state at that position to that slot.
    """

    sparse: Checkpoints
    grows = False

    def __init__(
        self, group: KVGroup, num_blocks: int, num_lanes: int, max_len: int, index: int = 0
    ) -> None:
        super().__init__(group, num_blocks, num_lanes, max_len, index)
        self._size = group.tokens_per_block
        self.block_size = 1 << 30
        """A lane's one slot holds all of its tokens."""
        self.table = np.empty((num_lanes, 1), dtype=np.int32)
        self.sparse = Checkpoints(index, self._size, num_blocks)
        self._branch: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self._from: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self._saved: dict[int, list[_NewCheckpoint]] = {}
        """By lane, the checkpoints that the tree does not have yet."""
        self._new: list[int] = []
        """Lanes with checkpoints of the next plan."""

    def admitted_tokens(self, known: int, chunk_end: int) -> int:
        return 1

    # -- resuming from a checkpoint ------------------------------------------------------------

    def share(self, match: Match, computed: int) -> tuple[int, Int32]:
        return 0, _NONE

    def source(self, match: Match) -> int | None:
        if match.source is not None:
            slot = match.source[self.index]
        elif match.whole:
            slot = int(match.node.path(self.index, match.whole - 1, match.whole)[0])
        else:
            return None
        if slot == NO_BLOCK:
            return None  # A transfer brings the state to a loading lane.
        self.sparse.touch(slot)
        return slot

    def note(self, lane: int, match: Match) -> None:
        self._from[lane] = match.length
        self._branch[lane] = match.known * self._size

    def can_fork(self, parent: int, length: int) -> bool:
        return False  # The parent's state has gone past this position.

    def append(self, lanes: Int32, counts: Int32, total: int) -> None:
        super().append(lanes, counts, total)
        _, starts, _, ids = self._appends.pop()
        # Zeros replace the pairs of the request that had the lane before.
        width = 1 + 2 * STATE_SAVES
        entries = np.zeros((total, width), dtype=np.int32)
        entries[:, 0] = ids
        counts = np.full(total, width, dtype=np.int32)
        self._appends.append((lanes, starts, counts, entries.reshape(-1)))

    # -- checkpoints inside a prompt -----------------------------------------------------------

    def compute(self, lane: int, tokens: Int32, start: int, end: int, known: int) -> None:
        pairs: list[int] = []
        for place, needed in self._places(lane, start, end, known):
            if len(pairs) == 2 * STATE_SAVES:
                break
            slot = self._take(place * self._size - start, needed)
            if slot is None:
                continue
            pairs += [place * self._size, slot]
            self._saved.setdefault(lane, []).append(_NewCheckpoint(place - 1, slot, tokens))
        if pairs:
            self._new.append(lane)
            one = int32([lane]), int32([1]), int32([len(pairs)]), int32(pairs)
            self._appends.append(one)

    def _places(self, lane: int, start: int, end: int, known: int) -> list[tuple[int, bool]]:
        """Returns where to leave checkpoints while positions `start` to `end` are computed.

        Each entry is a place, in blocks from the root, and whether its checkpoint may evict any
        other checkpoint. The most useful places come first.
        """
        size = self._size
        places = {int(self._branch[lane]) // size: True, (known - 1) // size: True}
        distance = _FIRST_ANCHOR
        while known - distance >= max(_FIRST_ANCHOR, int(self._from[lane])):
            places.setdefault((known - distance) // size, False)
            distance *= _FACTOR
        least = max(start, int(self._from[lane]))
        return [(at, needed) for at, needed in places.items() if least < at * size <= end]

    def _take(self, tokens: int, needed: bool) -> int | None:
        if not self.pool.num_free:
            if not len(self.sparse) or not (needed or self.sparse.would_stay(tokens)):
                return None
            self.pool.drop(int32([self.sparse.take()]))
        return int(self.pool.take(1)[0])

    def planned(self, last: Callable[[int], Node]) -> None:
        # The next plan may copy these checkpoints because its copies run after this plan's body.
        for lane in self._new:
            self._enter(lane, last(lane))
        self._new = []

    def _enter(self, lane: int, last: Node) -> None:
        """Enters a lane's new checkpoints, as far as the tree contains their tokens."""
        rest: list[_NewCheckpoint] = []
        for saved in self._saved.pop(lane, []):
            node, known = last, last.end
            if known <= saved.place:
                data = pack(saved.tokens[known * self._size : (saved.place + 1) * self._size])
                node, known, _ = last.follow(data, 4 * self._size)
            if known <= saved.place:
                rest.append(saved)
            else:
                self._put(node, saved.place, saved.slot)
        if rest:
            self._saved[lane] = rest

    def _put(self, last: Node, place: int, slot: int) -> None:
        """Gives a slot to the tree, at a place on the path to `last`, unless the place already has
        a slot."""
        owner = last.upto(place + 1)
        slots = owner.blocks[self.index]
        if slots[place - owner.start] == NO_BLOCK:
            slots[place - owner.start] = slot
            self.sparse.add(owner, place, slot)
        else:
            self.pool.drop(int32([slot]))

    # -- block table entries -------------------------------------------------------------------

    def entries(self, lane: int, first: int, last: int) -> Int32:
        return np.full(last - first, NO_BLOCK, dtype=np.int32)

    def entries_at(self, lanes: Int32, places: Int32) -> Int32:
        return np.full(len(lanes), NO_BLOCK, dtype=np.int32)

    def evictable(self, idle: int) -> int:
        return len(self.sparse)

    # -- release -------------------------------------------------------------------------------

    def leave(self, lane: int, last: Node) -> None:
        self._enter(lane, last)
        for saved in self._saved.pop(lane, []):
            self.pool.drop(int32([saved.slot]))

    def detach(self, lane: int, exact: bool) -> Int32:
        held = super().detach(lane, exact)
        if exact:
            return held
        self.pool.drop(held)
        return _NONE

    def tail(self, blocks: Int32, index: int) -> int:
        return NO_BLOCK  # `drop` gives the slot to the tree.

    def drop(self, blocks: Int32, start: int, last: Node, length: int) -> None:
        if len(blocks) and last.start * self._size + last.tokens == length:
            self._put(last, last.end - 1, int(blocks[0]))
        else:
            self.pool.drop(blocks)
