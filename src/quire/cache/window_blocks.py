"""The KV kind `window`: lanes keep the blocks of their last positions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from quire.arrays import Int32
from quire.cache.block_tables import BlockTables
from quire.cache.node import NO_BLOCK, Node
from quire.errors import ConfigError
from quire.plan import KVGroup


class WindowBlocks:
    """One group's blocks that only the prefix tree holds, in the order of their release.

    A node can lose any of them, and keeps the blocks of the other groups. A block is stored with
    its place, in blocks from the root, and with the node that owned it when it was added. If that
    node was split, the owner is an ancestor.
    """

    exact = False

    def __init__(self, group: int, window: int, block_size: int) -> None:
        self._group = group
        self._window = window
        self._size = block_size
        self._blocks: OrderedDict[int, tuple[Node, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def places(self) -> dict[int, tuple[Node, int]]:
        """Returns the node and the place of each block."""
        return dict(self._blocks)

    def add(self, last: Node, place: int, block: int) -> None:
        """Adds a block that its last request released, if the tree holds the block.

        Args:
            last: a node at or after the block on its path.
            place: the block's place, in blocks from the root.
        """
        if place < last.end:
            owner = last.upto(place + 1)
            if owner.blocks[self._group][place - owner.start] == block:
                self._blocks[block] = owner, place

    def discard(self, blocks: Iterable[int]) -> None:
        """Removes blocks that requests hold again, or that the tree has evicted."""
        for block in blocks:
            self._blocks.pop(block, None)

    def take(self) -> int:
        """Takes the least recently released block from its node."""
        block, (node, place) = self._blocks.popitem(last=False)
        owner = node.upto(place + 1)
        owner.blocks[self._group][place - owner.start] = NO_BLOCK
        return block

    def resumable(self, blocks: Int32, held: Int32) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """See `SparseBlocks`: all blocks of the last window must be there."""
        lost = blocks == NO_BLOCK
        count = len(blocks)
        # For each place, the first token of the unbroken run of blocks that ends there.
        begins = np.maximum.accumulate(np.where(lost, np.arange(1, count + 1), 0))
        begins = np.concatenate([[0], begins]) * self._size
        good: np.ndarray[Any, np.dtype[np.bool_]] = begins == 0
        return good | (held - begins >= self._window - 1)


class WindowTables(BlockTables):
    """The blocks of a group of sliding-window layers."""

    window: int
    sparse: WindowBlocks

    def __init__(
        self, group: KVGroup, num_blocks: int, num_lanes: int, max_len: int, index: int = 0
    ) -> None:
        super().__init__(group, num_blocks, num_lanes, max_len, index)
        if group.window is None or group.window < 1:
            raise ConfigError(f"a window group needs a window of at least 1, got {group.window}")
        self.window = group.window
        self.sparse = WindowBlocks(index, group.window, group.tokens_per_block)

    def first_needed(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.block_size

    def most_needed(self, tokens: int, chunk: int) -> int:
        # A window and a chunk need not start on a block boundary.
        return min(self.blocks(tokens), self.blocks(self.window - 1 + chunk) + 1)

    def admitted_tokens(self, known: int, chunk_end: int) -> int:
        return chunk_end

    def can_fork(self, parent: int, length: int) -> bool:
        return int(self.start[parent]) <= self.first_needed(length)

    def begin(self, lane: int, start: int, shared: Int32) -> None:
        super().begin(lane, start, shared)
        self.sparse.discard(shared.tolist())

    def entries(self, lane: int, first: int, last: int) -> Int32:
        places = np.arange(first, last, dtype=np.int32)
        entries = self.table[lane, first:last].copy()
        entries[places < self.start[lane]] = -1
        return entries

    def entries_at(self, lanes: Int32, places: Int32) -> Int32:
        entries = self.table[lanes, places]
        entries[places < self.start[lanes]] = -1
        return entries

    def slide(self, lanes: Int32, positions: Int32, last: Callable[[int], Node]) -> None:
        needed = np.maximum(positions - (self.window - 1), 0) // self.block_size
        counts = np.minimum(needed, self.end[lanes]) - self.start[lanes]
        out = counts > 0
        for lane, count in zip(lanes[out].tolist(), counts[out].tolist(), strict=True):
            start = int(self.start[lane])
            self.start[lane] = start + count
            self._drop_each(self.table[lane, start : start + count], start, last(lane))

    def adopt(self, lane: int, last: Node, first: int) -> Int32:
        begin = max(first, int(self.start[lane]))
        lost = np.flatnonzero(last.path(self.index, begin, last.end) == NO_BLOCK) + begin
        for place in lost.tolist():
            owner = last.upto(place + 1)
            owner.blocks[self.index][place - owner.start] = int(self.table[lane, place])
        adopted: Int32 = self.table[lane, lost]
        return adopted

    def drop(self, blocks: Int32, start: int, last: Node, length: int) -> None:
        self._drop_each(blocks, start, last)

    def _drop_each(self, blocks: Int32, start: int, last: Node) -> None:
        self.pool.drop(blocks)
        for i, block in enumerate(blocks.tolist()):
            if self.pool.holders[block] == 1:
                self.sparse.add(last, start + i, block)

    def evictable(self, idle: int) -> int:
        return len(self.sparse)
