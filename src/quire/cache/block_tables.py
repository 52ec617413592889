"""One KV group's blocks of every lane."""

from __future__ import annotations

import numpy as np

from quire.arrays import Int32, int32
from quire.cache.block_pool import BlockPool
from quire.plan import BlockAppends, BlockCopies, KVGroup

_NONE = int32([])
_NO_APPENDS = BlockAppends(lanes=_NONE, starts=_NONE, counts=_NONE, ids=_NONE)
_NO_COPIES = BlockCopies(src=_NONE, dst=_NONE)


class BlockTables:
    """The blocks that each lane holds in one group, and the changes that the next plan must carry.

    Attributes:
        table: int32 [lanes, blocks of the longest sequence]; a lane holds its entries from `start`
            up to `end`. Entries before `start` have left the window.
        start, end: int32 [lanes], in blocks. booked: int32 [lanes], `end` in tokens.
    """

    def __init__(self, group: KVGroup, num_blocks: int, num_lanes: int, max_len: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.window = group.window if group.kind == "window" else None
        self.block_size = group.tokens_per_block
        width = -(-max_len // self.block_size)
        self.table: Int32 = np.empty((num_lanes, width), dtype=np.int32)
        self.start: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self.end: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self.booked: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self._appends: list[tuple[Int32, Int32, Int32, Int32]] = []
        self._copies: list[tuple[int, int]] = []

    def first_needed(self, position: int) -> int:
        """Returns the first block that a query at `position` reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def blocks(self, tokens: int) -> int:
        """Returns how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def most_needed(self, tokens: int, chunk: int) -> int:
        """Returns the most blocks that a sequence of `tokens` tokens holds at once when it is
        computed at most `chunk` tokens at a time."""
        if self.window is None:
            return self.blocks(tokens)
        # A window and a chunk need not start on a block boundary.
        return min(self.blocks(tokens), self.blocks(self.window - 1 + chunk) + 1)

    def held(self, lane: int) -> Int32:
        """Returns the lane's blocks, int32 [end - start]."""
        return self.table[lane, self.start[lane] : self.end[lane]]

    def entries(self, lane: int, first: int, last: int) -> Int32:
        """Returns a lane's blocks `first` to `last - 1`, int32; -1 for blocks that have left the
        window."""
        found = self.table[lane, first:last]
        if self.window is not None:
            places = np.arange(first, last, dtype=np.int32)
            found = np.where(places < self.start[lane], np.int32(-1), found)
        return found

    def entry_each(self, lanes: Int32, places: Int32) -> Int32:
        """Returns one block of each lane, int32 [n]; -1 as in `entries`."""
        found = self.table[lanes, places]
        if self.window is not None:
            found[places < self.start[lanes]] = -1
        return found

    def lacking(self, lanes: Int32, ends: Int32) -> tuple[Int32, Int32, int]:
        """Returns (lanes, counts, total) of the blocks that these distinct lanes lack to reach
        `ends` tokens; only of lanes that lack some."""
        short = ends > self.booked[lanes]
        if not short.any():
            return _NONE, _NONE, 0
        lanes = lanes[short]
        counts: Int32 = -(-ends[short] // self.block_size) - self.end[lanes]
        return lanes, counts, int(counts.sum())

    def append(self, lanes: Int32, counts: Int32, total: int) -> None:
        """Gives each lane `counts` fresh blocks, `total` in all."""
        ids = self.pool.take(total)
        starts = self.end[lanes]
        if total == len(lanes):
            self.table[lanes, starts] = ids
        else:
            # Ragged: an entry's column is its lane's start plus its place within the lane's share.
            before = np.cumsum(counts) - counts
            columns = np.repeat(starts - before, counts) + np.arange(total, dtype=np.int32)
            self.table[np.repeat(lanes, counts), columns] = ids
        ends = starts + counts
        self.end[lanes] = ends
        self.booked[lanes] = ends * self.block_size
        self._appends.append((lanes, starts, counts, ids))

    def begin(self, lane: int, start: int, shared: Int32) -> None:
        """Gives an empty lane these blocks of others, from entry `start` on."""
        end = start + len(shared)
        self.pool.hold(shared)
        self.table[lane, start:end] = shared
        self.start[lane] = start
        self.end[lane] = end
        self.booked[lane] = end * self.block_size
        if len(shared):
            one = int32([lane]), int32([start]), int32([len(shared)]), shared.copy()
            self._appends.append(one)

    def copy(self, src: int, dst: int) -> None:
        """Makes the next plan copy a block before its body runs."""
        self._copies.append((src, dst))

    def take_outside_window(self, lanes: Int32, positions: Int32) -> tuple[Int32, Int32, Int32]:
        """Takes from these distinct lanes the entries that no query from `positions` on reads.
        Returns (lanes, indices, blocks) of the entries, still held in the pool."""
        if self.window is None:
            return _NONE, _NONE, _NONE
        needed = np.maximum(positions - (self.window - 1), 0) // self.block_size
        counts = np.minimum(needed, self.end[lanes]) - self.start[lanes]
        out = counts > 0
        if not out.any():
            return _NONE, _NONE, _NONE
        lanes, counts = lanes[out], counts[out]
        starts = self.start[lanes]
        before = np.cumsum(counts) - counts
        columns = np.repeat(starts - before, counts) + np.arange(int(counts.sum()), dtype=np.int32)
        owners = np.repeat(lanes, counts)
        self.start[lanes] = starts + counts
        return owners, columns, self.table[owners, columns]

    def clear(self, lane: int) -> None:
        self.start[lane] = self.end[lane] = self.booked[lane] = 0

    def mark(self) -> int:
        """Returns a position in the appends, for `forget_appends`."""
        return len(self._appends)

    def forget_appends(self, mark: int) -> None:
        """Leaves what was appended since `mark` out of the next plan."""
        del self._appends[mark:]

    def take_appends(self) -> BlockAppends:
        """Returns the entries appended since the last call."""
        if not self._appends:
            return _NO_APPENDS
        if len(self._appends) == 1:
            lanes, starts, counts, ids = self._appends[0]
        else:
            lanes, starts, counts, ids = map(np.concatenate, zip(*self._appends, strict=True))
        self._appends = []
        return BlockAppends(lanes=lanes, starts=starts, counts=counts, ids=ids)

    def take_copies(self) -> BlockCopies:
        """Returns the copies asked for since the last call."""
        if not self._copies:
            return _NO_COPIES
        src, dst = zip(*self._copies, strict=True)
        self._copies = []
        return BlockCopies(src=int32(src), dst=int32(dst))
