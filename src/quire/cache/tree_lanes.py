"""Where each lane stands in the prefix tree, and how what it computes enters there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.arrays import Int32, int32
from quire.cache.block_tables import BlockTables
from quire.cache.chain import Namespace
from quire.cache.node import NO_BLOCK, Node
from quire.cache.prefix_tree import PrefixTree, pack

_APART = np.iinfo(np.int32).max


class TreeLanes:
    """The tree's holds on blocks follow what it contains: both change here together.

    Attributes:
        inserted: int32 [lanes], tokens of each lane's blocks that the tree has. Of a lane that
            stands apart, more than there can be.
    """

    def __init__(self, tree: PrefixTree, groups: Sequence[BlockTables], num_lanes: int) -> None:
        self._tree = tree
        self._groups = groups
        self._size = tree.block_size
        self._slides = any(group.window is not None for group in groups)
        self._last: list[Node | None] = [None] * num_lanes
        self.inserted: Int32 = np.zeros(num_lanes, dtype=np.int32)

    def last(self, lane: int) -> Node:
        """The last node of an occupied lane."""
        last = self._last[lane]
        if last is None:
            raise RuntimeError(f"lane {lane} is empty")
        return last

    def apart(self, lane: int) -> bool:
        """Whether the tree has blocks of another lane for what this one has computed."""
        return bool(self.inserted[lane] == _APART)

    def enter(self, lane: int, namespace: Namespace, node: Node, whole: int) -> None:
        """An empty lane takes its place at the end of `whole` blocks, which is in `node`."""
        self._last[lane] = self._tree.enter(namespace, node, whole)
        self.inserted[lane] = whole * self._size

    def clear(self, lane: int) -> Node | None:
        """Empty the lane. Its last node, which it has not left yet."""
        last, self._last[lane] = self._last[lane], None
        self.inserted[lane] = 0
        return last

    # -- while a request runs ------------------------------------------------------------------

    def insert(self, lanes: Int32, tokens: Int32, lengths: Int32, ahead: bool) -> None:
        """As `BlockManager.insert`."""
        if len(lanes) > 1:
            # Lanes that stand apart have a negative count.
            counts = lengths // self._size - self.inserted[lanes] // self._size
            if (counts == 1).all():
                self._insert_one_each(lanes, tokens, ahead)
                return
        for lane, length in zip(lanes.tolist(), lengths.tolist(), strict=True):
            if self.inserted[lane] <= length - self._size:
                self._insert(lane, tokens[lane], length // self._size, ahead)

    def _insert_one_each(self, lanes: Int32, tokens: Int32, ahead: bool) -> None:
        """As `insert`, of lanes that have filled a block: gathered at once, as in steady decoding
        every step has some."""
        tree, size = self._tree, self._size
        starts = self.inserted[lanes]
        places = starts // size
        data = tokens[lanes[:, None], starts[:, None] + np.arange(size)].tobytes()
        found = [group.entry_each(lanes, places) for group in self._groups]
        packed = [ids.tobytes() for ids in found]
        apart: list[int] = []
        for i, lane in enumerate(lanes.tolist()):
            last, key = self.last(lane), data[i * 4 * size : (i + 1) * 4 * size]
            if key in last.children:
                apart.append(i)
                continue
            blocks = [ids[4 * i : 4 * i + 4] for ids in packed]
            self._last[lane] = tree.extend(last, key, blocks, ahead)
        self.inserted[lanes] = starts + size
        if apart:
            self.inserted[lanes[apart]] = _APART
            found = [np.delete(ids, apart) for ids in found]
        self.adjust(found)

    def _insert(self, lane: int, tokens: Int32, whole: int, ahead: bool) -> None:
        """Extend a lane's place to `whole` blocks, unless an equal prefix is there."""
        last, size = self.last(lane), self._size
        data = pack(tokens[last.end * size : whole * size])
        if bytes(data[: 4 * size]) in last.children:
            self.inserted[lane] = _APART
            return
        found = [group.entries(lane, last.end, whole) for group in self._groups]
        self._last[lane] = self._tree.extend(last, data, [ids.tobytes() for ids in found], ahead)
        self.inserted[lane] = whole * size
        self.adjust(found)

    # -- when it goes --------------------------------------------------------------------------

    def enter_rest(self, lane: int, tokens: Int32, length: int) -> None:
        """As `BlockManager.enter_rest`."""
        last = self.last(lane)
        first, whole = last.end, length // self._size
        if whole <= first:
            return
        data = pack(tokens[first * self._size : whole * self._size])
        last = self._last[lane] = self._tree.advance(last, data)
        if self._slides:
            self._adopt(lane, last, first)
        if whole > last.end:
            self._insert(lane, tokens, whole, False)

    def _adopt(self, lane: int, last: Node, first: int) -> None:
        """Give known nodes, from place `first` on, the window blocks that they have lost."""
        fresh: list[Int32] = []
        for g, group in enumerate(self._groups):
            begin = max(first, int(group.start[lane]))
            lost = np.flatnonzero(last.path(g, begin, last.end) == NO_BLOCK) + begin
            for place in lost.tolist():
                owner = last.upto(place + 1)
                owner.blocks[g][place - owner.start] = int(group.table[lane, place])
            fresh.append(group.table[lane, lost])
        self.adjust(fresh)

    def keep_tail(self, last: Node, tokens: bytes, blocks: Sequence[int]) -> Node:
        """Enter a partly filled block behind a node, of these packed tokens. Its node, or the one
        before it where the tree has such tokens."""
        tail = self._tree.add_tail(last, tokens, [int32([block]).tobytes() for block in blocks])
        if tail is None:
            return last
        self.adjust([int32([block]) for block in blocks])
        return tail

    def adjust(self, fresh: Sequence[Int32] = ()) -> None:
        """The pools follow the tree: per group what it holds now, and what it let go of itself."""
        for group, ids in zip(self._groups, fresh, strict=False):
            group.pool.hold(ids if group.window is None else ids[ids != NO_BLOCK])
        for blocks in self._tree.take_shed():
            for group, block in zip(self._groups, blocks, strict=True):
                if block != NO_BLOCK:
                    group.pool.drop(int32([block]))
