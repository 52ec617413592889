"""Each lane's last node in the prefix tree, and how computed blocks enter the tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.arrays import Int32, int32
from quire.cache.block_hash import Namespace
from quire.cache.block_tables import BlockTables
from quire.cache.node import NO_BLOCK, Node
from quire.cache.prefix_tree import PrefixTree, pack

_DIVERGED = np.iinfo(np.int32).max


class TreeLanes:
    """Changes the tree and the pools' holder counts together.

    Attributes:
        inserted: int32 [lanes], number of each lane's tokens whose blocks are in the tree. It is
            larger than any length for a lane that has diverged.
    """

    def __init__(self, tree: PrefixTree, groups: Sequence[BlockTables], num_lanes: int) -> None:
        self._tree = tree
        self._groups = groups
        self._size = tree.block_size
        self._last: list[Node | None] = [None] * num_lanes
        self.inserted: Int32 = np.zeros(num_lanes, dtype=np.int32)

    def last(self, lane: int) -> Node:
        """Returns the last node of an occupied lane."""
        last = self._last[lane]
        if last is None:
            raise RuntimeError(f"lane {lane} is empty")
        return last

    def diverged(self, lane: int) -> bool:
        """Whether the tree has another lane's blocks for tokens that this lane has computed."""
        return bool(self.inserted[lane] == _DIVERGED)

    def enter(self, lane: int, namespace: Namespace, node: Node, whole: int) -> None:
        """Places an empty lane after its first `whole` blocks, the last of which `node` holds."""
        self._last[lane] = self._tree.enter(namespace, node, whole)
        self.inserted[lane] = whole * self._size

    def close(self, lanes: Int32) -> None:
        """Inserts no more blocks of these lanes. The caller releases them without tokens."""
        self.inserted[lanes] = _DIVERGED

    def clear(self, lane: int) -> Node | None:
        """Empties the lane. Returns its last node, which the caller must still `leave`."""
        last, self._last[lane] = self._last[lane], None
        self.inserted[lane] = 0
        return last

    # -- while a request runs ------------------------------------------------------------------

    def insert(self, lanes: Int32, tokens: Int32, lengths: Int32, ahead: bool) -> None:
        """Inserts blocks; see `BlockManager.insert`."""
        if len(lanes) > 1:
            # Diverged lanes have a negative count.
            counts = lengths // self._size - self.inserted[lanes] // self._size
            if (counts == 1).all():
                self._insert_one_each(lanes, tokens, ahead)
                return
        for lane, length in zip(lanes.tolist(), lengths.tolist(), strict=True):
            if self.inserted[lane] <= length - self._size:
                self._insert(lane, tokens[lane], length // self._size, ahead)

    def _insert_one_each(self, lanes: Int32, tokens: Int32, ahead: bool) -> None:
        """Inserts one block of each lane, all at once, because nearly every step of a full batch
        fills blocks of some lanes."""
        tree, size = self._tree, self._size
        starts = self.inserted[lanes]
        places = starts // size
        data = tokens[lanes[:, None], starts[:, None] + np.arange(size)].tobytes()
        fresh = [group.entries_at(lanes, places) for group in self._groups]
        packed = [ids.tobytes() for ids in fresh]
        diverged: list[int] = []
        for i, lane in enumerate(lanes.tolist()):
            last, key = self.last(lane), data[i * 4 * size : (i + 1) * 4 * size]
            if key in last.children:
                diverged.append(i)
                continue
            blocks = [ids[4 * i : 4 * i + 4] for ids in packed]
            self._last[lane] = tree.extend(last, key, blocks, ahead)
        self.inserted[lanes] = starts + size
        if diverged:
            self.inserted[lanes[diverged]] = _DIVERGED
            fresh = [np.delete(ids, diverged) for ids in fresh]
        self.adjust(fresh)

    def _insert(self, lane: int, tokens: Int32, whole: int, ahead: bool) -> None:
        """Extends a lane's path in the tree to `whole` blocks, unless another lane's blocks are
        there already."""
        last, size = self.last(lane), self._size
        data = pack(tokens[last.end * size : whole * size])
        if bytes(data[: 4 * size]) in last.children:
            self.inserted[lane] = _DIVERGED
            return
        fresh = [group.entries(lane, last.end, whole) for group in self._groups]
        self._last[lane] = self._tree.extend(last, data, [ids.tobytes() for ids in fresh], ahead)
        self.inserted[lane] = whole * size
        self.adjust(fresh)

    # -- release -------------------------------------------------------------------------------

    def enter_rest(self, lane: int, tokens: Int32, length: int) -> None:
        """Enters a lane's remaining blocks; see `BlockManager.enter_rest`."""
        last = self.last(lane)
        first, whole = last.end, length // self._size
        if whole <= first:
            return
        data = pack(tokens[first * self._size : whole * self._size])
        last = self._last[lane] = self._tree.advance(last, data)
        self.adjust([group.adopt(lane, last, first) for group in self._groups])
        if whole > last.end:
            self._insert(lane, tokens, whole, False)

    def keep_tail(self, last: Node, tokens: bytes, blocks: Sequence[int]) -> Node:
        """Enters a partly filled block with these packed tokens after a node. Returns its node, or
        `last` if a child of `last` begins with the same tokens."""
        tail = self._tree.add_tail(last, tokens, [int32([block]).tobytes() for block in blocks])
        if tail is None:
            return last.children.get(tokens, last)
        self.adjust([int32([block]) for block in blocks])
        return tail

    def adjust(self, fresh: Sequence[Int32] = ()) -> None:
        """Updates the pools: the tree holds `fresh` blocks, per group, and has dropped tails."""
        for group, ids in zip(self._groups, fresh, strict=False):
            group.pool.hold(ids if group.sparse is None else ids[ids != NO_BLOCK])
        for blocks in self._tree.take_dropped_tails():
            for group, block in zip(self._groups, blocks, strict=True):
                if block != NO_BLOCK:
                    group.pool.drop(int32([block]))
